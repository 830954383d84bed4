"""Every command that takes long, killed again and again at moments and in ways that nobody chose, ends the same.

The signal goes to the main process alone, as from a user, or to its whole group, as from Slurm, systemd or a terminal.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from fuzzing import rounds
from helpers import tiny_sdxl
from helpers.processes import as_options
from helpers.tiny_clip import save_tiny_clip
from helpers.tiny_data import make_tiny_data
from processes import PATIENCE, files, finish, start
from safetensors.torch import load_file

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals")

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def in_group(group: int) -> list[psutil.Process]:
    """The living processes of a group."""
    living = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
        except (ProcessLookupError, psutil.Error):
            continue
    return living


def kill(process, number: int, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError):  # it is over
        (os.killpg if group else os.kill)(process.pid, number)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    data, images = make_tiny_data(folder, count=40)
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(f"A {word} cat." for word in ("red", "green", "blue", "white", "black")))
    return {
        "model": save_tiny_clip(folder / "base"),
        "data": data,
        "images": images,
        "prompts": prompts,
        "sdxl": tiny_sdxl.build_tiny_sdxl(folder / "sdxl"),
    }


def training(world, output, **options) -> list[str]:
    settings = dict(model=world["model"], data=world["data"], images=world["images"], output=output)
    settings |= dict(validation=6, batch=8, components=3, epochs=99, max_steps=24, warmup=2, learning_rate=1e-3)
    settings |= dict(keep_best=4, eval_every=7, checkpoint_every=3, log_every=1) | options
    return ["train", *as_options(settings)]


def generating(world, output) -> list[str]:
    options = dict(prompts=world["prompts"], base=world["sdxl"], output=output, steps=2, images_per_prompt=2)
    return ["generate", *as_options(options)]


def sharding(world, output) -> list[str]:
    options = dict(data=world["data"], images=world["images"], output=output, per_shard=7, size=16, workers=1)
    return ["shards", *as_options(options)]


def trained(output: Path) -> dict:
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    weights = {
        f"{folder}/{name}": tensor.tolist()
        for folder in ("best", "last")
        for name, tensor in load_file(output / folder / "open_clip_model.safetensors").items()
    }
    log = [{name: value for name, value in line.items() if name != "samples_per_second"} for line in lines]
    return weights | {"log": log}


JOBS = {
    "train": (training, trained),
    "train with workers": (lambda *where: training(*where, workers=2), trained),
    "train the text tower": (lambda *where: training(*where, freeze_image_tower=True), trained),
    "generate": (generating, files),
    "shards": (sharding, files),
}


@pytest.mark.parametrize("job", JOBS)
def test_whatever_kills_it_the_end_is_the_same(job, world, tmp_path):
    arguments, result = JOBS[job]
    finish(arguments(world, tmp_path / "alone"), tmp_path / "alone.txt")
    began = time.monotonic()
    finish(arguments(world, tmp_path / "timed"), tmp_path / "timed.txt")
    whole, expected = time.monotonic() - began, result(tmp_path / "alone")
    kills = 0
    for number in rounds(seconds=12):
        rng = random.Random(number)
        output, screen = tmp_path / f"run-{number}", tmp_path / f"run-{number}.txt"
        told = f"round {number}"
        for _ in range(rng.randint(1, 4)):
            process = start(arguments(world, output), screen)
            time.sleep(rng.uniform(0, whole))
            chosen, group = rng.choice(SIGNALS), rng.random() < 0.5
            told += f", {chosen.name} to {'all' if group else 'one'}"
            kill(process, chosen, group)
            process.join(PATIENCE)
            goes_on = process.exitcode is None
            if goes_on:
                kill(process, signal.SIGKILL, group=True)
            assert not goes_on, f"{told}: it goes on\n{screen.read_text()[-3000:]}"
            assert process.exitcode in (0, -chosen, 130), f"{told}: {process.exitcode}\n{screen.read_text()[-3000:]}"
            deadline = time.monotonic() + PATIENCE
            while (left := in_group(process.pid)) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not left, f"{told}: left behind {left}"
            kills += 1
        finish(arguments(world, output), screen)
        assert result(output) == expected, f"{told}\n{screen.read_text()[-3000:]}"
        unfinished = [path for path in output.rglob("*") if path.name.endswith((".tmp", ".old"))]
        assert not unfinished, told
    print(f"{job}: {kills} kills")
