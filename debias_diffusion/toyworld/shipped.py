"""The toy models that come with the package, by name."""

import os
from pathlib import Path

from ..errors import UserError, near_matches

WEIGHTS = Path(__file__).parent / "weights"
# The base CLIP of 77 positions, and what recipes have made of it at 248, as differences from it.
TWO_TOWERS = ("toy/clip", "toy/long-clip", "toy/debias-clip", "toy/debias-clip-sdxl")
# The folders that `python -m research toymodels` writes: also an SDXL that draws 48 x 48 pixels, and a vision
# transformer for scores of images.
NAMES = (*TWO_TOWERS, "toy/sdxl", "toy/features")

GUIDANCE_SCALE, STEPS = 3.0, 20  # for images from toy/sdxl, whose model_index.json says so


def shipped(name: str | os.PathLike) -> str:
    """The folder of one of `NAMES`; any other name or path unchanged.

    Raises:
        UserError: an unknown name that begins with toy/, or a package without its weights.
    """
    name = os.fspath(name)
    if not name.startswith("toy/") or Path(name).exists():
        return name
    if name not in NAMES:
        raise UserError(f"Unknown toy model {name!r}.{near_matches(name, NAMES)} Choose one of: {', '.join(NAMES)}.")
    folder = WEIGHTS / name.removeprefix("toy/")
    if not (WEIGHTS / "scores.json").is_file() or not folder.is_dir():  # it is written last
        raise UserError(
            f"{name!r} is not in this installation ({WEIGHTS} is not complete). Install a version with the weights, or "
            "make them in a clone of the repository: `python -m research toymodels` takes hours on two cores."
        )
    return str(folder)
