"""A fine-tuned toy CLIP stored as its difference from the base model, in a quarter of the bytes."""

import os
from copy import deepcopy
from pathlib import Path

import torch

from ..clip.backbone import Backbone
from ..clip.model_files import check_finite
from ..clip.weight_files import read_state, save_tensors
from ..toyworld.shipped import shipped
from .loading import load_backbone

DIFFERENCE = "difference.safetensors"
_STEPS = "steps"
_MOST = 127  # of 8 bits with a sign


def save_fine_tuned(tuned: Backbone, base: Backbone, folder: Path) -> None:
    """Writes each weight's difference from the stretched base model, in 8 bits, with a step size for each tensor.

    Fine-tuning changes weights little, so 8 bits hold the difference nearly as well as 16 bits hold the weight.

    Args:
        tuned: the base model after `train`, stretched by `Backbone.stretch`.
        base: "toy/clip" as shipped, in any precision; not changed.
        folder: is created.
    """
    start = deepcopy(base).float()
    start.stretch()
    before, after = (dict(sorted(backbone.model.state_dict().items())) for backbone in (start, tuned))
    change = {name: tensor - before[name] for name, tensor in after.items()}
    # At least the smallest float, for a weight that has not changed.
    steps = [(tensor.abs().max() / _MOST).clamp(min=torch.finfo(tensor.dtype).tiny) for tensor in change.values()]
    counts = {
        name: (tensor / step).round().to(torch.int8) for (name, tensor), step in zip(change.items(), steps, strict=True)
    }
    folder.mkdir(parents=True)
    save_tensors(counts | {_STEPS: torch.stack(steps)}, folder / DIFFERENCE)


def load_fine_tuned(folder: str | os.PathLike) -> Backbone:
    """ "toy/clip" with the difference that `save_fine_tuned` wrote.

    Raises:
        UserError: the file is damaged, or of another model.
    """
    file = Path(folder) / DIFFERENCE
    backbone = load_backbone(shipped("toy/clip"))
    backbone.stretch()
    state = backbone.model.state_dict()  # shares the model's memory
    counts = read_state(file)
    steps = counts.pop(_STEPS)
    check_finite([(_STEPS, steps)], f"The fine-tuned model {str(file)!r}")
    for name, step in zip(sorted(state), steps, strict=True):
        state[name].add_(counts[name] * step)
    return backbone
