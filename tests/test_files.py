"""Files and folders that are written whole, whatever stands where they are written; digests; locks."""

import hashlib
import os
import re
import stat

import pytest
from helpers.odd_files import ODD, put_odd
from PIL import Image

from debias_diffusion import files
from debias_diffusion.app.contact_sheet import write_contact_sheets
from debias_diffusion.app.prompts import read_prompts
from debias_diffusion.clip.weight_files import read_state
from debias_diffusion.data.images import ImageFolder
from debias_diffusion.data.sources import open_data
from debias_diffusion.errors import UserError
from debias_diffusion.eval.retrieval_sets import read_retrieval_set
from debias_diffusion.methods import import_methods
from debias_diffusion.pipelines.rendering.png import read_settings
from research.reproduce.papers import Column, read_yaml

ENDED = 999_999_999  # a process that no system has


def test_what_killed_processes_left_is_removed_by_the_next_write(tmp_path):
    mine = files.unfinished(tmp_path, "a.json", "tmp").name

    def of_process(name, process):
        return tmp_path / name.replace(f"-{os.getpid()}.", f"-{process}.")

    left = [of_process(files.unfinished(tmp_path, name, "tmp").name, ENDED) for name in ("a.json", "x" * 255)]
    kept = [
        of_process(mine, os.getppid()),  # which lives, and may be writing it
        of_process(mine.replace(files.MACHINE, "another-machine"), ENDED),
        of_process(mine[1:], ENDED),  # of the user, because it is not hidden
    ]
    for file in (*left, *kept):
        file.write_text("half")
    files.write_json(tmp_path / "a.json", [1])
    assert sorted(os.listdir(tmp_path)) == sorted(["a.json", *(file.name for file in kept)])


@pytest.fixture
def calls(monkeypatch):
    """The calls of `os.fsync` and `os.replace`, as (what, the inode of a file or folder): [("sync", 7), ...]"""
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(("sync", os.fstat(fd).st_ino)) or fsync(fd))
    monkeypatch.setattr(os, "replace", lambda a, b: calls.append(("rename", os.stat(a).st_ino)) or replace(a, b))
    return calls


def test_a_file_or_folder_is_on_the_disk_before_it_has_its_name(tmp_path, calls):
    files.write_json(tmp_path / "a.json", [1])
    file = (tmp_path / "a.json").stat().st_ino
    assert calls == [("sync", file), ("rename", file)]
    for content in ("1", "2"):
        calls.clear()
        with files.atomic_folder(tmp_path / "a") as folder:
            (folder / "b" / "c").mkdir(parents=True)
            (folder / "b" / "c" / "z").write_text(content)
        renamed = calls.index(("rename", (tmp_path / "a").stat().st_ino))
        parts = {path.stat().st_ino for path in (tmp_path / "a", *(tmp_path / "a").rglob("*"))}
        assert {inode for what, inode in calls[:renamed] if what == "sync"} >= parts
    # or a power failure could undo the renames, and not the removal of the old folder
    assert calls[renamed + 1 :] == [("sync", tmp_path.stat().st_ino)]


@pytest.mark.parametrize("kind", ["file", ".", "nowhere", "pipe"])  # links to these, and a pipe
def test_nothing_is_written_through_a_link_or_into_a_pipe(tmp_path, kind):
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.mkdir()
    out.mkdir()
    (mine / "file").write_text("precious")
    unfinished = [files.unfinished(out, *part) for part in (("a.json", "tmp"), ("a", "tmp"), ("a", "old"))]
    for place in (out / "a.json", *unfinished):
        files.remove_path(out / "a.json")
        os.mkfifo(place) if kind == "pipe" else place.symlink_to(mine / kind)
        files.write_json(out / "a.json", [1])
        with files.atomic_folder(out / "a") as folder:
            (folder / "x").write_text("1")
        assert stat.S_ISREG((out / "a.json").lstat().st_mode) and os.listdir(out / "a") == ["x"]
        assert sorted(os.listdir(out)) == ["a", "a.json"]
    (out / "log").symlink_to(mine / "file")
    with pytest.raises(UserError, match="no regular file"):
        files.append(out / "log", "{}")
    assert os.listdir(mine) == ["file"] and (mine / "file").read_text() == "precious"


