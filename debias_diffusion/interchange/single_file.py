"""A text encoder from one file of weights, whoever wrote it, and as one file for ComfyUI.

Two layouts are read, each under any prefix: transformers' names (`text_model.…`: ComfyUI's clip_l, the first encoder
of Stable Diffusion's checkpoints) and OpenAI's (`transformer.resblocks.…`: open_clip's and OpenAI's two-towers,
Long-CLIP, the second encoder of SDXL's checkpoints). Of several encoders in one file the narrowest is taken: SDXL's
first.

What weights do not tell, in this order:

- what the file's own metadata say, if we wrote it, or a config.json or open_clip_config.json of the same sizes beside
  it;
- heads: one for each 64 of the width, as in every CLIP of OpenAI's and LAION's;
- activation: QuickGELU with 12 blocks, as in all that OpenAI trained and what descends from it (the first encoder of
  SD 1.5, SDXL, SD3 and FLUX; Long-CLIP); GELU with more (H/14, bigG/14: LAION's). LAION's own smaller models, and
  others, break this rule, so a two-tower file that nothing else tells about is loaded with a warning;
- tokenizer: CLIP's, padded with EOT, or with "!" (id 0) for bigG, as SDXL pads.
"""

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import CLIPTextConfig, CLIPTokenizer

from ..errors import UserError, reason
from ..files import read_json_object, whole_file
from ..models.backbone import CONFIG_FILE
from ..models.model_files import check_finite, check_state
from ..models.weights import fold_long_clip, is_long_clip, read_state, save_tensors
from ..tokens import clip_tokenizer
from .names import State, text_to_transformers
from .text_encoders import TextEncoder, expected_state, is_bigg, make_encoder, prefixed_state
from .wrong_files import check_readable, what_it_is

# A layout is known by its table of tokens; all that belongs to the encoder stands under the same prefix.
_TRANSFORMERS = "embeddings.token_embedding.weight"
_OPENAI = "token_embedding.weight"
_OPENAIS_PARTS = ("positional_embedding", "ln_final.", "transformer.", "text_projection", _OPENAI)
VOCABULARY = 49408
_HEAD_WIDTH = 64
_OPENAIS_BLOCKS = 12
_ACTIVATIONS = ("quick_gelu", "gelu")
WRITTEN_BY = "debias-diffusion"


def read_file(file: Path) -> tuple[TextEncoder, CLIPTokenizer]:
    """The text encoder in a file of weights, in float32 and eval mode, and its tokenizer; see above.

    A CLIPTextModel, or for bigG a CLIPTextModelWithProjection if the file holds the projection.

    Raises:
        UserError: the file holds no CLIP text encoder, or not a whole one; says what it holds instead, where known.
    """
    tensors = read_tensors(file)
    try:
        state, sure = text_part(tensors, file)
        config, told = _config(state, file)
        named = f"the text encoder in {os.fspath(file)!r}"
        check_state(state, expected_state(config, config.projection_dim is not None, state, named), named)
        check_finite(state.items(), named[0].upper() + named[1:])
        own = {name: tensor.to(torch.float32, copy=True).contiguous() for name, tensor in state.items()}
        encoder = make_encoder(config, own, is_bigg(config) and "text_projection.weight" in state)
    except UserError:
        raise
    except Exception as error:  # as above
        raise UserError(f"{os.fspath(file)!r} holds no text encoder that can be built: {reason(error)}.") from error
    if not (sure or told):
        told = _GUESSED.format(file=os.fspath(file), blocks=config.num_hidden_layers, act=config.hidden_act)
        warnings.warn(told, stacklevel=3)
    pad = {"pad_token": "!"} if is_bigg(config) else {}
    return encoder, clip_tokenizer(config.max_position_embeddings, **pad)


def read_tensors(file: Path) -> State:
    """What a file of weights holds, mapped into memory where its format allows. Nothing in it is executed.

    Raises:
        UserError: it holds no weights, or more than weights; says what it holds instead, where known.
    """
    try:
        check_readable(file)
        content = read_state(file)
    except UserError:
        raise
    except Exception as error:  # whatever a wrong or hostile file makes the libraries raise
        raise UserError(_unreadable(file, error)) from error
    return {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}


