"""Files and folders that are written whole, whatever stands where they are written."""

import hashlib
import json
import os

import pytest
from helpers.stops import Stopped, stopped_at

from debias_diffusion import files
from debias_diffusion.errors import UserError
from debias_diffusion.files import (
    atomic_file,
    atomic_folder,
    folder_lock,
    hidden_sibling,
    json_digest,
    new_file,
    path_digest,
    read_json_object,
    sha256,
    write_json,
)


def unfinished_of(path, process):
    """Where a process of this machine writes a file before it is complete."""
    return hidden_sibling(path, f".{files.MACHINE}-{process}.tmp")


def unfinished_folder(path, process):
    """The same of a folder."""
    return hidden_sibling(path, f".{files.MACHINE}-{process}.unfinished")


@pytest.fixture
def ended():
    """A process that has ended."""
    process = os.fork() or os._exit(0)
    os.waitpid(process, 0)
    return process


def test_what_killed_processes_left_goes_when_their_folder_is_written_again_and_is_listed_once(
    tmp_path, monkeypatch, ended
):
    left = [unfinished_of(tmp_path / name, ended) for name in ("a.json", "b\n.json", "x" * 255)]
    kept = [
        unfinished_of(tmp_path / "a.json", os.getppid()),  # which lives, and may be writing it
        tmp_path / f".a.json.another-machine-{ended}.tmp",
        unfinished_of(tmp_path / "a.json", "x"),
        tmp_path / f"a.json.{files.MACHINE}-{ended}.tmp",  # of the user, because it is not hidden
    ]
    for file in (*left, *kept):
        file.write_text("half")
    listed, listdir = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: listed.append(folder) or listdir(folder))
    for name in ("a.json", "b.json", "a.json"):
        write_json(tmp_path / name, [1])
    assert listed == [tmp_path]
    assert sorted(listdir(tmp_path)) == sorted(["a.json", "b.json", *(file.name for file in kept)])


@pytest.fixture
def synced_and_renamed(monkeypatch):
    """The calls of `os.fsync` and `os.replace`, as (what, the inodes of a file or folder): [("sync", 7), ...]"""
    calls, fsync, replace = [], os.fsync, os.replace

    def noted_fsync(descriptor):
        calls.append(("sync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def noted_replace(source, target):
        calls.append(("rename", os.stat(source).st_ino))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    return calls


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, synced_and_renamed):
    for content in ([1], [2]):  # a new file, and one that is replaced
        write_json(tmp_path / "a.json", content)
        file = (tmp_path / "a.json").stat().st_ino
        assert synced_and_renamed == [("sync", file), ("rename", file)]
        synced_and_renamed.clear()


def test_all_that_is_in_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, synced_and_renamed):
    for content in ("1", "2"):
        with atomic_folder(tmp_path / "a") as folder:
            (folder / "b" / "c").mkdir(parents=True)
            for name in ("x", "b/y", "b/c/z"):
                (folder / name).write_text(content)
        renamed = synced_and_renamed.index(("rename", (tmp_path / "a").stat().st_ino))
        synced = {inode for what, inode in synced_and_renamed[:renamed] if what == "sync"}
        assert synced >= {path.stat().st_ino for path in (tmp_path / "a", *(tmp_path / "a").rglob("*"))}
        if content == "2":  # else a power failure could undo the renames, and not the removal of the old folder
            assert synced_and_renamed[renamed + 1 :] == [("sync", tmp_path.stat().st_ino)]
        synced_and_renamed.clear()


def test_digests_are_of_names_and_contents_but_not_of_hidden_files(tmp_path):
    for name, content in {"a": b"1", "b/c": b"2", "b.d": b"3", ".hidden": b"4", "b/.e/f": b"5"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "broken").symlink_to("nowhere")
    assert path_digest(tmp_path) == "f6cb6d95d881f8d666f3dc4e6c8e60fee933ab1fc52b4cfb5aaab8435e242548"
    assert path_digest(tmp_path / "a") == sha256(tmp_path / "a") == hashlib.sha256(b"1").hexdigest()
    values = {"b": [1, None], "a": "\u00e4", "sha256": "x"}
    assert json_digest(values) == hashlib.sha256(rb'{"a": "\u00e4", "b": [1, null]}').hexdigest()


