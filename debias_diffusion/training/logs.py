"""What a run notes of its steps: files of lines, and TensorBoard and Weights & Biases through accelerate."""

import hashlib
import importlib.util
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator

from ..devices import end_group_at_exit
from ..errors import UserError, explain_failure
from ..files import append, atomic_file, read_file
from .config import RunConfig

PROJECT = "debias-diffusion"
LOG, NOT_FINITE = "log.jsonl", "not-finite.jsonl"  # of each step, and of steps that were skipped


def add_line(file: Path, line: dict) -> None:
    """Adds a line to a log."""
    append(file, json.dumps(line))


def cut_log(file: Path, step: int) -> None:
    """Removes lines after `step`, which will be written again (all if the run starts again), and unreadable lines,
    which a kill or a damaged disk left."""
    if not file.exists():
        return
    lines = read_file(file).splitlines(keepends=True)
    kept = [line for line in lines if step > 0 and _step_of(line) <= step]
    if kept != lines:
        with atomic_file(file) as temporary:
            temporary.write_bytes(b"".join(kept))


def _step_of(line: bytes) -> float:
    """The step of a line of a log; infinity where it cannot be read."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"}\n") else None
    except (ValueError, TypeError, LookupError, RecursionError):
        step = None
    return step if type(step) is int else math.inf


def make_accelerator(config: RunConfig) -> Accelerator:
    """accelerate's Accelerator with the trackers of `config`, which write to the output folder.

    Raises:
        UserError: a tracker is not installed.
    """
    names = config.trackers
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"The tracker {name!r} is not installed. `pip install {name}`, or leave it out.")
    accelerator = Accelerator(log_with=names or None, project_dir=config.output)
    end_group_at_exit()
    return accelerator


@contextmanager
def tracked(accelerator: Accelerator, config: RunConfig, settings: dict) -> Iterator[None]:
    """Keeps the trackers open; a resumed run continues its curves.

    Raises:
        UserError: one of them cannot be started.
    """
    path = Path(config.output).resolve()
    wandb = {
        "name": path.name,
        "dir": str(path),
        "id": hashlib.sha256(str(path).encode()).hexdigest()[:16],
        "resume": "allow",
    }
    plain = {name: value for name, value in settings.items() if isinstance(value, (int, float, str, bool))}
    with explain_failure(f"The trackers {', '.join(config.trackers)} could not be started"):
        accelerator.init_trackers(PROJECT, config=plain, init_kwargs={"wandb": wandb})
    try:
        yield
    finally:
        # Not `accelerator.end_training()`, which also ends the process group before the last model is written.
        for tracker in accelerator.trackers:
            tracker.finish()
