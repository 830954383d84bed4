"""Where models lie: in the folders of runs, and under the names that open_clip knows."""

import os
from pathlib import Path

from ..models.backbone import CONFIG_FILE


def model_and_weights(name: str) -> tuple[str, str] | None:
    """The open_clip name and the weights of `MODEL:WEIGHTS`; None for a path, `hf-hub:...` and `local-dir:...`."""
    model, colon, weights = name.partition(":")
    is_one = colon and "/" not in model and model not in ("hf-hub", "local-dir") and not Path(name).exists()
    return (model, weights) if is_one else None


# Folders that `align` writes encoders to, as `export` would.
FIRST, SECOND = "encoder", "encoder_2"


def fitted_second(model: str | os.PathLike) -> str | None:
    """SDXL's second encoder that `align` has fitted beside a first one, in the folder of the alignment; else None."""
    folder = Path(model) / SECOND
    return str(folder) if folder.is_dir() else None


def best_of_run(model: str) -> str:
    """The folder of the best model of a training run, or of its last one if it has no best; else `model`.

    Of an alignment the two-tower with the fitted first encoder, or that encoder alone.
    """
    folder = Path(model)
    if (folder / CONFIG_FILE).is_file():
        return model
    for name in ("best", "last"):
        if (folder / name / CONFIG_FILE).is_file():
            return str(folder / name)
    return str(folder / FIRST) if (folder / FIRST / "text_encoder").is_dir() else model
