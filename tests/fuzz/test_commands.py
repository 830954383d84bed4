"""Commands that take long, killed at moments that nobody chose; their folders damaged: the same end, or a refusal."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from helpers import tiny_sdxl
from helpers.commands import PATIENCE, finish, start
from helpers.fuzzing import rounds
from helpers.processes import as_options
from helpers.tiny_clip import save_tiny_clip
from helpers.tiny_data import make_tiny_data
from safetensors.torch import load_file

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    data, images = make_tiny_data(folder, count=40)
    prompts = folder / "prompts.txt"
    prompts.write_text("A red cat.\nA blue dog.\n\xff\nA white cat.\n", encoding="latin-1")
    model, sdxl = save_tiny_clip(folder / "base"), tiny_sdxl.build_tiny_sdxl(folder / "sdxl")
    return {"model": model, "data": data, "images": images, "prompts": prompts, "sdxl": sdxl}


def training(world, output, **options) -> list[str]:
    settings = {name: world[name] for name in ("model", "data", "images")} | dict(output=output / "run")
    settings |= dict(validation=6, batch=8, components=3, epochs=99, max_steps=24, warmup=2, learning_rate=1e-3)
    settings |= dict(keep_best=4, eval_every=7, checkpoint_every=3, log_every=1, workers=0) | options
    return ["train", *as_options(settings)]


def frozen(world, output) -> list[str]:
    return training(world, output, freeze_image_tower=True, feature_cache=output / "features")


def generating(world, output) -> list[str]:
    options = dict(prompts=world["prompts"], base=world["sdxl"], output=output, steps=2, images_per_prompt=2)
    return ["generate", *as_options(options)]


def sharding(world, output) -> list[str]:
    options = dict(data=world["data"], images=world["images"], output=output, per_shard=7, size=16, workers=1)
    return ["shards", *as_options(options)]


def trained(output: Path) -> dict:
    lines = map(json.loads, (output / "run" / "log.jsonl").read_text().splitlines())
    log = [line | dict.fromkeys(("samples_per_second", "seconds")) for line in lines]
    weights = (load_file(output / "run" / folder / "open_clip_model.safetensors") for folder in ("best", "last"))
    return {"log": log, "weights": [{name: tensor.tolist() for name, tensor in part.items()} for part in weights]}


def files(output: Path) -> dict[str, bytes]:
    """The content of a folder's files by name, without its lock and the job's lines."""
    paths = (path for path in sorted(output.rglob("*")) if path.is_file() and path.name not in (".lock", "items.jsonl"))
    return {str(path.relative_to(output)): path.read_bytes() for path in paths}


JOBS = {
    "train": (lambda *where: training(*where, workers=2), trained),
    "train the text tower": (frozen, trained),
    "generate": (generating, files),
    "shards": (sharding, files),
}


def in_group(group: int) -> list[psutil.Process]:
    """The living processes of a group."""
    living = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


@pytest.mark.parametrize("job", JOBS)
def test_whatever_kills_it_the_end_is_the_same(job, world, tmp_path):
    """The signal goes to the main process alone, as from a user, or to its group, as from Slurm or a terminal."""
    arguments, result = JOBS[job]
    finish(arguments(world, tmp_path / "alone"), tmp_path / "alone.txt")
    began = time.monotonic()
    finish(arguments(world, tmp_path / "timed"), tmp_path / "timed.txt")
    whole, expected, kills = time.monotonic() - began, result(tmp_path / "alone"), 0
    for number in rounds(seconds=12):
        rng = random.Random(number)
        output, screen, events = tmp_path / f"run-{number}", tmp_path / f"run-{number}.txt", f"round {number}"
        for _ in range(rng.randint(1, 4)):
            process = start(arguments(world, output), screen)
            time.sleep(rng.uniform(0, whole))
            chosen, kill = rng.choice(SIGNALS), rng.choice((os.kill, os.killpg))
            events += f", {chosen.name} by {kill.__name__}"
            with contextlib.suppress(ProcessLookupError):  # it is over
                kill(process.pid, chosen)
            process.join(PATIENCE)
            if process.exitcode is None:
                os.killpg(process.pid, signal.SIGKILL)
            # Libraries make an error of a signal: torch of one to a worker that is not up yet, others of an interrupt
            # within a callback or while they load weights.
            shown = screen.read_text()
            by_library = re.search("DataLoader worker|KeyboardInterrupt|Unable to load weights", shown)
            codes = (0, -chosen, 130, *((1, 2) if by_library else ()))
            assert process.exitcode in codes, f"{events}: {process.exitcode}\n{shown[-3000:]}"
            deadline = time.monotonic() + PATIENCE
            while (left := in_group(process.pid)) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not left, f"{events}: left behind {left}"
            kills += 1
        finish(arguments(world, output), tmp_path / f"last-{number}.txt")
        is_the_same = result(output) == expected
        assert is_the_same, f"{events}\n{screen.read_text()[-3000:]}"
        assert not [path for path in output.rglob("*") if path.suffix in (".tmp", ".old")], events
    print(f"{job}: {kills} kills")


DAMAGES = ("flip", "flip", "flip", "cut", "other", "folder", "pipe", "gone")
OTHERS = (b"", b"{}", b"[1, 2]", b"null", b"[" * 100_000, b"\xff\xfe", b"noise" * 20)


def damage(path: Path, kind: str, rng: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    path.unlink()
    at = rng.randrange(len(content))
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "gone":
        content[at] ^= 1 << rng.randrange(8)
        path.write_bytes({"flip": content, "cut": content[:at], "other": rng.choice(OTHERS)}[kind])


@pytest.mark.parametrize("job", ["train", "train the text tower", "generate"])
def test_a_damaged_folder_ends_the_same_or_is_refused(job, world, tmp_path):
    arguments, result = JOBS[job]
    stopped = tmp_path / "stopped"
    finish(arguments(world, stopped), tmp_path / "stopped.txt")
    expected = result(stopped)
    if "train" in job:
        shutil.rmtree(stopped / "run" / "last")
        (stopped / "run" / "checkpoint-00000024").unlink()
    for number in rounds(seconds=15):
        rng, output = random.Random(number), tmp_path / f"damaged-{number}"
        shutil.copytree(stopped, output)
        path = rng.choice([path for path in sorted(output.rglob("*")) if path.is_file() and path.name != ".lock"])
        damage(path, kind := rng.choice(DAMAGES), rng)
        print(event := f"round {number}: {kind} {path.relative_to(output)}")
        code = finish(arguments(world, output), tmp_path / f"{number}.txt", exit_codes=(0, 2))
        # Images whose features are gone are encoded again, in another batch, which rounds otherwise. Lines of a log are
        # for people, and have no checksum.
        if code == 0 and path.parts[-2] != "features" and "features-" not in str(path) and path.name != "log.jsonl":
            is_the_same = result(output) == expected
            assert is_the_same, event
