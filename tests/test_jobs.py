"""The job folder: what continues there and what is refused, whenever it was killed and whatever was damaged."""

import os
import subprocess
from itertools import count

import pytest
import torch
from helpers.stops import Stopped, stopped_at
from safetensors.torch import save_file

from debias_diffusion.errors import UserError
from debias_diffusion.files import explain_full_disk, read_json, write_json
from debias_diffusion.jobs import Job

SETTINGS, INPUTS = {"seed": 0, "betas": (0.9, 0.99), "data": "a.json"}, {"data": "d1", "base model": None}


def opened(folder, settings=SETTINGS, inputs=INPUTS, command="train"):
    return Job.open(folder, command, settings, inputs, may_change=("data",))


def write(job, name, content, **notes):
    with job.write(name, **notes) as temporary:
        if "." in name:
            temporary.write_text(content)
        else:  # a folder
            (temporary / "deep").mkdir(parents=True)
            (temporary / "deep" / "a").write_text(content)


def read(job, name):
    path = job.path(name)
    return path and (path if path.is_file() else path / "deep" / "a").read_text()


def test_items_stay_with_their_notes(tmp_path):
    with opened(tmp_path / "deep" / "job") as job:
        for name in ("b.txt", "parts/1.txt", "last", "a.txt"):
            write(job, name, f"of {name}", size=len(name))
        job.note("generation-1", best=0.5)
        write(job, "b.txt", "newer", size=0)
    written, again = job, Job.read(tmp_path / "deep" / "job")
    for job in (written, again):
        assert job.names() == ["b.txt", "parts/1.txt", "last", "a.txt", "generation-1"]
        assert job.names("parts/") == ["parts/1.txt"]
        found = [read(job, name) for name in ("b.txt", "parts/1.txt", "last", "generation-1", "c.txt")]
        assert found == ["newer", "of parts/1.txt", "of last", None, None]
        assert (job.notes("b.txt"), job.notes("generation-1")) == ({"size": 0}, {"best": 0.5})
        assert job.settings["betas"] == [0.9, 0.99] and job.inputs == INPUTS and job.command == "train"
    for name in ("last", "a.txt", "a.txt"):
        job.remove(name)
    assert {path.name for path in job.folder.iterdir()} == {"job.json", "items.jsonl", ".lock", "parts", "b.txt"}


def work(folder):
    """Files, notes and folders in two steps: one of them replaced, one removed."""
    with opened(folder) as job:
        newest = max((job.notes(name)["step"] for name in job.names("checkpoint-")), default=0)
        for step in (1, 2):
            if step > newest:
                write(job, "best", f"{step}", step=step)
                job.note(f"note-{step}", step=step)
                write(job, f"checkpoint-{step}.pt", f"{step}", step=step)
        job.remove("checkpoint-1.pt")
        write(job, "last", "result")


def check_that_it_continues(folder):
    """What a kill in `work` has left is read, and mended by the same work."""
    left = Job.read(folder)  # as a reader sees it, before anything is mended
    for name in left.names():
        assert name.startswith("note") or read(left, name) in ("1", "2", "result")
        if name == "best":
            assert str(left.notes(name)["step"]) == read(left, name)
    with opened(folder) as job:
        assert not list(folder.glob(".*.tmp")) + list(folder.glob(".*.old"))
        if "note-1" in job:  # then `best` was finished, and is never lost
            assert read(job, "best") == str(job.notes("best")["step"])
    work(folder)
    job = Job.read(folder)
    assert [read(job, name) for name in ("checkpoint-2.pt", "best", "last")] == ["2", "2", "result"]
    assert "checkpoint-1.pt" not in job


