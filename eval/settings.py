"""What the settings of evaluations share, and their checks."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from debias_diffusion.errors import UserError, near_matches
from debias_diffusion.limits import check_max_bad
from debias_diffusion.models.shipped import shipped

ORIGINAL = "original"  # instead of an encoder of images: the first one of the SDXL checkpoint
OWN, CUT = "SDXL's own", "cut at 77 tokens"  # its label, and how it reads without a prefix
CHUNKS, OVERLAP = "chunks:", "overlap:"
# How an encoder of 77 positions reads long prompts for images, by the prefix of its name; without one it cuts them.
READINGS = {CHUNKS: "separate chunks", OVERLAP: "overlapping chunks"}


@dataclass
class BenchmarkConfig:
    """What evaluations of two-tower models on the files of one benchmark share.

    Attributes:
        encoders: CLIP models to compare: training runs, folders, files, hub ids, MODEL:PRETRAINED as open_clip names
            them (ViT-B-16-quickgelu:openai), toy/clip, toy/long-clip, toy/debias-clip.
        output: Folder for the results, a JSON file and a figure. Finished results in it are reused.
        batch_size: Images, or texts, encoded at once.
        max_bad: Largest share of records or images that may be unusable before the evaluation stops, from 0 to 1.
        device: Device to run on. The default is cuda where there is one, else cpu.
    """

    encoders: list[str]
    output: str
    batch_size: int = field(default=64, kw_only=True)
    max_bad: float = field(default=0.01, kw_only=True)
    device: str | None = field(default=None, kw_only=True)

    def __post_init__(self):
        check_settings(self)


def check_settings(config: Any, with_encoders: bool = True, of_images: bool = False) -> None:
    """What the settings of every evaluation call in `__post_init__`. Opens no data and no model.

    Args:
        of_images: the encoders are of generated images, see `check_encoders`.

    Raises:
        UserError: a setting that evaluations share is not allowed.
    """
    check_output(config.output)
    shipped(getattr(config, "base", None) or "")
    if with_encoders:
        check_encoders(config.encoders, of_images)
    if config.batch_size < 1:
        raise UserError(f"batch_size={config.batch_size} is not allowed. Give a whole number from 1.")
    check_max_bad(getattr(config, "max_bad", 0))
    limit = getattr(config, "limit", None)
    if limit not in (None, "auto") and limit < 1:
        raise UserError(f"limit={limit} leaves nothing to evaluate. Give a number of pairs from 1, or null for all.")


def check_output(output: str) -> None:
    """Raises UserError for an empty name, which would mean the current folder, and where no folder can be made."""
    if not output:
        raise UserError("There is no output. Give --output, a folder for the results.")
    path = Path(output).absolute()
    existing = next(place for place in (path, *path.parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        fault = "may not be written to" if existing.is_dir() else "is a file"
        raise UserError(f"The output {output!r} cannot be made: {str(existing)!r} {fault}. Give another folder.")


def check_source(config: Any) -> None:
    """Raises UserError unless the settings name either data or a benchmark (`dataset` and `root`), whole."""
    data, dataset, root, images = (getattr(config, name, None) for name in ("data", "dataset", "root", "images"))
    if data is None and dataset is None and root is None:
        fault = "There is no data and no benchmark"
    elif dataset is None and root is not None:
        fault = f"The root {root!r} is of a benchmark, and none is named"
    elif data is not None and dataset is not None:
        fault = f"Both data, {data!r}, and a benchmark, {dataset!r}, are given"
    elif dataset is not None and root is None:
        fault = f"The benchmark {dataset!r} needs the folder that it lies in"
    elif dataset is not None and images:
        fault = f"The images {images!r} are given, and the benchmark {dataset!r} has its own"
    else:
        return
    pairs = "captions.json --images images" if hasattr(config, "images") else "captions.json"
    raise UserError(
        f"{fault}. Give either --data, such as --data toy/test or --data {pairs}, or a benchmark, such as "
        "--dataset docci --root docci."
    )


def split_reading(name: str) -> tuple[str, str]:
    """The prefix of an encoder's name, one of `READINGS` or "" for none, and the name of the model."""
    reading = next(filter(name.startswith, READINGS), "")
    return reading, name.removeprefix(reading)


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
