"""Where models lie: in the folders of runs, and under the names that open_clip knows."""

import os
from importlib.util import find_spec
from pathlib import Path

from ..errors import UserError
from ..jobs import Job
from ..models.model_files import CONFIG_FILE


def model_and_weights(name: str) -> tuple[str, str] | None:
    """The open_clip name and the weights of `MODEL:WEIGHTS`; None for a path, `hf-hub:...` and `local-dir:...`."""
    model, colon, weights = name.partition(":")
    is_one = colon and "/" not in model and model not in ("hf-hub", "local-dir") and not Path(name).exists()
    return (model, weights) if is_one else None


def is_open_clip_name(name: str | None) -> bool:
    """Whether open_clip, which is optional, is here and has a model of this name."""
    if find_spec("open_clip") is None:
        return False
    import open_clip

    return name in open_clip.list_models()


# Folders that `train` writes models to, the result first.
MODELS_OF_RUN = ("last", "best")

# Folders that `align` writes encoders to, as `export` would.
FIRST, SECOND = "encoder", "encoder_2"

MODELING_FILE = "modeling_ablated_clip.py"  # beside a CLIPModel whose image tower has suppressed heads


def fitted_second(model: str | os.PathLike) -> str | None:
    """SDXL's second encoder that `align` has fitted beside a first one, in the folder of the alignment; else None."""
    folder = Path(os.fspath(model).removeprefix("local-dir:")) / SECOND
    return str(folder) if folder.is_dir() else None


def model_of_run(model: str) -> str:
    """The folder of a training run's model after the last step; `model` itself if it is no run's folder. open_clip's
    prefix for folders may stand before its name.

    Of a run that has not ended the best model so far, if it keeps one. Of an alignment the two-tower with the fitted
    first encoder, or that encoder alone.

    Raises:
        UserError: the run has not ended, and has no model yet.
    """
    folder = Path(model.removeprefix("local-dir:"))
    if (folder / CONFIG_FILE).is_file():
        return model
    for name in MODELS_OF_RUN:
        if (folder / name / CONFIG_FILE).is_file():
            return str(folder / name)
    if (folder / FIRST / "text_encoder").is_dir():
        return str(folder / FIRST)
    if Job.read(folder).command in ("train", "align") and not (folder / SECOND).is_dir():
        raise UserError(
            f"The run in {model!r} has not ended, so it has no model yet. Continue it: the command that began it goes "
            "on where it stopped."
        )
    return model