def test_a_job_stopped_at_any_write_continues(tmp_path, monkeypatch):
    """Every write, rename and removal from the n-th on raises, cleaning up included; then the same work is done."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # takes most of the time
    for number in count(1):
        folder = tmp_path / str(number)
        try:
            with stopped_at(number):
                work(folder)
            break
        except Stopped:
            pass
        check_that_it_continues(folder)
    assert number > 30


def test_a_line_that_was_cut_short_does_not_count_and_spoils_no_other(tmp_path):
    with opened(tmp_path) as job:
        write(job, "a.txt", "1")
    for lines in (b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'{"name": "x"}\n', b"3\n", b'{"name"'):
        with open(tmp_path / "items.jsonl", "ab") as file:
            file.write(lines)
    with opened(tmp_path) as job:
        write(job, "b.txt", "2")
    assert Job.read(tmp_path).names() == ["a.txt", "b.txt"]


def test_a_damaged_item_is_refused_or_absent(tmp_path):
    with opened(tmp_path) as job:
        write(job, "a.txt", "content")
        write(job, "last", "content")
    (tmp_path / "a.txt").write_text("contenT")
    (tmp_path / "last" / "deep" / "b").touch()
    for name in ("a.txt", "last"):
        with opened(tmp_path) as job:
            with pytest.raises(UserError, match=f"/{name}' is damaged"):
                job.path(name)
            assert not job.is_whole(name) and name in job
            write(job, name, "again")
            assert read(job, name) == "again"
    (tmp_path / "a.txt").unlink()
    assert "a.txt" not in Job.read(tmp_path) and Job.read(tmp_path).path("a.txt") is None


def test_other_settings_inputs_and_commands_are_refused(tmp_path):
    with opened(tmp_path, {"seed": 9}, command="generate"):
        pass
    with opened(tmp_path) as job:  # nothing was finished, so that the settings may be others
        write(job, "a.txt", "1")
    for changes, message in (
        (dict(settings=SETTINGS | {"seed": 1}), "seed: 0 there, 1 here"),
        (dict(inputs=INPUTS | {"data": "d2"}), "contents of data: 'd1' there, 'd2' here"),
        (dict(command="generate"), "a run of `train`, and not of `generate`"),
    ):
        with pytest.raises(UserError, match=message), opened(tmp_path, **changes):
            pass
    with opened(tmp_path, SETTINGS | {"data": "b.json"}) as job:
        assert read(job, "a.txt") == "1"
    assert Job.read(tmp_path).settings["data"] == "b.json"


def test_damaged_settings_are_named_and_not_overwritten(tmp_path):
    with opened(tmp_path) as job:
        write(job, "a.txt", "1")
    file = tmp_path / "job.json"
    for content in (b"{", b"\xff\xfe", b"[1, 2]", b"{}", b"[" * 100_000):
        file.write_bytes(content)
        with pytest.raises(UserError, match="Put a copy"), opened(tmp_path):
            pass
        assert file.read_bytes() == content
    file.unlink()
    with opened(tmp_path) as job:
        assert read(job, "a.txt") == "1"


def test_only_one_process_works_in_a_job(tmp_path):
    with opened(tmp_path) as job:
        write(job, "a.txt", "1")
        with pytest.raises(UserError, match="Another process"):
            opened(tmp_path).__enter__()
        reader = Job.read(tmp_path)
        write(job, "a.txt", "2")  # of which the reader has not read the line
        assert read(reader, "a.txt") == "2"


def test_what_a_job_did_not_make_is_not_replaced(tmp_path):
    with opened(tmp_path) as job:
        (tmp_path / "a.txt").write_text("mine")
        with pytest.raises(UserError, match="not made by this job"):
            write(job, "a.txt", "1")
        assert (tmp_path / "a.txt").read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid(), reason="needs the right to mount a small disk")
def test_a_disk_that_fills_up_leaves_the_old_item(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", tmp_path]).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with opened(tmp_path / "job") as job:
            write(job, "a.txt", "1")
            with pytest.raises(UserError, match="No space left"), explain_full_disk(), job.write("a.txt") as temporary:
                save_file({"x": torch.zeros(5_000_000)}, temporary)
            assert read(job, "a.txt") == "1" and not list(job.folder.glob(".*.tmp"))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_all_is_on_the_disk_before_its_line_and_its_line_before_its_name(tmp_path, monkeypatch):
    with opened(tmp_path) as job:
        events, fsync, replace = [], os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", lambda fd: events.append(os.fstat(fd).st_ino) or fsync(fd))
        monkeypatch.setattr(os, "replace", lambda a, b: replace(a, b) or events.append("renamed"))
        write(job, "last", "1")
        monkeypatch.undo()
    *content, line, renamed = events
    parts = (tmp_path / "last", tmp_path / "last" / "deep", tmp_path / "last" / "deep" / "a")
    assert set(content) == {part.stat().st_ino for part in parts}
    assert (line, renamed) == ((tmp_path / "items.jsonl").stat().st_ino, "renamed")


def test_values_are_computed_once_and_again_when_damaged(tmp_path):
    calls = []
    with opened(tmp_path) as job:
        for number in (1, 1, 2):
            if number == 2:
                (tmp_path / "a.json").write_text("{}")
            file = job.ensure("a.json", lambda file: calls.append(1) or write_json(file, {"x": 1}))
            assert read_json(file) == {"x": 1} and len(calls) == number
