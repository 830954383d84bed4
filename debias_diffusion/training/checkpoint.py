"""Checkpoints: safetensors and plain JSON with checksums, whole or not there, holding all that continues the run."""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from ..errors import UserError, reason
from ..files import remove_folder, restore_folder, sha256, whole_folder, write_json, write_text
from ..models.backbone import Backbone
from ..models.weights import save_tensors
from .step import Optimizer

CHECKSUMS = "SHA256SUMS"  # as sha256sum writes and checks them
_FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
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
        write_text(temporary / CHECKSUMS, "".join(f"{sha256(temporary / name)}  {name}\n" for name in _FILES))
    for old in _checkpoints(folder)[:-keep]:
        remove_folder(old)


def load_checkpoint(folder: Path, backbone: Backbone, optimizer: Optimizer) -> TrainState:
    """Continues from the newest checkpoint below `folder`; a fresh state where there is none.

    Raises:
        UserError: it is damaged. An older one is not taken by itself: all processes must take the same one, and whoever
            owns a disk that damages files should know.
    """
    checkpoints = _checkpoints(folder)
    if not checkpoints:
        return TrainState()
    newest = checkpoints[-1]
    try:
        _verify(newest)
        backbone.model.load_state_dict(load_file(newest / "model.safetensors"))
        optimizer.load_state(load_file(newest / "optimizer.safetensors"))
        return _read_state(newest)
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError) as error:
        older = f"continue from {checkpoints[-2].name}" if len(checkpoints) > 1 else "begin anew; there is no older one"
        raise UserError(
            f"The checkpoint {os.fspath(newest)!r} cannot be used: {reason(error)}. Remove that folder, and the same "
            f"command will {older}."
        ) from error


def _verify(checkpoint: Path) -> None:
    """Raises ValueError for a file that has changed since it was written. Earlier versions wrote no checksums."""
    sums = checkpoint / CHECKSUMS
    if not sums.exists():
        return
    lines = sums.read_text(encoding="ascii").splitlines()
    for name in _FILES:
        if f"{sha256(checkpoint / name)}  {name}" not in lines:
            raise ValueError(f"{name} and its checksum in {CHECKSUMS} do not agree; one of them is damaged")


def _read_state(checkpoint: Path) -> TrainState:
    """Raises ValueError or TypeError for another state than that of the checkpoint's step."""
    values = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    state = TrainState(**values)
    if not all(type(value) in (int, float) for value in values.values()):
        raise ValueError("state.json holds something else than numbers")
    if state.step != int(_NAME.fullmatch(checkpoint.name)[1]):
        raise ValueError(f"state.json is that of step {state.step}")
    return state


def restore_checkpoints(folder: Path) -> None:
    """Removes what killed runs left unfinished."""
    for leftover in folder.glob(".step-*"):
        restore_folder(folder / leftover.stem.removeprefix("."))


def _checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))
