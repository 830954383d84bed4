"""Loads two-towers of open_clip's models: their configurations, pretrained tags, tokenizers and files of weights."""

import os
from pathlib import Path

import open_clip
import torch
from open_clip import CLIPTextCfg
from open_clip.factory import _find_checkpoint_in_dir
from open_clip.pretrained import download_pretrained_from_hf
from open_clip.transformer import ResidualAttentionBlock
from torch import nn

from ..ablation.heads import apply_saved
from ..clip.backbone import SHORT_POSITIONS_FILE, Backbone
from ..clip.families import Family, find_family
from ..clip.image_tower import add_prompts
from ..clip.model_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    check_finite,
    check_sizes,
    explain_failure,
    find_file,
    quiet_logging,
)
from ..clip.positions import FACTOR, KEEP, stretched_length
from ..clip.regional_prompts import PromptSettings
from ..clip.text_tower import set_positions, set_short_positions
from ..clip.weight_files import (
    POSITIONS,
    TEXT,
    fold_long_clip,
    has_text_prefix,
    is_long_clip,
    plain_text_names,
    read_state,
    table_names,
)
from ..errors import UserError, near_matches
from ..files import read_json
from ..text.tokens import CaptionTokenizer
from ..toyworld.shipped import shipped

_BIG_VISION = (".npz", ".npy")  # which only open_clip reads, and refuses where a shape differs


def load_backbone(model: str, pretrained: str | None = None) -> Backbone:
    """Loads a CLIP or SigLIP two-tower.

    Args:
        model: an open_clip name ("ViT-B-16"; "ViT-B-16-quickgelu" for OpenAI's weights; "ViT-B-16-SigLIP2"), an
            open_clip folder such as training leaves, "hf-hub:owner/name", or "toy/clip".
        pretrained: for a name: an open_clip tag ("openai", "laion2b_s34b_b88k", "webli") or a file of weights, of
            Long-CLIP's too. None gives random weights from torch's current seed.

    Returns:
        The model, with the heads suppressed that its configuration notes.

    Raises:
        UserError: the model, the weights or the tokenizer are unknown or broken, or do not fit each other; or the text
            tower is neither CLIP's nor SigLIP's.
    """
    with explain_failure(f"The weights of {model!r} (pretrained={pretrained!r}) could not be loaded"), quiet_logging():
        return _load(shipped(model), pretrained)


def load_tokenizer(model: str, pretrained: str | None, keep: int, factor: int) -> CaptionTokenizer:
    """The tokenizer of a two-tower for its stretched context length, without the weights.

    Args:
        model, pretrained: as for `load_backbone`.
        keep, factor: what the model would be stretched with; one that is stretched already keeps its length.
    """
    with explain_failure(f"The tokenizer of {model!r} could not be loaded"):
        model = shipped(model)
        config, source, family = _find(model, pretrained)
        file = Path(pretrained) if pretrained and os.path.isfile(pretrained) else None
        folder = Path(source.removeprefix("local-dir:")) if (source or "").startswith("local-dir:") else None
        tokenizer = family.load_tokenizer(model, folder or (file and file.parent), config["model_cfg"]["text_cfg"])
        if "keep" in config.get("debias_diffusion", {}):
            return tokenizer
        if file and file.suffix not in _BIG_VISION and is_long_clip(read_state(file)):
            keep, factor = KEEP, FACTOR
        return tokenizer.with_context_length(stretched_length(tokenizer.context_length, keep, factor))


def _find(model: str, pretrained: str | None) -> tuple[dict, str | None, Family]:
    """The configuration and source of `_find_config`, and the family; weights fit the model as far as names say it."""
    config, source = _find_config(model)
    family = find_family(model, config["model_cfg"])
    if source is None:
        _check_pretrained(model, pretrained)
    elif pretrained is not None:
        raise UserError(f"{model!r} brings its own weights; leave out pretrained={pretrained!r}, or give a model name.")
    return config, source, family


