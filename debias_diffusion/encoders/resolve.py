"""What a name means that people type for a model: its kind, and where it is. Nothing is loaded, no library imported."""

import os
import re
import sys
from dataclasses import dataclass
from enum import Enum, auto
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from ..errors import UserError, near_matches
from ..jobs import Job
from ..text.chunks import Reading
from ..toyworld.shipped import TWO_TOWERS, shipped

ORIGINAL = "original"  # name of the encoder in an SDXL checkpoint
MODELS_OF_RUN = ("last", "best")  # folders that `train` writes models to, the result first
FIRST, SECOND = "encoder", "encoder_2"  # folders that `align` writes encoders to, as `export` would
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".npz")
_FOLDERS = ("runs", "out", "output", "outputs", "exported", "models", "checkpoints", "weights", "data", "tmp")


class Kind(Enum):
    """What lies under a name."""

    OPEN_CLIP = auto()  # folder, MODEL:WEIGHTS or hf-hub:owner/name
    ABLATION = auto()  # folder with suppressed heads, as research's `ablate` writes it
    DIFFERENCE = auto()  # folder with the 8-bit difference from toy/clip
    TRANSFORMERS = auto()  # folder of a CLIPTextModel, a CLIPModel, or another of `clip_model.MODEL_TYPES`
    FILE = auto()  # weights alone
    HUB = auto()  # owner/name, in transformers' layout or with one file of weights
    ORIGINAL = auto()  # what comes with the SDXL checkpoint


# A folder is of the first kind whose file it has.
_FILES = {
    "ablation.json": Kind.ABLATION,
    "open_clip_config.json": Kind.OPEN_CLIP,
    "difference.safetensors": Kind.DIFFERENCE,
}


@dataclass(frozen=True)
class Model:
    """A model before it is loaded.

    Attributes:
        kind: what lies there.
        location: a folder, a file, or a hub id (owner/name, owner/name@revision); open_clip's name of MODEL:WEIGHTS.
        weights: tag or file of MODEL:WEIGHTS; else None, which for an open_clip name is random weights.
    """

    kind: Kind
    location: str
    weights: str | None = None


def resolve(name: str) -> Model:
    """The model that a name means; see `load_text_encoder` for the names."""
    if name == ORIGINAL:
        return Model(Kind.ORIGINAL, name)
    path = name.removeprefix("local-dir:")
    if path and os.path.exists(path):
        return _resolve_path(Path(path))
    if re.fullmatch(r"hf-hub:[\w.-]+/[\w.-]+(@[\w.-]+)?", name):
        return Model(Kind.OPEN_CLIP, name)
    model, colon, weights = name.partition(":")
    if colon and model not in ("local-dir", "hf-hub"):
        return Model(Kind.OPEN_CLIP, model, _find_weights(model, weights))
    if (folder := shipped(name)) != name:
        return _resolve_path(Path(folder))
    if may_be_hub_id(re.sub(r"@[\w.-]+$", "", name)):
        return Model(Kind.HUB, name)
    models = open_clip_models()
    if name not in models:
        raise UserError(
            f"{name!r} is not there.{near_matches(name, [*TWO_TOWERS, ORIGINAL, *models])} Give a training run, a "
            "folder with an encoder, a file of weights, MODEL:WEIGHTS (ViT-B-16-quickgelu:openai), or a hub id "
            "(owner/name; hf-hub:owner/name in open_clip's layout)."
        )
    raise UserError(
        f"{name!r} is an open_clip model without weights. Give {name}:WEIGHTS, with a file, a tag of open_clip "
        "(openai) or, to train from random weights, none. Where model and pretrained are options of their own, "
        "pretrained takes them."
    )


def _resolve_path(path: Path) -> Model:
    """The model of a path that exists; of a training run its model after the last step.

    Of a run that has not ended the best model so far, if it keeps one. Of an alignment the two-tower with the fitted
    first encoder, or that encoder alone.
    """
    if path.name == "open_clip_model.safetensors" and (path.parent / "open_clip_config.json").is_file():
        path = path.parent
    if path.is_file():
        return Model(Kind.FILE, str(path))
    for file, kind in _FILES.items():
        if (path / file).is_file():
            return Model(kind, str(path))
    for name in MODELS_OF_RUN:
        if (path / name / "open_clip_config.json").is_file():
            return Model(Kind.OPEN_CLIP, str(path / name))
    if (path / FIRST / "text_encoder").is_dir():
        return Model(Kind.TRANSFORMERS, str(path / FIRST))
    if Job.read(path).command in ("train", "align", "ablate") and not (path / SECOND).is_dir():
        raise UserError(
            f"The run in {str(path)!r} has not ended, so it has no model yet. Continue it: the command that began it "
            "goes on where it stopped."
        )
    return Model(Kind.TRANSFORMERS, str(path))


def _find_weights(model: str, weights: str) -> str | None:
    """The weights of MODEL:WEIGHTS; None for "none". Tags are checked when they are loaded."""
    if os.path.exists(shipped(model)):
        raise UserError(f"{model!r} brings its own weights; leave out {weights!r}, or give a model name.")
    models, readings = open_clip_models(), get_args(Reading)
    hint = near_matches(model, [*readings, *models])
    if model not in models and (models or hint):
        raise UserError(
            f"Unknown model {model!r} in {model + ':' + weights!r}.{hint} Before the colon stands a name of open_clip "
            f"(ViT-B-16-quickgelu), or how an encoder reads long prompts: {', '.join(readings)}."
        )
    if weights.endswith(_SUFFIXES) and not os.path.exists(weights):
        raise UserError(f"No weights {weights!r} for {model!r}: the file is not there.")
    return None if weights == "none" else weights


def open_clip_models() -> list[str]:
    """The names of open_clip's models; none where open_clip, which is optional, is missing."""
    if open_clip := sys.modules.get("open_clip"):
        return open_clip.list_models()  # with those that were added
    spec = find_spec("open_clip")  # its import takes seconds, its configurations are files
    folders = spec.submodule_search_locations if spec else []
    return [file.stem for folder in folders for file in Path(folder, "model_configs").glob("*.json")]


def may_be_hub_id(name: str) -> bool:
    """Whether a name that does not exist here could be a repository of the hub (owner/name), so that the hub is asked.

    A missing path is answered at once instead: a name that begins like a path, with a folder that exists here, or with
    a usual name for a folder of runs or downloads.
    """
    owner, _, rest = name.partition("/")
    is_path = owner in _FOLDERS or name.endswith(_SUFFIXES) or os.path.lexists(owner)
    return bool(re.fullmatch(r"\w[\w.-]{0,95}", owner) and re.fullmatch(r"[\w.-]{1,96}", rest)) and not is_path
