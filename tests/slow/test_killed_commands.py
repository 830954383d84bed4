"""Commands killed in the middle of their work: begun again, they leave what an undisturbed run leaves."""

import json
import os
import random
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
from helpers import tiny_llava
from helpers.processes import as_options, start_ranks
from helpers.stops import stopped_at
from PIL import Image
from test_jobs import check_that_it_continues, work

from debias_diffusion.app.generate import generate
from debias_diffusion.app.options import GenerateConfig, SynthesizeConfig
from debias_diffusion.app.shards import ShardsConfig, write_shards
from debias_diffusion.app.synthesize.command import synthesize
from debias_diffusion.data.sources import open_data
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
            signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
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
    arguments = as_options(options)
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
    arguments = as_options(options)
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
    arguments = ["synthesize", *as_options(options)]
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
