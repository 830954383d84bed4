"""A text encoder from one file of weights in any known layout, and as one file for ComfyUI.

Two layouts are read, each under any prefix: transformers' names (`text_model.…`: ComfyUI's clip_l, the first encoder
of Stable Diffusion checkpoints) and OpenAI's (`transformer.resblocks.…`: two-towers of open_clip and OpenAI, Long-CLIP,
the released DeBias-CLIP under `text.`, the second encoder of SDXL checkpoints). Of several encoders in one file the
narrowest is read: SDXL's first.

Weights do not hold these settings:

- heads and activation: from the file's metadata, if this package wrote it, or from a config.json of the same sizes
  beside it; otherwise by these rules:
- heads: one for each 64 of the width, as in every CLIP of OpenAI and LAION;
- activation: QuickGELU with 12 blocks, as in all models of OpenAI and their descendants (the first encoder of SD 1.5,
  SDXL, SD3 and FLUX; Long-CLIP); GELU with more (LAION's H/14 and bigG/14). LAION's smaller models and some others
  break this rule, so a two-tower file without other information is loaded with a warning;
- tokenizer: CLIP's, padded with EOT, or with "!" (id 0) for bigG, as in SDXL.
"""

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import CLIPTextConfig, CLIPTokenizer

from ..clip.weight_files import (
    OPENAIS_TEXT,
    State,
    check_finite,
    fold_fg_clip,
    fold_long_clip,
    is_long_clip,
    read_state,
    to_transformers_names,
    written_metadata,
)
from ..errors import UserError
from ..files import atomic_file, read_json_object
from ..text.tokens import clip_tokenizer
from .text_encoders import TextEncoder, is_bigg, make_encoder, prefixed_state, save_weights

# The name of the token table: of transformers' layout with "embeddings."; all weights of the encoder have its prefix.
_TABLE = re.compile(r"(|.*?\.)(embeddings\.)?token_embedding\.weight")
VOCABULARY = 49408
WRITTEN_BY = "debias-diffusion"


def read_encoder_file(location: str, width: int | None = None) -> tuple[TextEncoder, CLIPTokenizer]:
    """The text encoder in a file of weights (see `read_state`), in float32 and eval mode, and its tokenizer; see above.

    A CLIPTextModel; for bigG a CLIPTextModelWithProjection if the file holds the projection. Of a safetensors file its
    weights alone are read.

    Args:
        width: of the encoder, where a file holds several; None is the narrowest.
    """
    file = Path(location)

    def below(shapes: Mapping[str, Sequence[int]]) -> str:
        return _choose(shapes, file, width)[0].removesuffix("text_model.")

    tensors = {name: value for name, value in read_state(file, below).items() if isinstance(value, torch.Tensor)}
    state, follows_rule = _text_part(tensors, file, width)
    config, has_activation = _config(state, file)
    label = f"the text encoder in {os.fspath(file)!r}"
    state = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    encoder = make_encoder(config, state, is_bigg(config) and "text_projection.weight" in state, label)
    check_finite(encoder.state_dict().items(), label[0].upper() + label[1:])
    if not (follows_rule or has_activation):
        warnings.warn(
            f"{os.fspath(file)!r} does not name its activation; with {config.num_hidden_layers} blocks "
            f"{config.hidden_act} is assumed. If that is wrong, name the model, too: ViT-L-14:FILE (LAION's) or "
            "ViT-L-14-quickgelu:FILE (OpenAI's).",
            stacklevel=5,
        )
    pad = {"pad_token": "!"} if is_bigg(config) else {}
    return encoder, clip_tokenizer(config.max_position_embeddings, **pad)


def _choose(shapes: Mapping[str, Sequence[int]], file: Path, width: int | None) -> tuple[str, bool]:
    """(the prefix of the encoder's weights, whether they have transformers' names)."""
    matches = {name: match for name in shapes if (match := _TABLE.fullmatch(name)) and len(shapes[name]) == 2}
    widths = {name: shapes[name][1] for name in matches if width in (None, shapes[name][1])}
    if not widths:
        of_width = f" of width {width}" if width and matches else ""
        raise UserError(
            f"{os.fspath(file)!r} holds no CLIP text encoder{of_width}, only weights such as "
            f"{', '.join(list(matches or shapes)[:3])}. Give a file with text_model.embeddings.token_embedding.weight "
            "or token_embedding.weight."
        )
    narrowest = matches[min(widths, key=lambda name: (widths[name], name))]
    return narrowest[1], bool(narrowest[2])