def _load(model: str, pretrained: str | None) -> Backbone:
    config, source, family = _find(model, pretrained)
    file = find_weights(model, source, pretrained)
    if source and file:
        check_sizes(config, file.stat().st_size, repr(model))
    tokenizer = family.load_tokenizer(model, file and file.parent, config["model_cfg"]["text_cfg"])
    clip = open_clip.create_model(source or model, pretrained=pretrained, load_weights=False)
    blocks = getattr(clip, "text", clip).transformer.resblocks if family.causal else ()
    if not all(type(block) is ResidualAttentionBlock for block in blocks):
        raise UserError(f"The text tower of {model!r} has unusual blocks; only plain CLIP blocks can be used.")
    if (prompts := config.get("debias_diffusion", {}).get("regional_prompts")) is not None:
        with explain_failure(f"The regional prompts of {model!r} cannot be used"):
            add_prompts(clip.visual, PromptSettings.from_config(prompts))
    stretched = file and load_weights(clip, file, model, bool(config["model_cfg"].get("quick_gelu")))
    if file:
        check_finite(clip.state_dict().items(), f"{str(file)!r}")
    if stretched:
        tokenizer = tokenizer.with_context_length(clip.context_length)
        config["model_cfg"]["text_cfg"]["context_length"] = clip.context_length
        config["debias_diffusion"] = stretched
    config.setdefault("preprocess_cfg", open_clip.get_model_preprocess_cfg(clip))
    backbone = Backbone(clip, tokenizer, config, random_weights=file is None)
    _load_short_positions(backbone, file)
    apply_saved(backbone)
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


def _find_config(model: str) -> tuple[dict, str | None]:
    """(content of open_clip_config.json, open_clip's name of the folder or hub repository; None for a plain name)."""
    folder = Path(model.removeprefix("local-dir:"))
    if model.startswith("hf-hub:"):
        config, source = _hub_config(model), model
    elif (folder / CONFIG_FILE).is_file():
        config, source = _read_config(folder / CONFIG_FILE), f"local-dir:{folder}"
    elif folder.is_dir() or model.startswith("local-dir:"):
        raise UserError(f"The folder {os.fspath(folder)!r} holds no {CONFIG_FILE}; give an open_clip folder.")
    else:
        config, source = {"model_cfg": open_clip.get_model_config(model)}, None
    if config["model_cfg"] is None:
        raise UserError(
            f"Unknown model {model!r}.{near_matches(model, open_clip.list_models())} Give an open_clip model name "
            "(`python -c 'import open_clip; print(open_clip.list_models())'` lists them) or an open_clip folder."
        )
    text_cfg = config["model_cfg"]["text_cfg"]
    text_cfg.setdefault("context_length", CLIPTextCfg.context_length)
    text_cfg.setdefault("vocab_size", CLIPTextCfg.vocab_size)
    return config, source


def _hub_config(model: str) -> dict:
    advice = "Check the name and the network, or give a folder that holds the repository's files."
    with explain_failure(f"{model!r} could not be fetched from the Hugging Face hub", advice):
        file = find_file(model.removeprefix("hf-hub:"), CONFIG_FILE)
        config = {"model_cfg": open_clip.get_model_config(model)}  # open_clip keeps only its part of it
        extra = read_json(file).get("debias_diffusion") if file else None
    return config | ({"debias_diffusion": extra} if extra else {})


def _read_config(file: Path) -> dict:
    config = read_json(file)
    model_cfg = config.get("model_cfg")
    parts = [model_cfg.get(name) for name in ("vision_cfg", "text_cfg")] if isinstance(model_cfg, dict) else [None]
    extra = config.get("debias_diffusion", {})
    if not all(isinstance(part, dict) for part in (*parts, extra)):
        raise UserError(
            f"{str(file)!r} is not an open_clip configuration: model_cfg, its vision_cfg and text_cfg, and "
            "debias_diffusion must be JSON objects."
        )
    return config


def _check_pretrained(model: str, pretrained: str | None) -> None:
    """Raises UserError unless the weights exist and fit the model's activation, which a state dict does not hold."""
    if pretrained is None or os.path.isfile(pretrained):
        return
    tags = open_clip.list_pretrained_tags_by_model(model)
    if pretrained not in tags:
        raise UserError(
            f"No weights {pretrained!r} for {model!r}.{near_matches(pretrained, tags)} "
            f"Give a file or one of: {', '.join(tags) or '(no tags for this model)'}."
        )
    quick = open_clip.get_pretrained_cfg(model, pretrained).get("quick_gelu", False)
    if quick != bool(open_clip.get_model_config(model).get("quick_gelu")):
        other = f"{model}-quickgelu" if quick else model.removesuffix("-quickgelu")
        raise UserError(
            f"The weights {pretrained!r} were trained {'with' if quick else 'without'} QuickGELU, which {model!r} "
            f"{'lacks' if quick else 'has'}. Use --model {other}."
        )


