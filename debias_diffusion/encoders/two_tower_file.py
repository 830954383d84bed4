"""A two-tower from one file of weights: open_clip's model of the same sizes."""

import os
import warnings
from pathlib import Path

import open_clip

from ..clip.backbone import Backbone
from ..clip.model_files import CONFIG_FILE
from ..clip.weight_files import plain_text_names
from ..errors import UserError
from .clip_model import text_encoder_alone
from .loading import find_weights, load_backbone
from .names import State
from .single_file import read_tensors, sidecar_config, text_part, usual_activation


def read_two_tower(file: Path) -> Backbone:
    """The two-tower in a file of weights: open_clip's model of the same sizes.

    Raises:
        UserError: the file does not hold both towers, or open_clip has no such model.
    """
    folder = file.parent
    if (folder / CONFIG_FILE).is_file() and find_weights("", f"local-dir:{folder}", None) == file:
        return load_backbone(str(folder))
    tensors, label = read_tensors(file), repr(os.fspath(file))
    _, follows_rule = text_part(tensors, file)
    if any(".vision_model." in f".{name}" for name in tensors):
        raise UserError(f"{label} holds a transformers CLIPModel. Give its folder, which also has the configuration.")
    if not any(name.startswith("visual.") for name in tensors):
        raise text_encoder_alone(file)
    tensors = plain_text_names(tensors)
    sizes = _sizes_of(tensors)
    models = [name for name in open_clip.list_models() if sizes and _sizes(name) == sizes]
    if not models:
        raise UserError(
            f"{label} holds two towers, but open_clip has no plain CLIP of these sizes. Name its model, "
            f"MODEL:{os.fspath(file)}, or give its open_clip folder."
        )
    *_, width, blocks, _ = sizes
    known = sidecar_config(file, width, blocks).get("hidden_act")
    act = known or usual_activation(blocks)
    fitting = [name for name in models if name.endswith("-quickgelu") == (act == "quick_gelu")]
    if known and not fitting:
        raise UserError(f"{label} has the activation {known}; open_clip has no such model of its sizes.")
    if fitting and len(models) > 1 and not (follows_rule or known):
        warnings.warn(
            f"{label} does not name its activation; {fitting[0]} is assumed. Models of its sizes: "
            f"{' or '.join(models)}; name the right one, as in {fitting[0]}:{file}, to be sure.",
            stacklevel=5,
        )
    return load_backbone((fitting or models)[0], str(file))


def _sizes(model: str) -> tuple | None:
    """The sizes that identify a plain CLIP of open_clip up to its activation; None for any other model."""
    config = open_clip.get_model_config(model)
    vision, text = config["vision_cfg"], config["text_cfg"]
    plain = (
        config.keys() <= {"embed_dim", "quick_gelu", "vision_cfg", "text_cfg"}
        and vision.keys() <= {"image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio"}
        and text.keys() <= {"context_length", "vocab_size", "width", "heads", "layers"}
        and isinstance(vision["layers"], int)
    )
    if not plain:
        return None
    rows = (vision["image_size"] // vision["patch_size"]) ** 2 + 1
    towers = [rows, *(vision[key] for key in ("patch_size", "width", "layers"))]
    return *towers, text["vocab_size"], text["width"], text["layers"], config["embed_dim"]


def _sizes_of(tensors: State) -> tuple | None:
    """The same sizes of a file's weights."""
    kernel, table, tokens, projection = (
        tensors.get(name)
        for name in ("visual.conv1.weight", "visual.positional_embedding", "token_embedding.weight", "text_projection")
    )
    if any(tensor is None or tensor.ndim not in (2, 4) for tensor in (kernel, table, tokens, projection)):
        return None
    vision, text = (
        len({name.split(".")[at] for name in tensors if name.startswith(prefix)})
        for prefix, at in (("visual.transformer.resblocks.", 3), ("transformer.resblocks.", 2))
    )
    [rows, _], [width, *_, patch_size] = table.shape, kernel.shape
    return rows, patch_size, width, vision, *tokens.shape, text, projection.shape[-1]