def _text_part(tensors: State, file: Path, width: int | None) -> tuple[State, bool]:
    """(the text encoder's weights under transformers' names, whether its kind follows the rule for activations)."""
    prefix, is_transformers = _choose({name: tensor.shape for name, tensor in tensors.items()}, file, width)
    if any(name.endswith("scaled_fp8") or ".scale_weight" in name for name in tensors if name.startswith(prefix)):
        raise UserError(f"The text encoder in {os.fspath(file)!r} is quantised (scaled fp8). Give it in fp16 or fp32.")
    if is_transformers:
        return _below_prefix(fold_fg_clip(tensors), prefix), True
    part = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(tuple(prefix + part for part in OPENAIS_TEXT))
    }
    if is_long_clip(part):
        return to_transformers_names(fold_long_clip(part)), prefix != "text."
    # OpenAI's files also hold their sizes; Stable Diffusion checkpoints hold LAION's larger models under a prefix.
    return to_transformers_names(part), "input_resolution" in tensors or prefix not in ("", "text.")


def _below_prefix(tensors: State, prefix: str) -> State:
    """The encoder's weights below `prefix`, which ends in `text_model.` unless transformers 5 wrote the file."""
    root = prefix.removesuffix("text_model.")
    parts = tuple(prefix + part for part in ("embeddings.", "encoder.", "final_layer_norm."))
    state = {
        f"text_model.{name.removeprefix(prefix)}": tensor
        for name, tensor in tensors.items()
        if name.startswith(parts) and not name.endswith("position_ids")
    }
    if f"{root}text_projection.weight" in tensors:
        state["text_projection.weight"] = tensors[f"{root}text_projection.weight"]
    elif f"{root}text_projection" in tensors:  # as older ComfyUI saved it
        state["text_projection.weight"] = tensors[f"{root}text_projection"].T
    return state


def _config(state: State, file: Path) -> tuple[CLIPTextConfig, bool]:
    """(the configuration of the weights' sizes, whether the activation is known)."""
    vocabulary, width = state["text_model.embeddings.token_embedding.weight"].shape
    if vocabulary != VOCABULARY:
        raise UserError(
            f"The text encoder in {os.fspath(file)!r} has a vocabulary of {vocabulary}, CLIP has {VOCABULARY}. "
            "Only CLIP's tokenizer comes with this package: give the folder with the encoder's tokenizer."
        )
    blocks = {match[1] for name in state if (match := re.match(r"text_model\.encoder\.layers\.(\d+)\.", name))}
    settings = _settings(file, width, len(blocks))
    projection = state.get("text_projection.weight")
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=len(state["text_model.encoder.layers.0.mlp.fc1.weight"]),
        projection_dim=None if projection is None else len(projection),
        num_hidden_layers=len(blocks),
        num_attention_heads=int(settings.get("num_attention_heads") or max(1, width // 64)),
        max_position_embeddings=len(state["text_model.embeddings.position_embedding.weight"]),
        hidden_act=settings.get("hidden_act") or ("quick_gelu" if len(blocks) == 12 else "gelu"),
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 1,
    )
    config.pad_token_id = 0 if is_bigg(config) else vocabulary - 1
    return config, "hidden_act" in settings


def _settings(file: Path, width: int, blocks: int) -> Mapping:
    """With "hidden_act" and "num_attention_heads": the file's metadata, else the config.json beside it, if it fits."""
    if (metadata := written_metadata(file)).get("written_by") == WRITTEN_BY:
        return metadata
    config = read_json_object(file.parent / "config.json")
    config = config.get("text_config", config)
    return config if (config.get("hidden_size"), config.get("num_hidden_layers")) == (width, blocks) else {}


def write_file(encoder: TextEncoder, file: Path, notes: Mapping[str, str] | None = None) -> Path:
    """Writes the encoder atomically as one safetensors file with `text_model.…` keys. Returns the file.

    The metadata hold `notes`, and heads and activation, so that `read_encoder_file` need not guess.
    """
    metadata = {
        "written_by": WRITTEN_BY,
        "hidden_act": encoder.config.hidden_act,
        "num_attention_heads": str(encoder.config.num_attention_heads),
        **(notes or {}),
    }
    with atomic_file(file) as temporary:
        save_weights(prefixed_state(encoder), temporary, metadata)
    return file
