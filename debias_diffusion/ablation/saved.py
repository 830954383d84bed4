"""What a search leaves: `ablation.json`, with the base model and the ablated heads, and the means that replace them."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file

from ..errors import UserError, reason
from ..files import read_json_object, write_json
from ..models.weight_files import save_tensors, weights_digest

if TYPE_CHECKING:
    from ..models.backbone import Backbone
    from .heads import Ablation

FILE, MEANS_FILE = "ablation.json", "means.safetensors"


def ablation_content(model: str, backbone: "Backbone", ablation: "Ablation", **more) -> dict:
    """Of `ablation.json`: the model's name and digest, the tower, beta, the suppressed heads' names, and `more`."""
    content = {"model": model, "model_sha256": weights_digest(backbone.model), "tower": ablation.tower}
    return content | ablation.description() | {"heads": ablation.names} | more


def write_ablation(folder: Path, model: str, backbone: "Backbone", ablation: "Ablation", **more) -> None:
    """Writes `ablation.json`, and the means of an ablation that has some."""
    if ablation.means is not None:
        save_tensors({"means": ablation.means}, folder / MEANS_FILE)
    write_json(folder / FILE, ablation_content(model, backbone, ablation, **more))


def is_ablation(folder: str | os.PathLike) -> bool:
    """Whether a search has left its result there."""
    return (Path(folder) / FILE).is_file()


def read_ablation(folder: str | os.PathLike) -> tuple[str, str, "Ablation"]:
    """(name of the base model, sha256 of its weights, the suppressed heads).

    Raises:
        UserError: the file cannot be read, or is no such file.
    """
    from .heads import MEAN, Ablation  # open_clip is optional

    file = Path(folder) / FILE
    try:
        content = read_json_object(file)
        ablation = Ablation.of_rows(content["tower"], content["beta"])
        if content["kind"] == MEAN:
            ablation = ablation.with_means(load_file(file.parent / MEANS_FILE)["means"])
        return str(content["model"]), str(content["model_sha256"]), ablation
    except (KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
        raise UserError(
            f"{str(file)!r} cannot be read: {reason(error)}. Search again, or give the model alone."
        ) from error