_GUESSED = (
    "{file!r} does not tell its activation; with {blocks} blocks it was taken for {act}. If that is wrong, name the "
    "model instead: --model ViT-L-14 (LAION's) or ViT-L-14-quickgelu (OpenAI's) with --pretrained FILE."
)


def _unreadable(file: Path, error: Exception) -> str:
    named, told = repr(os.fspath(file)), str(error)
    if "TorchScript" in told:
        return (
            f"{named} is a TorchScript archive, which holds code and is not run. If it is OpenAI's, name the model "
            "instead: --model ViT-L-14-quickgelu --pretrained openai."
        )
    if "eights only load failed" in told or "weights_only" in told:  # torch's own words advise to load it all the same
        found = re.search(r"(?:GLOBAL|global|class|operand) ([\w.]+)", told)
        what = f" ({found[1]})" if found else ""
        return (
            f"{named} is damaged, no file of weights, or a pickle with more in it than tensors{what}, which can be "
            "code. It is not loaded. Get the weights as .safetensors."
        )
    return f"The file {named} could not be read; it may be cut short, or no file of weights: {reason(error)}."


def text_part(tensors: State, file: Path) -> tuple[State, bool]:
    """(the text encoder's weights under transformers' names, whether it is of a kind that keeps to the rule).

    Raises:
        UserError: there is none.
    """
    found = []
    for name, tensor in tensors.items():
        prefix = name.removesuffix(_TRANSFORMERS)
        is_transformers = prefix != name
        prefix = prefix if is_transformers else name.removesuffix(_OPENAI)
        if prefix != name and (not prefix or prefix.endswith(".")) and tensor.ndim == 2:
            found.append((tensor.shape[1], prefix, is_transformers))
    if not found:
        raise UserError(
            f"{os.fspath(file)!r} holds no CLIP text encoder: {what_it_is(tensors)}. Give a file with weights such as "
            "text_model.embeddings.token_embedding.weight or token_embedding.weight."
        )
    _, prefix, is_transformers = min(found)
    if any(name.endswith("scaled_fp8") or ".scale_weight" in name for name in tensors if name.startswith(prefix)):
        raise UserError(f"The text encoder in {os.fspath(file)!r} is quantised (scaled fp8). Give it in fp16 or fp32.")
    if is_transformers:
        return below_prefix(tensors, prefix), True
    part = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(tuple(prefix + part for part in _OPENAIS_PARTS))
    }
    if is_long_clip(part):
        tables = [tuple(part[name].shape) for name in ("positional_embedding", "positional_embedding_res")]
        if tables[0] != tables[1]:
            raise UserError(f"{os.fspath(file)!r} is a Long-CLIP with two tables of positions of sizes {tables}.")
        return text_to_transformers(fold_long_clip(part)), True
    # OpenAI's own files say their sizes, too; below a prefix of Stable Diffusion's stand LAION's larger ones.
    return text_to_transformers(part), "input_resolution" in tensors or prefix not in ("", "text.")


def below_prefix(tensors: State, prefix: str) -> State:
    """The encoder's weights below `prefix`, which ends in `text_model.` unless transformers 5 left that out."""
    root = prefix.removesuffix("text_model.")
    parts = tuple(prefix + part for part in ("embeddings.", "encoder.", "final_layer_norm."))
    state = {
        f"text_model.{name.removeprefix(prefix)}": tensor
        for name, tensor in tensors.items()
        if name.startswith(parts) and not name.endswith("position_ids")
    }
    if f"{root}text_projection.weight" in tensors:
        state["text_projection.weight"] = tensors[f"{root}text_projection.weight"]
    elif f"{root}text_projection" in tensors:  # as ComfyUI once saved it
        state["text_projection.weight"] = tensors[f"{root}text_projection"].T
    return state