def test_digests_are_of_names_and_contents_not_of_hidden_files_and_follow_links(tmp_path):
    for name, content in {"a": b"1", "b/c": b"2", "b.d": b"3", ".hidden": b"4", "b/.e/f": b"5"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "broken").symlink_to("nowhere")
    before = files.path_digest(tmp_path)
    assert before == "f6cb6d95d881f8d666f3dc4e6c8e60fee933ab1fc52b4cfb5aaab8435e242548"
    (tmp_path / "b").rename(tmp_path / ".elsewhere")
    (tmp_path / "b").symlink_to(tmp_path / ".elsewhere")
    (tmp_path / "b" / "up").symlink_to(tmp_path / "b")  # a circle
    assert files.path_digest(tmp_path) == before
    (tmp_path / "b" / "c").write_bytes(b"6")
    assert files.path_digest(tmp_path) != before
    digest = hashlib.sha256(rb'{"a": "\u00e4", "b": [1, null]}').hexdigest()
    assert files.json_digest({"b": [1, None], "a": "\u00e4"}) == digest


def test_a_stamp_changes_although_the_time_is_set_back(tmp_path):
    stamps = []
    for content in (b"1", b"2"):
        (tmp_path / "a").write_bytes(content)
        os.utime(tmp_path / "a", ns=(0, 0))  # as copies do
        stamps.append((files.file_stamp(tmp_path / "a"), ImageFolder(tmp_path).stamp("a")))
    assert stamps[0][0][:2] == stamps[1][0][:2] and len(set(stamps)) == 2 and stamps[0][1] != stamps[1][1]


OPENED = {  # by the name of a file that a user may give, what opens it
    "prompts.txt": read_prompts,
    "prompts.csv": read_prompts,
    "data.json": lambda file: open_data(file, file.parent),
    "data.jsonl": lambda file: open_data(file, file.parent),
    "data.tar": open_data,
    "columns.yaml": lambda file: read_yaml(file, list[Column]),
    "image.png": lambda file: write_contact_sheets(file.parent, [(file, "", "")]),
    "weights.safetensors": read_state,
    "weights.pt": read_state,
    "method.py": lambda file: import_methods(str(file)),
    "docci_descriptions.jsonlines": lambda file: read_retrieval_set("docci", file.parent),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", OPENED)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, name, kind):
    (tmp_path / "images").mkdir()
    put_odd(tmp_path / name, kind)
    with pytest.raises((UserError, OSError), match=name) as caught:
        OPENED[name](tmp_path / name)
    reasons = "not a regular file|Is a directory|The folder|hold their images|No such device|not there|no Python file"
    assert re.search(reasons, str(caught.value)) and read_settings(tmp_path / name) is None


@pytest.mark.parametrize("kind", ODD)
def test_captions_that_are_no_regular_files_are_bad_records(tmp_path, kind):
    for name in ("image", "caption"):
        (tmp_path / "urban1k" / name).mkdir(parents=True)
    for index in range(2):
        Image.new("RGB", (8, 8)).save(tmp_path / "urban1k" / "image" / f"{index}.jpg")
    (tmp_path / "urban1k" / "caption" / "0.txt").write_text("A cat. A dog.")
    put_odd(tmp_path / "urban1k" / "caption" / "1.txt", kind)
    (bad,) = read_retrieval_set("urban1k", tmp_path / "urban1k").bad
    assert (bad.where, bad.kind) == ("caption/1.txt", "unreadable file")


def test_a_lock_is_one_process_s_and_never_a_link(tmp_path):
    with files.file_lock(tmp_path / ".lock") as first, files.file_lock(tmp_path / ".lock") as second:
        assert first and not second
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="is a link"), files.file_lock(tmp_path / "link"):
        pass
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5000, "{}x", "[1, 2]"])
def test_what_is_no_json_object_is_named_or_empty(tmp_path, content):
    (file := tmp_path / "a.json").write_text(content)
    assert files.read_json_object(file) == {}
    with pytest.raises(UserError, match="a.json' .*Get it again."):
        files.read_json(file, advice="Get it again.")
