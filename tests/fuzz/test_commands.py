"""Commands that take long, killed at moments that nobody chose: the same end."""

import contextlib
import json
import os
import random
import re
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

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    data, images = make_tiny_data(folder, count=40)
    prompts = folder / "prompts.txt"
    prompts.write_text("A red cat.\nA blue dog.\n\xff\nA white cat.\n", encoding="latin-1")
    model, sdxl = save_tiny_clip(folder / "base"), tiny_sdxl.build_tiny_sdxl(folder / "sdxl")
    return {"model": model, "data": data, "images": images, "prompts": prompts, "sdxl": sdxl}


def training(world, output) -> list[str]:
    settings = {name: world[name] for name in ("model", "data", "images")} | dict(output=output / "run")
    settings |= dict(validation=6, batch=8, components=3, epochs=99, max_steps=24, warmup=2, learning_rate=1e-3)
    settings |= dict(keep_best=4, eval_every=7, checkpoint_every=3, log_every=1, workers=2)
    return ["train", *as_options(settings)]


def generating(world, output) -> list[str]:
    options = dict(prompts=world["prompts"], base=world["sdxl"], output=output, steps=2, images_per_prompt=2)
    return ["generate", *as_options(options)]


def trained(output: Path) -> list:
    lines = map(json.loads, (output / "run" / "log.jsonl").read_text().splitlines())
    log = [line | dict.fromkeys(("samples_per_second", "seconds")) for line in lines]
    return [log, *((output / "run" / part / "open_clip_model.safetensors").read_bytes() for part in ("best", "last"))]


def files(output: Path) -> dict[str, bytes]:
    """The content of a folder's files by name, without its lock and the job's lines."""
    paths = (path for path in sorted(output.rglob("*")) if path.is_file() and path.name not in (".lock", "items.jsonl"))
    return {str(path.relative_to(output)): path.read_bytes() for path in paths}


JOBS = {"train": (training, trained), "generate": (generating, files)}


def lives(group: int) -> bool:
    """Whether a process of the group does."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


@pytest.mark.parametrize("job", JOBS)
def test_whatever_kills_it_the_end_is_the_same(job, world, tmp_path):
    """The signal goes to the main process alone, as from a user, or to its group, as from Slurm or a terminal."""
    arguments, result = JOBS[job]
    for name in ("alone", "timed"):  # the first imports more
        began = time.monotonic()
        finish(arguments(world, tmp_path / name), tmp_path / f"{name}.txt")
    whole, expected = time.monotonic() - began, result(tmp_path / "alone")
    for number in rounds(seconds=5):
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
            by_library = re.search(
                "DataLoader worker|KeyboardInterrupt|could not be loaded|Unable to load weights", shown
            )
            codes = (0, -chosen, 130, *((1, 2) if by_library else ()))
            assert process.exitcode in codes, f"{events}: {process.exitcode}\n{shown[-3000:]}"
            deadline = time.monotonic() + PATIENCE
            while lives(process.pid) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not lives(process.pid), f"{events}: processes are left behind"
        finish(arguments(world, output), tmp_path / f"last-{number}.txt")
        is_the_same = result(output) == expected
        assert is_the_same, f"{events}\n{screen.read_text()[-3000:]}"
        assert not [path for path in output.rglob("*") if path.suffix in (".tmp", ".old")], events
