"""Loads two-towers of open_clip's models: their configurations, pretrained tags, tokenizers and files of weights."""

import os
from pathlib import Path

import open_clip
import torch
from open_clip import CLIPTextCfg
from open_clip.convert import convert_state_dict
from open_clip.factory import _find_checkpoint_in_dir
from open_clip.model import convert_to_custom_text_state_dict, resize_pos_embed
from open_clip.pretrained import download_pretrained_from_hf
from open_clip.transformer import ResidualAttentionBlock
from torch import nn

from ..clip.backbone import SHORT_POSITIONS_FILE, Backbone
from ..clip.families import Family, find_family
from ..clip.image_tower import add_prompts
from ..clip.positions import FACTOR, KEEP, stretched_length
from ..clip.regional_prompts import PromptSettings
from ..clip.text_tower import set_positions, set_short_positions
from ..clip.weight_files import (
    CONFIG_FILE,
    POSITIONS,
    TEXT,
    WEIGHTS_FILE,
    check_finite,
    fold_long_clip,
    is_long_clip,
    read_state,
)
from ..errors import UserError, explain_failure, near_matches
from ..files import read_json
from ..toyworld.shipped import shipped
from .hub import find_file, locate

_HUB = "hf-hub:"
DIFFERENCE, STEPS = "difference.safetensors", "steps"  # of a fine-tuned toy CLIP: its file, and a tensor in it
_BIG_VISION = (".npz", ".npy")  # which only open_clip reads, and refuses where a shape differs


def load_backbone(location: str, weights: str | None = None) -> Backbone:
    """Loads a CLIP or SigLIP two-tower of open_clip's.

    Args:
        location, weights: of a `Model` of the kind OPEN_CLIP: a folder or "hf-hub:owner/name", or the name of a model
            and a tag, a file (Long-CLIP's, too), or None for random weights from torch's current seed.

    Returns:
        The model, with the heads suppressed that its configuration notes.

    Raises:
        UserError: the model, the weights or the tokenizer are unknown or broken, or do not fit each other; or the text
            tower is neither CLIP's nor SigLIP's.
    """
    location = _fetch(location)
    config, family = _read_config(location, weights)
    file = _find_weights(location, weights)
    tokenizer = family.load_tokenizer(location, file and file.parent, config["model_cfg"]["text_cfg"])
    name = f"local-dir:{location}" if os.path.isdir(location) else location
    clip = open_clip.create_model(name, pretrained=weights, load_weights=False)
    blocks = getattr(clip, "text", clip).transformer.resblocks if family.causal else ()
    if not all(type(block) is ResidualAttentionBlock for block in blocks):
        raise UserError(f"The text tower of {location!r} has unusual blocks; only plain CLIP blocks can be used.")
    if (prompts := config.get("debias_diffusion", {}).get("regional_prompts")) is not None:
        with explain_failure(f"The regional prompts of {location!r} cannot be used"):
            add_prompts(clip.visual, PromptSettings(**prompts))
    quick_gelu = bool(config["model_cfg"].get("quick_gelu"))
    stretched = file and load_weights(clip, file, location, quick_gelu)
    if file:
        check_finite(clip.state_dict().items(), f"{str(file)!r}")
    if stretched:
        tokenizer = tokenizer.with_context_length(clip.context_length)
        config["model_cfg"]["text_cfg"]["context_length"] = clip.context_length
        config["debias_diffusion"] = stretched
    config.setdefault("preprocess_cfg", open_clip.get_model_preprocess_cfg(clip))
    backbone = Backbone(clip, tokenizer, config, random_weights=file is None)
    _load_short_positions(backbone, file)
    if backbone.image_attention or backbone.text_attention:
        from ..ablation.heads import TOWERS, suppressed_heads  # which few models need

        for ablation in filter(None, (suppressed_heads(backbone, tower) for tower in TOWERS)):
            ablation.apply(backbone)
    return backbone


def load_fine_tuned(location: str) -> Backbone:
    """A fine-tuned toy CLIP: toy/clip, stretched, with the difference that `python -m research toymodels` wrote."""
    file, backbone = Path(location, DIFFERENCE), load_backbone(shipped("toy/clip"))
    backbone.stretch()
    state, counts = backbone.model.state_dict(), read_state(file)  # the first shares the model's memory
    steps = counts.pop(STEPS)
    check_finite([(STEPS, steps)], f"The fine-tuned model {str(file)!r}")
    for name, step in zip(sorted(state), steps, strict=True):
        state[name].add_(counts[name] * step)
    return backbone


def _load_short_positions(backbone: Backbone, weights: Path | None) -> None:
    """The table of short captions beside a folder's weights, if there is one."""
    file = weights and weights.with_name(SHORT_POSITIONS_FILE)
    if not file or weights.name != WEIGHTS_FILE or not file.is_file():
        return
    table, width = read_state(file).get(POSITIONS), backbone.text.tower.positional_embedding.shape[1]
    if table is None or table.ndim != 2 or table.shape[1] != width or not 3 <= len(table) <= backbone.context_length:
        raise UserError(
            f"{str(file)!r} holds no table of at most {backbone.context_length} positions of width {width}. Get it "
            "again, or remove it: it is only read for training and for `export --positions short`."
        )
    check_finite([(POSITIONS, table)], f"{str(file)!r}")
    set_short_positions(backbone.text.tower, table)