def find_weights(model: str, source: str | None, pretrained: str | None) -> Path | None:
    """The file of a model's weights; None for random weights.

    Args:
        model: as for `load_backbone`.
        source: "hf-hub:..." or "local-dir:...", which holds its weights; None for a plain name.
        pretrained: with a plain name, a file, or a tag whose file open_clip downloads unless it is cached.
    """
    if source is None:
        if pretrained is None or Path(pretrained).is_file():
            return pretrained and Path(pretrained)
        return Path(open_clip.download_pretrained(open_clip.get_pretrained_cfg(model, pretrained)))
    kind, _, place = source.partition(":")
    file = download_pretrained_from_hf(place) if kind == "hf-hub" else _find_checkpoint_in_dir(Path(place))
    if file is None:
        raise UserError(f"The folder {place!r} holds no weights (open_clip_model.safetensors, for example).")
    return Path(file)


def load_weights(clip: nn.Module, file: Path, model: str, quick_gelu: bool) -> dict[str, int] | None:
    """Loads weights into open_clip's module, and never interpolates text positions, as open_clip does silently.

    Args:
        clip: an `open_clip.CLIP` or `CustomTextCLIP`.
        file: weights that open_clip reads (safetensors, torch, big_vision's npz), or a Long-CLIP checkpoint.
        model: its name in errors.
        quick_gelu: whether `clip` has OpenAI's activation, which is not in the file.

    Returns:
        {"keep", "factor"} that a Long-CLIP checkpoint's positions were stretched with; else None.

    Raises:
        UserError: the file has another context length, or is Long-CLIP's and of another model. Errors of the libraries
            for broken or hostile files and other sizes pass through.
    """
    state = {} if file.suffix in _BIG_VISION else read_state(file)
    if is_long_clip(state):
        return _load_long_clip(clip, state, file, model, quick_gelu)
    table = state.get(POSITIONS, state.get(TEXT + POSITIONS))
    positions = len(getattr(clip, "text", clip).positional_embedding)
    if table is not None and len(table) != positions:
        raise UserError(
            f"{str(file)!r} holds {len(table)} text positions, {model!r} has {positions}; they are not interpolated. "
            f"Give weights of {positions} positions, or, for a stretched model, the folder of its training run, whose "
            "open_clip_config.json has the context length."
        )
    if has_text_prefix(state) and not hasattr(clip, "text"):
        clip.load_state_dict(plain_text_names(state))
    else:
        open_clip.load_checkpoint(clip, str(file), weights_only=True)
    return None


def _load_long_clip(
    clip: nn.Module, state: dict[str, torch.Tensor], file: Path, model: str, quick_gelu: bool
) -> dict[str, int]:
    """Loads weights with Long-CLIP's two tables into a two-tower, which gets their context length.

    Without the prefix `text.` they are from Long-CLIP's code, which trains OpenAI's CLIPs alone. With it (open_clip's
    CustomTextCLIP, as in the released weights of DeBias-CLIP) the base model can be any.
    """
    if not quick_gelu and not has_text_prefix(state):
        name = f"{model}-quickgelu"
        name = name if name in open_clip.list_models() else "ViT-B-16-quickgelu or ViT-L-14-quickgelu"
        raise UserError(
            f"{str(file)!r} is a Long-CLIP checkpoint, trained from OpenAI's weights with QuickGELU, which {model!r} "
            f"lacks. Use --model {name}."
        )
    positions, width = getattr(clip, "text", clip).positional_embedding.shape
    expected = [stretched_length(positions), width]
    shapes = {name: list(state[name].shape) for name in table_names(state) if name in state}
    if list(shapes.values()) != [expected, expected]:
        raise UserError(
            f"{str(file)!r} is a Long-CLIP checkpoint with tables of positions {shapes}; for {model!r} both must be "
            f"{expected}. longclip-B.pt belongs to ViT-B-16-quickgelu, longclip-L.pt to ViT-L-14-quickgelu."
        )
    set_positions(clip, torch.empty(expected))
    folded = fold_long_clip(state)
    clip.load_state_dict(folded if hasattr(clip, "text") else plain_text_names(folded))
    return {"keep": KEEP, "factor": FACTOR}
