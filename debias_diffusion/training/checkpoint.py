"""Checkpoints: safetensors and JSON with checksums, complete or absent, with everything a run resumes from."""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..errors import UserError, reason
from ..files import atomic_folder, remove_folder, restore_folder, sha256, write_json, write_text
from ..models.weight_files import save_tensors
from .step import AdamW

CHECKSUMS = "SHA256SUMS"  # as sha256sum writes and checks them
_FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
_METHOD = "method.safetensors"  # a method's own modules, where it has any
_NAME = re.compile(r"step-(\d{8})")


@dataclass
class TrainState:
    """The progress of a run.

    Attributes:
        step: steps made.
        best_r1: with `keep_best`, the best mean of the two R@1 on the pairs that choose, in percent; -1 before the
            first measurement.
        best_step: the step of that measurement.
        replaced: unreadable records that others replaced.
        not_finite: the latest steps in a row that were skipped because their loss was not finite.
    """

    step: int = 0
    best_r1: float = -1.0
    best_step: int = 0
    replaced: int = 0
    not_finite: int = 0


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: AdamW,
    state: TrainState,
    keep: int,
    modules: nn.Module | None = None,
) -> None:
    """Writes `folder/step-...` and removes all but the newest `keep`.

    Args:
        modules: the method's own, saved without frozen parameters.
    """
    with atomic_folder(folder / f"step-{state.step:08d}") as temporary:
        save_tensors(model.state_dict(), temporary / "model.safetensors")
        save_tensors(optimizer.state(), temporary / "optimizer.safetensors")
        write_json(temporary / "state.json", asdict(state))
        if modules is not None:
            save_tensors(_restored(modules), temporary / _METHOD)
        write_text(temporary / CHECKSUMS, "".join(f"{sha256(temporary / name)}  {name}\n" for name in _files(modules)))
    for old in _checkpoints(folder)[:-keep]:
        remove_folder(old)


def _files(modules: nn.Module | None) -> tuple[str, ...]:
    return _FILES if modules is None else (*_FILES, _METHOD)


def _restored(modules: nn.Module) -> dict[str, torch.Tensor]:
    """What a resumed run cannot make anew: all but frozen parameters."""
    frozen = {name for name, parameter in modules.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in modules.state_dict().items() if name not in frozen}


def load_checkpoint(folder: Path, model: nn.Module, optimizer: AdamW, modules: nn.Module | None = None) -> TrainState:
    """Resumes from the newest checkpoint below `folder`; a fresh state where there is none.

    Raises:
        UserError: it is damaged. An older one is not used without asking: all processes must use the same one, and
            whoever owns a disk that damages files should know.
    """
    checkpoints = _checkpoints(folder)
    if not checkpoints:
        return TrainState()
    newest = checkpoints[-1]
    try:
        _verify(newest, _files(modules))
        model.load_state_dict(load_file(newest / "model.safetensors"))
        if modules is not None:
            state = load_file(newest / _METHOD)
            if state.keys() != _restored(modules).keys():
                raise ValueError(f"{_METHOD} holds {', '.join(state)}, and not {', '.join(_restored(modules))}")
            modules.load_state_dict(state, strict=False)
        optimizer.load_state(load_file(newest / "optimizer.safetensors"))
        return _read_state(newest)
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError) as error:
        older = f"continue from {checkpoints[-2].name}" if len(checkpoints) > 1 else "begin anew; there is no older one"
        raise UserError(
            f"The checkpoint {os.fspath(newest)!r} cannot be used: {reason(error)}. Remove that folder, and the same "
            f"command will {older}."
        ) from error


def _verify(checkpoint: Path, files: tuple[str, ...]) -> None:
    """Raises ValueError for a file that has changed since it was written."""
    lines = (checkpoint / CHECKSUMS).read_text(encoding="ascii").splitlines()
    for name in files:
        if f"{sha256(checkpoint / name)}  {name}" not in lines:
            raise ValueError(f"{name} and its checksum in {CHECKSUMS} do not agree; one of them is damaged")


def _read_state(checkpoint: Path) -> TrainState:
    """Raises ValueError or TypeError unless the state belongs to the checkpoint's step."""
    values = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    state = TrainState(**values)
    if not all(type(value) in (int, float) for value in values.values()):
        raise ValueError("state.json holds other values than numbers")
    if state.step != int(_NAME.fullmatch(checkpoint.name)[1]):
        raise ValueError(f"state.json is that of step {state.step}")
    return state


def restore_checkpoints(folder: Path) -> None:
    """Removes unfinished checkpoints of killed runs."""
    for leftover in folder.glob(".step-*"):
        restore_folder(folder / leftover.stem.removeprefix("."))


def _checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))