def _fetch(location: str) -> str:
    """The folder of a hub id, downloaded unless it is cached; other locations as they are."""
    if not location.startswith(_HUB):
        return location
    hub_id = location.removeprefix(_HUB)
    if find_file(hub_id, CONFIG_FILE) is None:
        raise UserError(f"{location!r} holds no {CONFIG_FILE}.")
    repository, _, revision = hub_id.partition("@")
    return os.path.dirname(download_pretrained_from_hf(repository, revision=revision or None))


def _read_config(location: str, weights: str | None) -> tuple[dict, Family]:
    """(content of open_clip_config.json, as complete as this module needs it; the family)."""
    if os.path.isdir(location):
        config = read_json(Path(location, CONFIG_FILE))
    else:
        config = {"model_cfg": open_clip.get_model_config(location)}
        _check_weights(location, weights)
    if config["model_cfg"].get("quick_gelu") is False:  # as open_clip has it without the key
        del config["model_cfg"]["quick_gelu"]
    text_cfg = config["model_cfg"]["text_cfg"]
    text_cfg.setdefault("context_length", CLIPTextCfg.context_length)
    text_cfg.setdefault("vocab_size", CLIPTextCfg.vocab_size)
    return config, find_family(location, config["model_cfg"])


def _check_weights(model: str, weights: str | None) -> None:
    """Raises UserError unless the weights exist and fit the model's activation, which a state dict does not hold."""
    if weights is None or os.path.isfile(weights):
        return
    tags = open_clip.list_pretrained_tags_by_model(model)
    if weights not in tags:
        raise UserError(
            f"No weights {weights!r} for {model!r}.{near_matches(weights, tags)} "
            f"Give a file or one of: {', '.join(tags) or '(no tags for this model)'}."
        )
    quick = open_clip.get_pretrained_cfg(model, weights).get("quick_gelu", False)
    if quick != bool(open_clip.get_model_config(model).get("quick_gelu")):
        other = f"{model}-quickgelu" if quick else model.removesuffix("-quickgelu")
        raise UserError(
            f"The weights {weights!r} were trained {'with' if quick else 'without'} QuickGELU, which {model!r} "
            f"{'lacks' if quick else 'has'}. Use the model {other}."
        )


def _find_weights(location: str, weights: str | None) -> Path | None:
    """The file of a model's weights, downloaded unless it is cached; None for random weights."""
    if os.path.isdir(location):
        if (file := _find_checkpoint_in_dir(Path(location))) is None:
            raise UserError(f"The folder {location!r} holds no weights (open_clip_model.safetensors, for example).")
        return Path(file)
    if weights is None or os.path.isfile(weights):
        return weights and Path(weights)
    pretrained = open_clip.get_pretrained_cfg(location, weights)
    locate(os.path.dirname(pretrained["hf_hub"]))  # says at once if the hub is out of reach
    return Path(open_clip.download_pretrained(pretrained))


def load_weights(clip: nn.Module, file: Path, model: str, quick_gelu: bool) -> dict[str, int] | None:
    """Loads weights into open_clip's module, and never interpolates text positions, as open_clip does silently.

    A Long-CLIP checkpoint's two tables of positions become one, and the module gets their context length. Without the
    prefix `text.` it is from Long-CLIP's code, which trains OpenAI's CLIPs alone. With it (open_clip's CustomTextCLIP,
    as in the released weights of DeBias-CLIP) the base model can be any.

    Args:
        clip: an `open_clip.CLIP` or `CustomTextCLIP`.
        file: weights that open_clip reads (safetensors, torch, big_vision's npz), or a Long-CLIP checkpoint.
        model: its name in errors.
        quick_gelu: whether `clip` has OpenAI's activation, which is not in the file.

    Returns:
        {"keep", "factor"} that a Long-CLIP checkpoint's positions were stretched with; else None.
    """
    if file.suffix in _BIG_VISION:
        open_clip.load_checkpoint(clip, str(file))
        return None
    state, tower = read_state(file), getattr(clip, "text", clip)
    long_clip, is_prefixed = is_long_clip(state), f"{TEXT}token_embedding.weight" in state
    if long_clip:
        if not quick_gelu and not is_prefixed:
            raise UserError(
                f"{str(file)!r} is a Long-CLIP checkpoint, trained from OpenAI's weights with QuickGELU, which "
                f"{model!r} lacks. Use the model {model}-quickgelu."
            )
        positions, width = tower.positional_embedding.shape
        set_positions(clip, torch.empty(stretched_length(positions), width))
        state = fold_long_clip(state)
    table, positions = state.get(POSITIONS, state.get(TEXT + POSITIONS)), len(tower.positional_embedding)
    if table is not None and len(table) != positions:
        raise UserError(
            f"{str(file)!r} holds {len(table)} text positions, {model!r} has {positions}; they are not interpolated. "
            f"Give weights of {positions} positions, or, for a stretched model, the folder of its training run, whose "
            "open_clip_config.json has the context length."
        )
    if is_prefixed and tower is clip:
        state = {name.removeprefix(TEXT): tensor for name, tensor in state.items()}
    # As `open_clip.load_checkpoint` does, which would read the file again.
    state = convert_state_dict(clip, state)
    if POSITIONS in state and tower is not clip:
        state = convert_to_custom_text_state_dict(state)
    if clip.logit_bias is not None:
        state.setdefault("logit_bias", torch.zeros_like(state["logit_scale"]))
    for name in {"logit_scale", "logit_bias"} & state.keys():
        state[name] = state[name].reshape(getattr(clip, name).shape)
    resize_pos_embed(state, clip)
    clip.load_state_dict(state)
    return {"keep": KEEP, "factor": FACTOR} if long_clip else None
