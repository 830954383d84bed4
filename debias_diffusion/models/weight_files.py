"""Files of weights as state dicts: read without executing what is in them, written, digested; Long-CLIP's names."""

import collections
import os
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..errors import UserError
from ..files import bytes_digest
from ..limits import KEEP

POSITIONS = "positional_embedding"
_LONG_CLIPS = "positional_embedding_res"  # Long-CLIP's second table, which its code uses from row 20 on
# In OpenAI's files and in modules with saved masks, beside the weights.
_NO_WEIGHTS = ("input_resolution", "context_length", "vocab_size", "attn_mask", "mask1", "mask2")
_TULIPS = "dynamic_ntk_model_"  # in the names that TULIP's code gives to training runs, which its checkpoints hold
TEXT = "text."  # the text tower's prefix in open_clip's CustomTextCLIP; OpenAI's and Long-CLIP's names have none


def read_state(file: Path) -> dict[str, torch.Tensor]:
    """The state dict in a file, memory-mapped where its format allows, without the prefix `module.`.

    Nothing in the file is executed. Errors of the libraries for broken and hostile files pass through.

    Raises:
        UserError: the file is not there, holds no state dict, or is a TULIP.
    """
    if not file.is_file():
        raise UserError(f"{str(file)!r} is not there, or is no regular file.")
    if file.suffix == ".safetensors" or _is_safetensors(file):
        state = load_file(file)
    elif zipfile.is_zipfile(file):
        state = _read_torch_zip(file)
    else:
        state = torch.load(file, map_location="cpu", weights_only=True)
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        _check_positions(state, file)
        state = state["state_dict"]
    if not isinstance(state, dict) or not any(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"{str(file)!r} holds no state dict of weights.")
    return {name.removeprefix("module."): value for name, value in state.items()}


def _check_positions(checkpoint: dict, file: Path) -> None:
    """Raises UserError for a training checkpoint of TULIP, whose weights have CLIP's names and a table it ignores."""
    if _TULIPS in str(checkpoint.get("name")):
        raise UserError(
            f"{str(file)!r} is a TULIP, by the name of its training run. Its text tower has rotary positions, which "
            "are not in the file, so it cannot be loaded: it would be read as a CLIP of 77 positions, with other "
            "features than TULIP's. See Figure S4 in docs/robustness.md."
        )


def weights_digest(module: nn.Module) -> str:
    """sha256 over the names, types, shapes and values of a module's state dict."""

    def parts():
        for name, tensor in sorted(module.state_dict().items()):
            yield f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\n".encode()
            # As bytes, because NumPy has no bfloat16.
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()

    return bytes_digest(parts())


def _read_torch_zip(file: Path):
    """A torch file in the format since torch 1.6, memory-mapped.

    torch does not check mapped files: it would read compressed values, or too few, as they are.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    compressed = [entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED and _is_data(entry.filename)]
    if compressed:
        raise UserError(
            f"{str(file)!r} was packed again: {len(compressed)} of its parts are compressed, which torch never writes "
            "and reads as noise. Unpack it and store it uncompressed (`zip -0`), or get it again."
        )
    if len({entry.filename for entry in entries}) < len(entries):
        raise UserError(f"{str(file)!r} holds two parts of the same name. Get it again.")
    content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    missing = collections.Counter(_storage_sizes(content))
    missing.subtract(entry.file_size for entry in entries if _is_data(entry.filename))
    if any(count > 0 for count in missing.values()):
        raise UserError(f"{str(file)!r} is damaged: its weights are not as large as the parts that hold them.")
    return content


def _is_data(name: str) -> bool:
    return "/data/" in name or name.endswith("/data.pkl")


def _storage_sizes(content) -> list[int]:
    """The bytes of each storage of the tensors in nested containers."""
    sizes, waiting = {}, [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.nbytes():
                sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
    return list(sizes.values())


def save_tensors(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes safetensors with the permissions of any new file: safetensors 0.8 lets only the owner read it."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt", **(metadata or {})})
    umask = os.umask(0)
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def _is_safetensors(file: Path) -> bool:
    """Whether the file begins like safetensors: the length of a JSON object, then the object."""
    with open(file, "rb") as opened:
        start = opened.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= 100_000_000


def is_long_clip(state: dict[str, torch.Tensor]) -> bool:
    """Whether a state dict has Long-CLIP's two tables of positions, with or without the prefix `text.`."""
    return _LONG_CLIPS in state or TEXT + _LONG_CLIPS in state


def has_text_prefix(state: dict[str, torch.Tensor]) -> bool:
    return f"{TEXT}token_embedding.weight" in state


def plain_text_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A two-tower's weights with the text tower's names as OpenAI's, without the prefix `text.` if they have it."""
    if not has_text_prefix(state):
        return state
    renamed = {name.removeprefix(TEXT): tensor for name, tensor in state.items()}
    return {name: tensor for name, tensor in renamed.items() if name not in _NO_WEIGHTS}


def fold_long_clip(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Long-CLIP's weights with one table of positions: rows 0 to 19 of the first, the rest of the second.

    Names keep their prefix `text.`, or its absence.
    """
    first, second = table_names(state)
    table = torch.cat([state[first][:KEEP], state[second][KEEP:]])
    left_out = {second, *_NO_WEIGHTS, *(TEXT + name for name in _NO_WEIGHTS)}
    return {name: tensor for name, tensor in state.items() if name not in left_out} | {first: table}


def table_names(state: dict[str, torch.Tensor]) -> tuple[str, str]:
    """The names of both tables of positions of Long-CLIP's weights."""
    prefix = TEXT if TEXT + _LONG_CLIPS in state else ""
    return prefix + POSITIONS, prefix + _LONG_CLIPS
