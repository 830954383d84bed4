"""Names of encoders, as people type them: how each reads long prompts, and short labels."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from debias_diffusion.encoders import CLIP_CONTEXT, EncoderSpec
from debias_diffusion.errors import UserError, near_matches
from debias_diffusion.models.shipped import shipped

ORIGINAL = "original"  # instead of an encoder of images: the first one of the SDXL checkpoint
OWN, CUT = "SDXL's own", "cut at 77 tokens"  # its label, and how it reads without a prefix
CHUNKS, OVERLAP = "chunks:", "overlap:"
# How an encoder of 77 positions reads long prompts for images, by the prefix of its name; without one it cuts them.
READINGS = {CHUNKS: "separate chunks", OVERLAP: "overlapping chunks"}


def split_reading(name: str) -> tuple[str, str]:
    """The prefix of an encoder's name, one of `READINGS` or "" for none, and the name of the model."""
    reading = next(filter(name.startswith, READINGS), "")
    return reading, name.removeprefix(reading)


def spec_of(name: str) -> EncoderSpec:
    """The encoder of a name; without a prefix one of 77 tokens cuts prompts."""
    prefix, model = split_reading(name)
    spec = EncoderSpec.parse(model, "separate" if prefix == CHUNKS else "overlap")
    return replace(spec, reading="cut") if not prefix and spec.context_length <= CLIP_CONTEXT else spec


def check_encoders(names: Sequence[str], of_images: bool = False) -> None:
    """Checks the names of encoders.

    Args:
        of_images: one of `READINGS` may stand before a name.

    Raises:
        UserError: there are none, one is named twice, a name is misspelt, or one of `READINGS` stands where it has no
            meaning.
    """
    if not names or len(set(names)) < len(names):
        raise UserError(f"encoders={list(names)} is not allowed. Name at least one encoder, and none twice.")
    for name in names:
        reading, model = split_reading(name)
        if reading and not of_images:
            raise UserError(
                f"The encoder {name!r} reads prompts in {READINGS[reading]}, which only `evaluate generation` and "
                f"`evaluate dpg-bench` do. Give {model!r}."
            )
        prefix, colon, rest = model.partition(":")
        if not model or (colon and near_matches(prefix, READINGS) and not os.path.exists(model)):
            allowed = [f"{known + (rest or 'NAME')!r} to read long prompts in {how}" for known, how in READINGS.items()]
            raise UserError(
                f"There is no encoder {name!r}. Give {', '.join(allowed)}, or the encoder's name alone to cut them."
            )
        shipped(model)


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
