"""A fine-tuned toy CLIP as what it differs in from its base, so that both its towers take no more room than one."""

import os
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_file

from ..backbones import Backbone, load_backbone
from ..weights import save_tensors

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
    """What `save_fine_tuned` wrote, added to "toy/clip"."""
    backbone = load_backbone("toy/clip")
    backbone.stretch()
    counts = load_file(Path(folder) / DIFFERENCE)
    steps = counts.pop(_STEPS)
    state = backbone.model.state_dict()  # shares the model's memory
    for name, step in zip(sorted(counts), steps, strict=True):
        state[name].add_(counts[name] * step)
    return backbone
