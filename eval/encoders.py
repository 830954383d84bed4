"""The encoders that an evaluation compares: checked, loaded, named, compared."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import TypeVar

import torch

from debias_diffusion.files import json_digest
from debias_diffusion.interchange.two_tower import load_two_tower
from debias_diffusion.models.backbone import Backbone

from .settings import CUT, ORIGINAL, OWN, READINGS, split_reading

Result = TypeVar("Result")


@dataclass(frozen=True)
class TwoTower:
    """An encoder with its image tower.

    Attributes:
        name: as the settings have it.
        label: short, and unique among the encoders of one evaluation.
        backbone: in evaluation mode, on its device.
        digest: of its weights and of replaced attention.
    """

    name: str
    label: str
    backbone: Backbone
    digest: str

    @cached_property
    def depends(self) -> dict:
        """Everything that affects its features, for the cache."""
        return {"encoder": self.digest, **how_used(self.backbone)}


def how_used(backbone: Backbone) -> dict:
    """Everything besides its weights that affects a two-tower's features."""
    tokenizer = json.loads(backbone.tokenizer.tokenizer.backend_tokenizer.to_str())
    # These two are left from the last call, and no row here depends on them.
    rules = {name: rule for name, rule in tokenizer.items() if name not in ("truncation", "padding")}
    return {
        "configuration": backbone.config,
        "tokenizer": json_digest(rules),
        "markers": asdict(backbone.tokenizer.markers),
    }


def of_each(names: Sequence[str], device: torch.device, evaluate: Callable[[TwoTower], Result]) -> dict[str, Result]:
    """The result of `evaluate` for each encoder, by label. One encoder at a time is in memory.

    Raises:
        UserError: an encoder cannot be loaded.
    """
    # No variable holds an encoder, or it would stay in memory while the next is loaded.
    pairs = zip(names, labels(names), strict=True)
    return {label: evaluate(_load(name, label, device)) for name, label in pairs}


def _load(name: str, label: str, device: torch.device) -> TwoTower:
    backbone = load_two_tower(name).to(device)
    return TwoTower(name, label, backbone, backbone.digest())


def labels(encoders: Sequence[str]) -> list[str]:
    """Short unique names, and how prompts are read: of paths the last parts, as many as make them unique."""
    split = [split_reading(name) for name in encoders]
    models = list(dict.fromkeys(model for _, model in split))
    short = dict(zip(models, _short(models), strict=True))
    if ORIGINAL in short and not os.path.exists(ORIGINAL):
        short[ORIGINAL] = OWN
    ways = [READINGS.get(reading, CUT if short[model] == OWN else "") for reading, model in split]
    named = [", ".join(filter(None, (short[model], way))) for (_, model), way in zip(split, ways, strict=True)]
    return named if len(set(named)) == len(named) else list(encoders)


def _short(encoders: Sequence[str]) -> list[str]:
    paths = [Path(name) if os.path.exists(name) else None for name in encoders]
    pairs = list(zip(encoders, paths, strict=True))
    for parts in range(1, max((len(path.parts) for path in paths if path), default=1) + 1):
        short = [name if path is None else _plotted(str(Path(*path.parts[-parts:]))) for name, path in pairs]
        if len(set(short)) == len(short):
            return short
    return list(encoders)


def _plotted(label: str) -> str:
    """A label for legends, where matplotlib omits names that begin with an underscore."""
    return f"./{label}" if label.startswith("_") else label


def compare(values: Mapping[str, Mapping], difference: Callable[..., dict]) -> list[dict]:
    """Every two encoders compared, the later with the earlier, by every score.

    Args:
        values: {label: {score: an argument of `difference`}}
        difference: (a, b, score) -> "difference" a - b, "low", "high", "p"

    Returns:
        {"a": label, "b": label, "score": name, "difference", "low", "high", "p"}, one for each pair and score.
    """
    return [
        {"a": a, "b": b, "score": score, **difference(values[a][score], values[b][score], score)}
        for b, a in combinations(values, 2)
        for score in values[b]
    ]
