"""Weights as state dicts: read from files without executing what is in them, checked, written, digests; their names.

CLIP's weights have OpenAI's names, which open_clip and Long-CLIP use, or transformers'. Only names and layouts differ:
OpenAI packs query, key and value into one matrix and stores projections transposed.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..errors import UserError
from ..files import bytes_digest, json_digest, open_regular
from ..limits import KEEP
from ..text.tokens import tokenizer_rules

CONFIG_FILE, WEIGHTS_FILE = "open_clip_config.json", "open_clip_model.safetensors"  # in open_clip's folders
LARGEST_WEIGHT = 1e6  # larger ones overflow after a few layers; published ones stay below some thousands
POSITIONS = "positional_embedding"
FG_CLIPS = "embeddings.position_embedding_res.weight"  # as Long-CLIP's, under transformers' names (Xie et al. 2025)
_LONG_CLIPS = "positional_embedding_res"  # Long-CLIP's second table, which its code uses from row 20 on
# In OpenAI's files and in modules with saved masks, beside the weights.
_NO_WEIGHTS = ("input_resolution", "context_length", "vocab_size", "attn_mask", "mask1", "mask2")
_SMART_CLIPS = "mask_net."  # SmartCLIP's mask network, beside Long-CLIP's weights in its authors' checkpoints
TEXT = "text."  # the text tower's prefix in open_clip's CustomTextCLIP; OpenAI's and Long-CLIP's names have none

State = dict[str, torch.Tensor]
# How OpenAI's names of a text tower's weights begin; those of an image tower beside it begin with `visual.`
OPENAIS_TEXT = ("token_embedding.", "positional_embedding", "ln_final.", "transformer.", "text_projection")

# Outside the blocks: OpenAI's name -> transformers', below `text_model.` and `vision_model.`
_OUTSIDE = {
    "text": {
        "token_embedding.weight": "embeddings.token_embedding.weight",
        "positional_embedding": "embeddings.position_embedding.weight",
        "ln_final.weight": "final_layer_norm.weight",
        "ln_final.bias": "final_layer_norm.bias",
    },
    "vision": {
        "class_embedding": "embeddings.class_embedding",
        "conv1.weight": "embeddings.patch_embedding.weight",
        "positional_embedding": "embeddings.position_embedding.weight",
        "ln_pre.weight": "pre_layrnorm.weight",  # transformers' spelling
        "ln_pre.bias": "pre_layrnorm.bias",
        "ln_post.weight": "post_layernorm.weight",
        "ln_post.bias": "post_layernorm.bias",
    },
}
_PROJECTIONS = {"text": ("text_projection", "text_projection.weight"), "vision": ("proj", "visual_projection.weight")}
# In a block.
_PARTS = {
    "ln_1": "layer_norm1",
    "attn.out_proj": "self_attn.out_proj",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_QKV = ("q_proj", "k_proj", "v_proj")
_BLOCK = re.compile(r"transformer\.resblocks\.(\d{1,4})\.(.+?)[._](weight|bias)")


def read_state(file: Path, below: Callable[[Mapping[str, Sequence[int]]], str] | None = None) -> State:
    """The state dict in a file, without the prefix `module.`.

    Args:
        below: from the shapes by name, the prefix of the weights to read of a safetensors file; None reads all.

    Nothing in the file is executed. Errors of the libraries for broken and hostile files pass through.
    """
    with open_regular(file) as opened:
        start = opened.read(9)
    if file.suffix == ".safetensors" or start[8:] == b"{":  # after a length of 8 bytes a JSON object
        if below is None:
            state = load_file(file)
        else:
            prefix = below(tensor_shapes(file))
            with safe_open(file, framework="pt") as opened_file:
                names = [name for name in opened_file.keys() if name.startswith(prefix)]  # noqa: SIM118 - no iterator
                state = {name: opened_file.get_tensor(name) for name in names}
    else:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except AssertionError as error:  # torch's word for some damages
            raise ValueError(str(error)) from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not any(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"{str(file)!r} holds no state dict of weights.")
    return {name.removeprefix("module."): value for name, value in state.items()}


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """The shapes of the tensors in a safetensors file by name. Reads its header alone."""
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 - no iterator


def written_metadata(file: Path) -> dict[str, str]:
    """A safetensors file's metadata; empty for any other file."""
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}
    except Exception:  # any error of the library for a file of another kind
        return {}


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], label: str) -> None:
    """Raises UserError, which names the first of them, if weights hold NaN, infinity, or values beyond LARGEST_WEIGHT.

    Takes one pass over the memory: a second for 13 GB of float32 on one core, three in half precision. `label` is the
    model in words, at the beginning of the message.
    """
    damaged = []
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel():
            continue
        values = tensor.detach()
        values = values.float() if values.element_size() < 2 else values  # 8-bit floats have no minimum
        low, high = (bound.item() for bound in values.aminmax())
        if not (low >= -LARGEST_WEIGHT and high <= LARGEST_WEIGHT):  # NaN compares as neither
            damaged.append(f"{name!r} with values from {low:,.0f} to {high:,.0f}")
    if damaged:
        more = f" and {len(damaged) - 1} more tensors" if len(damaged) > 1 else ""
        raise UserError(
            f"{label} has weights that give no results, NaN or beyond {LARGEST_WEIGHT:,.0f}: {damaged[0]}{more}. The "
            "file is damaged, or its training diverged. Get it again, or use an earlier checkpoint."
        )


def check_fit(missing: Sequence[str], wrong: Sequence[str], label: str) -> None:
    """Raises UserError for weights that lack tensors of the model, or have others.

    Libraries fill missing tensors with random numbers and drop unknown ones, with no more than a log message.
    """
    if missing:
        raise UserError(f"The weights of {label} lack {len(missing)} tensors of the model, such as {missing[0]}.")
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(f"The weights of {label} do not fit the model: {wrong[0]}{more}.")


