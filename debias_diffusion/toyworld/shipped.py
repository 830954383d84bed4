"""The toy models that come with the package, by name."""

import os
from pathlib import Path

from ..errors import UserError, near_matches

WEIGHTS = Path(__file__).parent / "weights"
_COMPLETE = "scores.json"  # exists only if all models do
# The folders that `python -m research toymodels` writes.
NAMES = {
    "toy/clip": "the base CLIP of 77 positions, as an open_clip folder",
    "toy/sdxl": "an SDXL that draws 48 x 48 pixels, as a diffusers folder",
    "toy/long-clip": "toy/clip fine-tuned with the long-clip recipe at 248 positions, as a difference from it",
    "toy/debias-clip": "the same with the debias-clip recipe",
    "toy/debias-clip-sdxl": "the same with the debias-clip-sdxl recipe",
    "toy/features": "a vision transformer for FID and DINO scores of toy images",
}

TWO_TOWERS = ("toy/clip", "toy/long-clip", "toy/debias-clip", "toy/debias-clip-sdxl")

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
    if not (WEIGHTS / _COMPLETE).is_file() or not folder.is_dir():
        raise UserError(
            f"{name!r} is not in this installation ({WEIGHTS} is not complete). Install a version with the weights, or "
            "make them in a clone of the repository: `python -m research toymodels` takes hours on two cores."
        )
    return str(folder)