def test_nothing_is_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("precious")
    file, unfinished = tmp_path / "a.json", unfinished_of(tmp_path / "a.json", os.getpid())
    unfinished.symlink_to(tmp_path / "mine")
    file.symlink_to(tmp_path / "mine")
    write_json(file, [1])
    assert json.loads(file.read_text()) == [1] and not file.is_symlink()
    assert (tmp_path / "mine").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["a.json", "mine"]
    unfinished.symlink_to(tmp_path / "nowhere")
    new_file(unfinished).close()
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_is_filled_through_no_link(tmp_path):
    (tmp_path / "mine").mkdir()
    unfinished_folder(tmp_path / "a", os.getpid()).symlink_to(tmp_path / "mine")
    with pytest.raises(FileExistsError), atomic_folder(tmp_path / "a"):
        pass
    assert os.listdir(tmp_path / "mine") == [] and not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["x" * 255, "ä" * 127, "x" * 250])
def test_the_longest_names_leave_room(tmp_path, name):
    with atomic_file(tmp_path / name) as unfinished:
        unfinished.write_text("1")
    assert os.listdir(tmp_path) == [name]
    with atomic_folder(tmp_path / name[::-1].replace("x", "y")) as folder:
        (folder / "a").touch()
    other = f"{name[:-1]}z"
    assert hidden_sibling(tmp_path / other, ".tmp") != hidden_sibling(tmp_path / name, ".tmp")
    assert hidden_sibling(tmp_path / "a", ".tmp").name == ".a.tmp"


def test_a_lock_that_is_none_is_named(tmp_path):
    (tmp_path / "folder" / ".lock").mkdir(parents=True)
    (tmp_path / "link").mkdir()
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "link" / ".lock").symlink_to(tmp_path / "mine")
    for name in ("folder", "link"):
        with (
            pytest.raises(UserError, match=r"The lock '.*/.lock' is no regular file"),
            folder_lock(tmp_path / name, "taken"),
        ):
            pass
    assert (tmp_path / "mine").read_text() == "precious"
    with pytest.raises(UserError, match=r"The lock .* cannot be taken \("), folder_lock(tmp_path / "mine", "taken"):
        pass
    with folder_lock(tmp_path, "taken"), pytest.raises(UserError, match="^taken$"), folder_lock(tmp_path, "taken"):
        pass


def test_deep_json_is_no_object(tmp_path):
    for content in ("[" * 100_000, '{"a":' * 100_000, "9" * 5000, "{}x", "3"):
        (tmp_path / "a.json").write_text(content)
        assert read_json_object(tmp_path / "a.json") == {}


def test_a_folder_is_put_back_after_a_kill_between_the_renames(tmp_path, ended):
    old = unfinished_folder(tmp_path / "best", ended) / "old"
    old.mkdir(parents=True)
    (old / "file").write_text("old")
    unfinished_folder(tmp_path / "best", "x").touch()
    for is_ours in (False, True):  # a name alone does not make a folder ours
        if is_ours:
            (old.parent / files._MARK).touch()
        with pytest.raises(RuntimeError), atomic_folder(tmp_path / "best"):
            raise RuntimeError
        assert old.exists() != is_ours
    assert (tmp_path / "best" / "file").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == [unfinished_folder(tmp_path / "best", "x").name, "best"]


def test_a_folder_stopped_at_any_write_is_the_old_or_the_new(tmp_path):
    for number in range(1, 100):
        with atomic_folder(tmp_path / "a") as folder:
            (folder / "x").write_text("old")
        try:
            with stopped_at(number), atomic_folder(tmp_path / "a") as folder:
                (folder / "x").write_text("new")
            break
        except Stopped:
            with pytest.raises(RuntimeError), atomic_folder(tmp_path / "a"):  # the next command, which fails
                raise RuntimeError from None
        assert (tmp_path / "a" / "x").read_text() in ("old", "new") and os.listdir(tmp_path) == ["a"]
    assert number > 10 and (tmp_path / "a" / "x").read_text() == "new"


def test_folders_of_the_same_name_do_not_meet(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "a").symlink_to("there")
    replace = os.replace

    def replace_with_another(source, target):
        """Another process is faster, once, where the first is between its two renames."""
        monkeypatch.setattr(os, "replace", replace)
        replace(source, target)
        (tmp_path / "there" / "other").mkdir(parents=True)

    with atomic_folder(tmp_path / "a") as first, monkeypatch.context() as patch:
        (first / "x").write_text("1")
        patch.setattr(os, "getpid", lambda: os.getppid())
        with atomic_folder(tmp_path / "a") as second:
            (second / "x").write_text("2")
        assert (tmp_path / "a" / "x").read_text() == "2"
        monkeypatch.setattr(os, "replace", replace_with_another)
    assert (tmp_path / "a" / "x").read_text() == "1" and (tmp_path / "a").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a", "there"] and os.listdir(tmp_path / "there") == ["x"]