def _config(state: State, file: Path) -> tuple[CLIPTextConfig, bool]:
    """(the configuration that the weights' sizes say, whether something told the activation)."""
    tokens, table = (state.get(f"text_model.embeddings.{name}_embedding.weight") for name in ("token", "position"))
    fc1 = state.get("text_model.encoder.layers.0.mlp.fc1.weight")
    if table is None or fc1 is None or min(table.ndim, fc1.ndim) < 1:
        raise UserError(f"{os.fspath(file)!r} holds a text encoder without positions or without blocks.")
    vocabulary, width = tokens.shape
    if vocabulary != VOCABULARY:
        raise UserError(
            f"The text encoder in {os.fspath(file)!r} has a vocabulary of {vocabulary}, and CLIP's has {VOCABULARY}. "
            "Only for CLIP's there is a tokenizer without a folder: give the folder that holds its own."
        )
    blocks = {match[1] for name in state if (match := re.match(r"text_model\.encoder\.layers\.(\d+)\.", name))}
    told = told_beside(file, width, len(blocks))
    projection = state.get("text_projection.weight")
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=len(fc1),
        projection_dim=None if projection is None else len(projection),
        num_hidden_layers=len(blocks),
        num_attention_heads=told.get("num_attention_heads") or max(1, width // _HEAD_WIDTH),
        max_position_embeddings=len(table),
        hidden_act=told.get("hidden_act") or usual_activation(len(blocks)),
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 1,
    )
    config.pad_token_id = 0 if is_bigg(config) else vocabulary - 1
    return config, "hidden_act" in told


def usual_activation(blocks: int) -> str:
    """What a text tower of so many blocks was most likely trained with; see above."""
    return "quick_gelu" if blocks == _OPENAIS_BLOCKS else "gelu"


def told_beside(file: Path, width: int, blocks: int) -> dict:
    """What stands in the file's metadata, else beside it, of "hidden_act" and "num_attention_heads"."""
    for told in (_metadata(file), _beside(file, width, blocks)):
        heads = told.get("num_attention_heads")
        act = told.get("hidden_act")
        if act in _ACTIVATIONS and isinstance(heads, int) and 1 <= heads <= width and width % heads == 0:
            return {"hidden_act": act, "num_attention_heads": heads}
    return {}


def _metadata(file: Path) -> dict:
    written = written_metadata(file)
    if written.get("written_by") != WRITTEN_BY or not written.get("num_attention_heads", "").isdecimal():
        return {}
    return written | {"num_attention_heads": int(written["num_attention_heads"])}


def _beside(file: Path, width: int, blocks: int) -> dict:
    config = read_json_object(file.parent / "config.json")
    config = config.get("text_config", config)
    if isinstance(config, dict) and (config.get("hidden_size"), config.get("num_hidden_layers")) == (width, blocks):
        return config
    model = read_json_object(file.parent / CONFIG_FILE).get("model_cfg")
    text = model.get("text_cfg") if isinstance(model, dict) else None
    if isinstance(text, dict) and (text.get("width"), text.get("layers")) == (width, blocks):
        act = "quick_gelu" if model.get("quick_gelu") else "gelu"
        return {"hidden_act": act, "num_attention_heads": text.get("heads")}
    return {}


def write_file(encoder: TextEncoder, file: Path, notes: Mapping[str, str] | None = None) -> Path:
    """Writes the encoder as one safetensors file with `text_model.…` keys, whole or not at all. Returns the file.

    The metadata hold what weights do not tell, so that `read_file` need not guess, and `notes`.
    """
    metadata = {
        "written_by": WRITTEN_BY,
        "hidden_act": encoder.config.hidden_act,
        "num_attention_heads": str(encoder.config.num_attention_heads),
        **(notes or {}),
    }
    tensors = {name: tensor.detach().cpu().float() for name, tensor in prefixed_state(encoder).items()}
    check_finite(tensors.items(), "The encoder to be written")
    with whole_file(file) as temporary:
        save_tensors(tensors, temporary, metadata)
    return file


def written_metadata(file: Path) -> dict[str, str]:
    """A safetensors file's metadata; empty for any other file."""
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}
    except Exception:  # whatever a file of another kind makes the library raise
        return {}
