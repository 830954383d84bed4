"""What a search leaves: `ablation.json`, with the base model and the ablated heads, and the means that replace them."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file

from ..errors import explain_failure
from ..files import read_json_object, sha256

if TYPE_CHECKING:
    from .heads import Ablation

FILE, MEANS_FILE = "ablation.json", "means.safetensors"


def read_ablation(folder: str | os.PathLike) -> tuple[str, str, "Ablation"]:
    """(name of the base model, its `Backbone.digest`, the suppressed heads)."""
    from .heads import MEAN, Ablation  # open_clip is optional

    file = Path(folder) / FILE
    with explain_failure(f"{str(file)!r} cannot be read", "Search again, or give the model alone."):
        content, means = read_json_object(file), None
        if content["kind"] == MEAN:
            if sha256(file.parent / MEANS_FILE) != content["means_sha256"]:
                raise ValueError(f"{MEANS_FILE} is damaged or of another search")
            means = load_file(file.parent / MEANS_FILE)["means"]
        ablation = Ablation.of_rows(content["tower"], content["beta"], means)
        return str(content["model"]), str(content["model_sha256"]), ablation