def model_digest(
    module: nn.Module,
    config: Mapping | PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **buffers: torch.Tensor,
) -> str:
    """sha256 of what a model is: its weights, its configuration and its tokenizer, if it reads text.

    What is kept of a loaded model, or compared with one, is known by this. `EncoderSpec.digest` is of the files. Of
    transformers' configurations the place and the library's version do not count. `buffers` are more tensors, in no
    state dict, that decide a result.
    """
    if isinstance(config, PretrainedConfig):
        config = config.to_dict() | {"_name_or_path": None, "transformers_version": None}
    rules = None if tokenizer is None else tokenizer_rules(tokenizer)
    return json_digest({"weights": weights_digest(module, **buffers), "configuration": config, "tokenizer": rules})


def weights_digest(module: nn.Module, **buffers: torch.Tensor) -> str:
    """sha256 over the names, types, shapes and values of a module's state dict, and of more tensors."""

    def parts():
        for name, tensor in sorted((module.state_dict() | buffers).items()):
            yield f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\n".encode()
            # As bytes, because NumPy has no bfloat16.
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()

    return bytes_digest(parts())


def save_tensors(tensors: State, file: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes safetensors with the permissions of any new file: safetensors 0.8 lets only the owner read it."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    file.unlink(missing_ok=True)  # a link is not written through
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt", **(metadata or {})})
    file.chmod(mode)


def is_long_clip(state: State) -> bool:
    """Whether a state dict has Long-CLIP's two tables of positions, with or without the prefix `text.`."""
    return _LONG_CLIPS in state or TEXT + _LONG_CLIPS in state


def fold_long_clip(state: State) -> State:
    """Long-CLIP's weights with one table of positions: rows 0 to 19 of the first, the rest of the second.

    Names keep their prefix `text.`, or its absence.
    """
    prefix = TEXT if TEXT + _LONG_CLIPS in state else ""
    first, second = prefix + POSITIONS, prefix + _LONG_CLIPS
    table = torch.cat([state[first][:KEEP], state[second][KEEP:]])
    left_out = {second, *_NO_WEIGHTS, *(TEXT + name for name in _NO_WEIGHTS)}
    weights = {name: part for name, part in state.items() if not name.startswith(_SMART_CLIPS)}
    return {name: part for name, part in weights.items() if name not in left_out} | {first: table}


def fold_fg_clip(state: State) -> State:
    """FG-CLIP's weights with one table of positions, which it makes of two as Long-CLIP does, and not that of 77.

    Other weights are returned as they are.
    """
    second = next((name for name in state if name.endswith(FG_CLIPS)), None)
    if second is None:
        return state
    stem = second.removesuffix("_res.weight")
    table = torch.cat([state[f"{stem}_ori.weight"][:KEEP], state[second][KEEP:]])
    left_out = (second, f"{stem}_ori.weight")
    return {name: part for name, part in state.items() if name not in left_out} | {f"{stem}.weight": table}


def to_transformers_names(state: Mapping[str, torch.Tensor], tower: Literal["text", "vision"] = "text") -> State:
    """A tower's weights alone under transformers' names, with the prefix `text_model.` or `vision_model.`.

    Every version of transformers, and ComfyUI, load that prefix. Tensors share the memory of `state`; a projection
    [width, embed_dim] is a transposed view, `text_projection.weight` or `visual_projection.weight` [embed_dim, width].
    Raises UserError for a weight that has no place in transformers' CLIP.
    """
    (matrix, linear), prefix, renamed = _PROJECTIONS[tower], f"{tower}_model.", {}
    for name, tensor in state.items():
        match = _BLOCK.fullmatch(name)
        if name in _OUTSIDE[tower]:
            renamed[prefix + _OUTSIDE[tower][name]] = tensor
        elif name in (matrix, f"{matrix}.weight"):  # the second of a Linear
            renamed[linear] = tensor.T if name == matrix else tensor
        elif match and match[2] in _PARTS:
            renamed[f"{prefix}encoder.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"] = tensor
        elif match and match[2] == "attn.in_proj" and len(tensor) % 3 == 0:
            for part, chunk in zip(_QKV, tensor.chunk(3), strict=True):
                renamed[f"{prefix}encoder.layers.{match[1]}.self_attn.{part}.{match[3]}"] = chunk
        else:
            raise UserError(f"The weight {name!r} {tuple(tensor.shape)} has no place in transformers' CLIP.")
    return renamed


def to_openai_names(state: Mapping[str, torch.Tensor], tower: Literal["text", "vision"] = "text") -> State:
    """The inverse of `to_transformers_names`; of an image tower without the prefix `visual.`.

    The projection is a matrix [width, embed_dim]. Weights of the other tower are ignored.
    """
    matrix, linear = _PROJECTIONS[tower]
    plain = {name.removeprefix(f"{tower}_model."): tensor for name, tensor in state.items()}
    names = {name: openai for openai, name in _OUTSIDE[tower].items()}
    parts = {part: openai for openai, part in _PARTS.items()}
    renamed = {names[name]: tensor for name, tensor in plain.items() if name in names}
    for name, tensor in plain.items():
        match = re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
        if match and match[2] in parts:
            renamed[f"transformer.resblocks.{match[1]}.{parts[match[2]]}.{match[3]}"] = tensor
        elif match and match[2] == "self_attn.q_proj":
            packed = torch.cat([plain[name.replace("q_proj", part)] for part in _QKV])
            renamed[f"transformer.resblocks.{match[1]}.attn.in_proj_{match[3]}"] = packed
    return renamed | ({matrix: plain[linear].T} if linear in plain else {})
