"""Commands killed in the middle of their work: begun again, they leave what an undisturbed run leaves."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest
from helpers import tiny_llava
from helpers.processes import start_ranks
from helpers.stops import stopped_at
from PIL import Image
from test_jobs import check_that_it_continues, work
from torch.utils.data import DataLoader

from debias_diffusion.app.generate import generate
from debias_diffusion.app.options import GenerateConfig, SynthesizeConfig
from debias_diffusion.app.shards import ShardsConfig, write_shards
from debias_diffusion.app.synthesize.command import synthesize
from debias_diffusion.data import ImageFolder, Record, open_data
from debias_diffusion.data.bad_records import read_or_bad
from debias_diffusion.errors import UserError
from debias_diffusion.jobs import Job

# The command line, killed when it is about to put the file after the first COUNT of this ENDING in its place.
KILLED = """
import os, signal, sys
from debias_diffusion.app.cli import main

ending, left, replace = sys.argv[1], int(sys.argv[2]), os.replace


def replace_or_die(source, target):
    global left
    left -= str(target).endswith(ending)
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)


os.replace = replace_or_die
main(sys.argv[3:])
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_job_killed_at_any_write(tmp_path, sent, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # takes most of the time
    for number in count(1):
        child = os.fork()
        if not child:
            try:
                with stopped_at(number, lambda name: os.kill(os.getpid(), sent)):
                    work(tmp_path / str(number))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        if "last" in Job.read(tmp_path / str(number)):
            break
        check_that_it_continues(tmp_path / str(number))
    assert number > 30


def program(arguments: list[str], ending: str, count: int) -> list[str]:
    return [sys.executable, "-c", KILLED, ending, str(count), *map(str, arguments)]


def killed(arguments: list[str], ending: str, count: int) -> None:
    assert subprocess.run(program(arguments, ending, count), timeout=200).returncode == -signal.SIGKILL


def content(folder: Path) -> dict[str, bytes]:
    records = (".lock", "job.json", "items.jsonl")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name not in records}


def stamps(files) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in files}


def test_generate(tmp_path):
    (tmp_path / "prompts.txt").write_text("a star\na red ring\na circle\na heart\na cross\na square")
    options = {"base": "toy/sdxl", "encoder": "toy/debias-clip", "steps": 2, "device": "cpu", "batch": 2}
    options |= {"prompts": str(tmp_path / "prompts.txt"), "images_per_prompt": 3}
    generate(GenerateConfig(None, **options, output=str(tmp_path / "whole")))
    folder = tmp_path / "killed"
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    killed(["generate", *arguments, f"--output={folder}"], ".png", 5)
    before = stamps(folder.glob("[0-9]*.png"))
    assert len(before) == 5 and not (folder / "index.jsonl").exists()
    generate(GenerateConfig(None, **options, output=str(folder)))
    assert content(folder) == content(tmp_path / "whole") and len(list(folder.glob("[0-9]*.png"))) == 18
    assert stamps(before) == before


def test_shards(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    lines = []
    for index in range(12):
        Image.effect_noise((70, 60), 9 * index).save(images / f"{index}.png")
        lines.append(json.dumps({"image": f"{index}.png", "caption": f"Scene {index}. A red cat."}))
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    options = {"data": str(tmp_path / "data.jsonl"), "images": str(images), "size": 32, "per_shard": 2, "workers": 0}
    write_shards(ShardsConfig(**options, output=str(tmp_path / "whole")))
    output = tmp_path / "killed"
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    killed(["shards", *arguments, f"--output={output}"], ".tar", 3)
    before = stamps(output.glob("*.tar"))
    assert len(before) == 3
    with pytest.raises(UserError, match="not finished"):
        open_data(str(output))
    write_shards(ShardsConfig(**options, output=str(output)))
    assert content(output) == content(tmp_path / "whole") and stamps(before) == before


def test_synthesize_in_two_processes(tmp_path):
    model, images = str(tmp_path / "model"), tmp_path / "images"
    assert tiny_llava.build(Path(model)) < 0.5
    images.mkdir()
    rng, (pictures, _) = random.Random(0), tiny_llava.scenes()
    for index in range(16):
        pictures[index % 4].resize(rng.choice([(48, 48), (100, 40), (48, 48)])).save(images / f"{index:02}.png")
    options = {"model": model, "images": str(images), "per_part": 2, "batch": 2, "workers": 0}
    synthesize(SynthesizeConfig(**options, device="cpu", output=str(tmp_path / "whole")))
    shared = tmp_path / "shared"
    arguments = ["synthesize", *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]
    arguments.append(f"--output={shared}")

    def run_two(ending: str, count: int) -> list[tuple[int, str]]:
        processes = start_ranks(program(arguments, ending, count), 2)
        return [(process.communicate(timeout=200)[0], process.returncode) for process in processes]

    # Each is killed at its second part, or fails because the other is gone.
    assert all(code for _, code in run_two(".jsonl", 1))
    written = stamps((shared / "parts").glob("part-*.jsonl"))
    assert 0 < len(written) < 8 and not (shared / "captions.jsonl").exists()
    (first, code), (second, other) = run_two(".jsonl", 100)
    assert code == other == 0, first[-3000:]
    assert f"{len(written)} of 8 parts are finished" in first and "each of 2 processes" in first
    assert "Kept" in first and "Kept" not in second
    assert stamps(written) == written
    names = ("captions.jsonl", "removed.jsonl", "report.html")
    assert all((shared / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in names)
    assert (shared / "captions.jsonl").read_text()


# Workers that wait for a pipe


class Pipes:
    """A data set whose every image is a pipe."""

    def __init__(self, folder: Path):
        self.folder, self.images = folder, ImageFolder(folder)

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        (self.folder / f"reading-{os.getpid()}").touch()
        return read_or_bad(Record("a", "pipe.png", "A."), self.images.open)


def load_pipes(folder: Path) -> None:
    batches = iter(DataLoader(Pipes(folder), batch_size=1, num_workers=2, collate_fn=list))
    time.sleep(600)
    next(batches)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc to look for processes in")
def test_no_worker_outlives_a_killed_run_because_of_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    run = multiprocessing.get_context("fork").Process(target=load_pipes, args=(tmp_path,))
    run.start()
    try:
        wait_until(lambda: len(list(tmp_path.glob("reading-*"))) == 2)
        pids = [int(path.name.partition("-")[2]) for path in tmp_path.glob("reading-*")]
    finally:
        run.kill()
        run.join()
    try:
        wait_until(lambda: not any(map(running, pids)))
    finally:
        for pid in filter(running, pids):
            os.kill(pid, 9)


def wait_until(done) -> None:
    end = time.monotonic() + 120
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
