"""Files of weights as state dicts: read without executing what is in them, checked, written; Long-CLIP's; digests."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
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
_LONG_CLIPS = "positional_embedding_res"  # Long-CLIP's second table, which its code uses from row 20 on
# In OpenAI's files and in modules with saved masks, beside the weights.
_NO_WEIGHTS = ("input_resolution", "context_length", "vocab_size", "attn_mask", "mask1", "mask2")
_SMART_CLIPS = "mask_net."  # SmartCLIP's mask network, beside Long-CLIP's weights in its authors' checkpoints
TEXT = "text."  # the text tower's prefix in open_clip's CustomTextCLIP; OpenAI's and Long-CLIP's names have none


def read_state(file: Path) -> dict[str, torch.Tensor]:
    """The state dict in a file, without the prefix `module.`.

    Nothing in the file is executed. Errors of the libraries for broken and hostile files pass through.

    Raises:
        UserError: the file is not there, or holds no state dict.
    """
    if not file.is_file():
        raise UserError(f"{str(file)!r} is not there.")
    if file.suffix == ".safetensors" or _is_safetensors(file):
        state = load_file(file)
    else:
        state = torch.load(file, map_location="cpu", weights_only=True)
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not any(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"{str(file)!r} holds no state dict of weights.")
    return {name.removeprefix("module."): value for name, value in state.items()}


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], label: str) -> None:
    """Raises UserError, which names the first of them, if weights hold NaN, infinity, or values beyond LARGEST_WEIGHT.

    Takes one pass over the memory: a second for 13 GB of float32 on one core, three in half precision.

    Args:
        tensors: (name, tensor); integers are skipped.
        label: the model they belong to, in words, at the beginning of the message.
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
    """sha256 of what a model is: its weights, its configuration and its tokenizer.

    What is kept of a loaded model, or compared with one, is known by this. `EncoderSpec.digest` is of the files.

    Args:
        config: JSON values. Of transformers' ones the place and the library's version do not count.
        tokenizer: of a model that reads text.
        buffers: more tensors, in no state dict, that decide a result.
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


def save_tensors(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes safetensors with the permissions of any new file: safetensors 0.8 lets only the owner read it."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    file.unlink(missing_ok=True)  # a link is not written through
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt", **(metadata or {})})
    file.chmod(mode)


def _is_safetensors(file: Path) -> bool:
    """Whether the file begins like safetensors: the length of a JSON object, then the object."""
    with open_regular(file) as opened:
        start = opened.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= 100_000_000


def is_long_clip(state: dict[str, torch.Tensor]) -> bool:
    """Whether a state dict has Long-CLIP's two tables of positions, with or without the prefix `text.`."""
    return _LONG_CLIPS in state or TEXT + _LONG_CLIPS in state


def without_text_prefix(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A two-tower's weights with the text tower's names as OpenAI's."""
    renamed = {name.removeprefix(TEXT): tensor for name, tensor in state.items()}
    return {name: tensor for name, tensor in renamed.items() if name not in _NO_WEIGHTS}


def fold_long_clip(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Long-CLIP's weights with one table of positions: rows 0 to 19 of the first, the rest of the second.

    Names keep their prefix `text.`, or its absence.
    """
    prefix = TEXT if TEXT + _LONG_CLIPS in state else ""
    first, second = prefix + POSITIONS, prefix + _LONG_CLIPS
    table = torch.cat([state[first][:KEEP], state[second][KEEP:]])
    left_out = {second, *_NO_WEIGHTS, *(TEXT + name for name in _NO_WEIGHTS)}
    weights = {name: part for name, part in state.items() if not name.startswith(_SMART_CLIPS)}
    return {name: part for name, part in weights.items() if name not in left_out} | {first: table}
