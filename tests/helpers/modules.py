"""Where the checkout is, and the folders at its top that are installed as parts of one package."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "debias_diffusion"
ROOMS = ("app", "eval", "pipelines")
