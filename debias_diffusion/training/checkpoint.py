"""Checkpoints: safetensors and plain JSON, whole or not there, holding all that continues the run."""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from ..backbones import Backbone
from ..errors import UserError
from ..files import whole_folder, write_json
from ..weights import save_tensors
from .step import Optimizer

_NAME = re.compile(r"step-(\d{8})")


@dataclass
class TrainState:
    """Where a run stands.

    Attributes:
        step: steps made.
        best_r1: best mean of the two R@1 on the held-out pairs, in percent; -1 before the first measurement.
        best_step: the step it was measured at.
        replaced: records that were unreadable when their turn came.
        not_finite: steps in a row, up to now, that were not applied because their loss was not finite.
    """

    step: int = 0
    best_r1: float = -1.0
    best_step: int = 0
    replaced: int = 0
    not_finite: int = 0


def save_checkpoint(folder: Path, backbone: Backbone, optimizer: Optimizer, state: TrainState, keep: int) -> None:
    """Writes `folder/step-...` and removes all but the newest `keep`."""
    with whole_folder(folder / f"step-{state.step:08d}") as temporary:
        save_tensors(backbone.model.state_dict(), temporary / "model.safetensors")
        save_tensors(optimizer.state(), temporary / "optimizer.safetensors")
        write_json(temporary / "state.json", asdict(state))
    for old in _checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def load_checkpoint(folder: Path, backbone: Backbone, optimizer: Optimizer) -> TrainState:
    """Continues from the newest checkpoint below `folder`; a fresh state where there is none."""
    checkpoints = _checkpoints(folder)
    if not checkpoints:
        return TrainState()
    newest = checkpoints[-1]
    try:
        backbone.model.load_state_dict(load_file(newest / "model.safetensors"))
        optimizer.load_state(load_file(newest / "optimizer.safetensors"))
        return TrainState(**json.loads((newest / "state.json").read_text()))
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError) as error:
        raise UserError(
            f"The checkpoint {os.fspath(newest)!r} cannot be read ({error}). Remove that folder to continue from the "
            "one before it."
        ) from error


def _checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))
