"""A fine-tuned toy CLIP as what it differs in from its base, so that both its towers take no more room than one."""

import os
from copy import deepcopy
from pathlib import Path

import torch

from ..errors import UserError
from .backbone import Backbone, load_backbone
from .model_files import check_finite, explain_failure
from .weights import read_state, save_tensors

DIFFERENCE = "difference.safetensors"
_STEPS = "steps"
_MOST = 127  # of 8 bits with a sign


def save_fine_tuned(tuned: Backbone, base: Backbone, folder: Path) -> None:
    """Writes how each weight differs from the stretched base's, in 8 bits, in steps of a size of its own.

    Fine-tuning moves weights little, so that 8 bits say the difference nearly as well as 16 say the weight.

    Args:
        tuned: what `train` made of the base, stretched as `Backbone.stretch` does it.
        base: "toy/clip" as it ships, in any precision; stays as it is.
        folder: made by this.
    """
    start = deepcopy(base).float()
    start.stretch()
    before, after = (dict(sorted(its.model.state_dict().items())) for its in (start, tuned))
    moved = {name: tensor - before[name] for name, tensor in after.items()}
    # The smallest of floats for a weight that has not moved.
    steps = [(its.abs().max() / _MOST).clamp(min=torch.finfo(its.dtype).tiny) for its in moved.values()]
    counts = {name: (its / step).round().to(torch.int8) for (name, its), step in zip(moved.items(), steps, strict=True)}
    folder.mkdir(parents=True)
    save_tensors(counts | {_STEPS: torch.stack(steps)}, folder / DIFFERENCE)


def load_fine_tuned(folder: str | os.PathLike) -> Backbone:
    """What `save_fine_tuned` wrote, added to "toy/clip".

    Raises:
        UserError: the file is damaged, or of another model.
    """
    backbone = load_backbone("toy/clip")
    backbone.stretch()
    state = backbone.model.state_dict()  # shares the model's memory
    counts, steps = _read_difference(Path(folder) / DIFFERENCE, state)
    for name, step in zip(sorted(counts), steps, strict=True):
        state[name].add_(counts[name] * step)
    return backbone


def _read_difference(file: Path, state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(whole numbers for each weight of `state`, sizes of the steps that they count, in the order of the names).

    Raises:
        UserError: the file is damaged, or of another model.
    """
    named = f"The fine-tuned model {str(file)!r}"
    with explain_failure(f"{named} could not be loaded", "Install the package again."):
        counts = read_state(file)
        steps = counts.pop(_STEPS, torch.empty(0))
        shapes = {name: (torch.int8, tensor.shape) for name, tensor in state.items()}
        fits = {name: (tensor.dtype, tensor.shape) for name, tensor in counts.items()} == shapes
        if not fits or steps.shape != (len(counts),) or not steps.is_floating_point():
            raise UserError(f"{named} is damaged: it is no difference from toy/clip. Install the package again.")
        check_finite([(_STEPS, steps)], named)
        return counts, steps
