"""TensorBoard and Weights & Biases, through accelerate."""

import hashlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator

from ..errors import UserError, reason
from ..process_group import end_group_at_exit
from .config import RunConfig

PROJECT = "debias-diffusion"


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
    names = config.trackers
    if not names:
        yield
        return
    path = Path(config.output).resolve()
    wandb = {
        "name": path.name,
        "dir": str(path),
        "id": hashlib.sha256(str(path).encode()).hexdigest()[:16],
        "resume": "allow",
    }
    plain = {name: value for name, value in settings.items() if isinstance(value, (int, float, str, bool))}
    try:
        accelerator.init_trackers(PROJECT, config=plain, init_kwargs={"wandb": wandb})
    except Exception as error:  # libraries raise anything for a missing login or network
        raise UserError(f"The trackers {', '.join(names)} could not be started: {reason(error)}.") from error
    try:
        yield
    finally:
        # Not `accelerator.end_training()`, which also ends the process group before the last model is written.
        for tracker in accelerator.trackers:
            tracker.finish()
