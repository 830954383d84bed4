"""Loads a two-tower from any known kind of folder, file or repository, recognised by its content."""

import os
import warnings
from pathlib import Path

import open_clip
from transformers import CLIPTokenizer

from ..ablation.folding import fold_text_heads
from ..ablation.heads import apply_saved
from ..ablation.saved import check_base, is_ablation, read_ablation
from ..errors import UserError, near_matches
from ..models.backbone import Backbone
from ..models.chinese_clip import is_chinese_clip
from ..models.loading import find_weights, load_backbone
from ..models.model_files import CONFIG_FILE, explain_failure, may_be_hub_id
from ..models.shipped import shipped
from ..models.weight_difference import DIFFERENCE, load_fine_tuned
from ..models.weight_files import plain_text_names
from .chinese_clip_model import read_chinese_clip
from .clip_model import read_clip_model, text_encoder_alone
from .hub_file import find_hub_file
from .names import State
from .places import model_and_weights, model_of_run
from .single_file import read_tensors, sidecar_config, text_part, usual_activation
from .text_encoders import TextEncoder, keeps_projection, to_transformers


def load_two_tower(name: str | os.PathLike) -> Backbone:
    """Loads a CLIP, SigLIP or Chinese-CLIP with both its towers, as retrieval and classification need it.

    Args:
        name: one of these, recognised by its content:

            - a training run (its model after the last step), or an open_clip folder;
            - what `ablate` has left: its base model, with heads suppressed;
            - `MODEL:WEIGHTS`, an open_clip name with a tag or a file: "ViT-B-16-quickgelu:openai",
              "ViT-L-14-quickgelu:longclip-L.pt";
            - a transformers folder of a CLIPModel, such as `export --to clip` writes;
            - a file with the weights of both towers in open_clip's or OpenAI's layout (Long-CLIP's and the released
              DeBias-CLIP's, too), if open_clip has a model of these sizes. A rule decides the activation if the file
              does not name it (see `single_file`);
            - a transformers folder of a ChineseCLIPModel, or the hub id of a published one
              ("OFA-Sys/chinese-clip-vit-base-patch16"), which is evaluated and ablated, but not trained;
            - a hub id (`owner/name`) of a CLIPModel, or of a repository that holds such a file and nothing else to load
              ("BeichenZhang/LongCLIP-L"); `hf-hub:owner/name` of an open_clip repository;
            - "toy/clip", "toy/long-clip" or "toy/debias-clip".

    Returns:
        The model in eval mode and float32, with no random weights.

    Raises:
        UserError: there is no two-tower, or a text encoder alone; the message names what is there, if known.
    """
    with explain_failure(f"The model {os.fspath(name)!r} could not be loaded"):
        backbone = _load(model_of_run(shipped(name)))
    if backbone.random_weights:
        raise UserError(f"{os.fspath(name)!r} has no weights, and results of random ones mean nothing.")
    backbone = backbone.float().eval()
    apply_saved(backbone)
    return backbone


def load_text_half(name: str) -> tuple[TextEncoder, CLIPTokenizer]:
    """The text encoder of an open_clip folder, of `MODEL:WEIGHTS`, of an ablation or of a difference from a base model.

    Suppressed text heads become ordinary weights, and those of the image tower do not matter. See `load_text_encoder`.
    """
    place = Path(name.removeprefix("local-dir:"))
    if is_ablation(place):
        backbone = load_two_tower(name)
    elif (place / DIFFERENCE).is_file():
        return to_transformers(load_fine_tuned(place))
    else:
        backbone = load_backbone(*model_and_weights(name) or (name,))
    fold_text_heads(backbone)
    return to_transformers(backbone, keeps_projection(backbone))


def _load(name: str) -> Backbone:
    place = Path(name.removeprefix("local-dir:"))
    if is_ablation(place):
        return _load_ablated(place)
    if (place / CONFIG_FILE).is_file() or name.startswith(("hf-hub:", "local-dir:")):
        return load_backbone(name)
    if (place / DIFFERENCE).is_file():
        return load_fine_tuned(place)
    if place.is_file():
        return _load_file(place)
    if is_chinese_clip(place):
        return read_chinese_clip(place if place.exists() else name)
    if place.exists():
        return read_clip_model(place)
    if parts := model_and_weights(name):
        return load_backbone(*parts)
    if not may_be_hub_id(name):
        raise UserError(_unknown(name))
    if file := find_hub_file(name):
        return _load_file(file)
    return read_clip_model(name)


def _load_ablated(folder: Path) -> Backbone:
    """The base model of a search, with the heads that it found suppressed."""
    model, digest, ablation = read_ablation(folder)
    backbone = load_two_tower(model)
    check_base(folder, model, digest, backbone)
    ablation.apply(backbone)
    return backbone


def _unknown(name: str) -> str:
    tags = open_clip.list_pretrained_tags_by_model(name) if name in open_clip.list_models() else []
    if name in open_clip.list_models():
        return (
            f"{name!r} is an open_clip model without weights, and results of random ones mean nothing. Give "
            f"{name}:WEIGHTS, with a file or one of: {', '.join(tags) or '(no tags for this model)'}."
        )
    return (
        f"{name!r} is not there.{near_matches(name, open_clip.list_models())} Give a training run, a folder or a file "
        "with both towers, MODEL:WEIGHTS (ViT-B-16-quickgelu:openai), or a hub id (owner/name)."
    )


def _load_file(file: Path) -> Backbone:
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
    return load_backbone(_of_activation(models, tensors, file, follows_rule), str(file))


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
    return len(table), kernel.shape[-1], len(kernel), vision, *tokens.shape, text, projection.shape[-1]


def _of_activation(models: list[str], tensors: State, file: Path, follows_rule: bool) -> str:
    """The one of these models with the activation that the weights were trained with, as far as it is known."""
    width = tensors["token_embedding.weight"].shape[1]
    blocks = len({name.split(".")[2] for name in tensors if name.startswith("transformer.resblocks.")})
    known = sidecar_config(file, width, blocks).get("hidden_act")
    act = known or usual_activation(blocks)
    fitting = [name for name in models if name.endswith("-quickgelu") == (act == "quick_gelu")]
    if known and not fitting:
        raise UserError(f"{os.fspath(file)!r} has the activation {known}; open_clip has no such model of its sizes.")
    if fitting and len(models) > 1 and not (follows_rule or known):
        guess = _GUESSED.format(file=os.fspath(file), model=fitting[0], models=" or ".join(models))
        warnings.warn(guess, stacklevel=5)
    return (fitting or models)[0]


_GUESSED = (
    "{file!r} does not name its activation; {model} is assumed. Models of its sizes: {models}; name the right one, as "
    "in {model}:{file}, to be sure."
)
