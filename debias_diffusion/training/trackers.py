"""TensorBoard and Weights & Biases, through accelerate."""

import hashlib
import importlib.util
from pathlib import Path

from accelerate import Accelerator

from ..errors import UserError
from .config import TrainConfig

PROJECT = "debias-diffusion"


def make_accelerator(config: TrainConfig) -> Accelerator:
    """accelerate's engine with the trackers that `config` names; they write below the output folder.

    Raises:
        UserError: a tracker is not installed.
    """
    names = config.tracker_names()
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"The tracker {name!r} is not installed. `pip install {name}`, or leave it out.")
    return Accelerator(log_with=names or None, project_dir=config.output)


def start_trackers(accelerator: Accelerator, config: TrainConfig, settings: dict) -> None:
    """Opens the trackers; a run that continues goes on where it was."""
    if not config.tracker_names():
        return
    path = Path(config.output).resolve()
    wandb = {
        "name": path.name,
        "dir": str(path),
        "id": hashlib.sha256(str(path).encode()).hexdigest()[:16],
        "resume": "allow",
    }
    plain = {name: value for name, value in settings.items() if isinstance(value, (int, float, str, bool))}
    accelerator.init_trackers(PROJECT, config=plain, init_kwargs={"wandb": wandb})
