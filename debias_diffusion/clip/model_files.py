"""Model files from anywhere, and a UserError for every fault in them."""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from transformers.utils import cached_file

from ..errors import UserError, reason
from ..files import read_json

if TYPE_CHECKING:  # their imports take seconds
    import torch
    from transformers import PreTrainedModel

_Model = TypeVar("_Model", bound="PreTrainedModel")

CONFIG_FILE, WEIGHTS_FILE = "open_clip_config.json", "open_clip_model.safetensors"  # in open_clip's folders
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
HUB_SECONDS = 10  # to wait for an answer, as huggingface_hub waits for the files themselves
LARGEST_WEIGHT = 1e6  # larger ones overflow after a few layers; published ones stay below some thousands
# Names in configurations: of widths, of numbers of blocks, of the width inside of a block, of rows of tables.
_WIDTHS = ("width", "hidden_size", "d_model", "block_out_channels")
_BLOCKS = ("layers", "num_hidden_layers", "num_layers", "layers_per_block", "transformer_layers_per_block")
_INNER = ("intermediate_size", "d_ff")
_ROWS = ("vocab_size", "context_length", "max_position_embeddings", "embed_dim", "projection_dim", "count")


def find_file(source: str | Path, name: str, subfolder: str = "") -> Path | None:
    """A file of a folder (Path) or of a repository of the hub (str, downloaded); None if it is missing.

    Raises ValueError if nothing of the repository can be had.
    """
    source = source if isinstance(source, Path) else hub_place(source)
    if isinstance(source, Path):
        file = source / subfolder / name
        return file if file.is_file() else None
    file = cached_file(
        source,
        name,
        subfolder=subfolder,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return file and Path(file)


def find_tokenizer(folder: Path, *places: Path) -> Path:
    """The first of the places with a tokenizer. Raises UserError, which names the folder, if there is none."""
    for place in places:
        if (place / "tokenizer_config.json").is_file():
            return place
    raise UserError(f"{os.fspath(folder)!r} holds no tokenizer (tokenizer/tokenizer_config.json).")


def check_folder(source: str | Path, label: str, subfolder: str = "", size: int = 0) -> None:
    """`check_sizes` of the config.json of a folder or, as far as it is cached, of a repository of the hub.

    Args:
        size: of the weights in bytes, where they lie elsewhere.
    """
    name = os.path.join(subfolder, "config.json")
    # Not asked for: without a network that takes long.
    file = os.path.join(source, name) if os.path.isdir(source) else try_to_load_from_cache(str(source), name)
    if isinstance(file, str) and os.path.isfile(file):
        here = sum(path.stat().st_size for path in Path(file).parent.iterdir() if path.suffix in WEIGHT_SUFFIXES)
        check_sizes(read_json(file), size or here, label)


def check_sizes(config: dict, size: int, label: str) -> None:
    """Raises UserError for a configuration whose model cannot be in its files, before it takes minutes and all memory.

    Args:
        config: of a model and its parts, in the words of open_clip, transformers and diffusers.
        size: of the weights in bytes, half of one each at least; 0 if unknown: then this machine's memory must suffice.
    """
    weights, limit = _least_weights(config), 2 * size or psutil.virtual_memory().total
    if weights > limit:
        raise UserError(
            f"{label} has a configuration of at least {weights:.3g} weights, but "
            f"{f'its {size:,} bytes of weights hold' if size else 'memory holds'} {limit:,} at most. It is damaged or "
            "of another model: get it again."
        )


def _least_weights(config: dict, width: float = 1.0) -> float:
    """Fewer than any model of this configuration has: matrices of its blocks, tables with rows for each of _ROWS."""
    numbers = {name: _number(value) for name, value in config.items()}
    width = max(numbers.get(name, 0) for name in _WIDTHS) or width
    blocks, rows = (sum(numbers.get(name, 0) for name in names) for names in (_BLOCKS, _ROWS))
    inner = max(width, width * numbers.get("mlp_ratio", 0), *(numbers.get(name, 0) for name in _INNER))
    patches = (numbers.get("image_size", 0) / (numbers.get("patch_size") or float("inf"))) ** 2
    mask = numbers.get("context_length", 0) ** 2
    parts = sum(_least_weights(part, width) for part in config.values() if isinstance(part, dict))
    return width * (blocks * inner + rows + patches) + mask + parts


def _number(value: Any) -> float:
    """A number as it is, the largest in a list, and 0 for everything else."""
    if isinstance(value, list):
        return max(map(_number, value), default=0.0)
    return float(min(value, 1e30)) if isinstance(value, int | float) and value > 0 else 0.0


def source_of(place: str | Path) -> str | Path:
    """What libraries are given for a path or a hub id: see `hub_place`."""
    return Path(place) if os.path.exists(place) else hub_place(os.fspath(place))


@cache  # of names without a problem: an error is not kept
def hub_place(name: str) -> str | Path:
    """A repository's name, owner/name or owner/name@revision; if the hub is out of reach, its folder in the cache.

    By its name libraries ask for each file that is missing, or may be newer, and without a network for 24 seconds.

    Raises ValueError if nothing of it is cached or may be downloaded.
    """
    repository, _, revision = name.partition("@")
    try:
        HfApi().model_info(repository, timeout=HUB_SECONDS)
        return name
    except RepositoryNotFoundError as error:
        cause, problem = error, "the hub has no model of this name that you may read (`hf auth login`)"
    except HfHubHTTPError:  # its files may be served
        return name
    except Exception as error:
        cause = error
        problem = f"nothing of it is in the hub's cache, and the hub cannot be reached ({reason(error)})"
    if cached := find_cached(repository, revision or None):
        return cached
    raise ValueError(problem) from cause


def find_cached(name: str, revision: str | None = None) -> Path | None:
    """The folder of a repository in the hub's cache, whose name is the commit; None if nothing of it is cached."""
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # nothing is cached, or it is no name of a repository
        return None


def check_finite(tensors: Iterable[tuple[str, "torch.Tensor"]], label: str) -> None:
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


def load_pretrained(cls: type[_Model], source: str | Path, label: str, **options) -> _Model:
    """`cls.from_pretrained(source, **options)`, in eval mode, with every weight from the files, but for a pooler's.

    Raises:
        UserError: weights are missing, of other sizes, or not finite; `label` is the model in words. Errors of
            transformers for broken files pass through.
    """
    check_folder(source, label, options.get("subfolder", ""))
    with quiet_logging():
        model, info = cls.from_pretrained(
            source_of(source), output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    wrong = [f"{part[0]} is {tuple(part[1])}, not {tuple(part[2])}" for part in info["mismatched_keys"]]
    blocks = {_any_block(name) for name in model.state_dict()}  # more of them than the configuration says
    wrong += [f"{name} has no place in it" for name in sorted(info["unexpected_keys"]) if _any_block(name) in blocks]
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("pooler."))
    check_fit(missing, wrong, label)
    check_finite(model.state_dict().items(), label)
    for weight in model.parameters():  # where they lie in a file's memory map decides the last bits of sums
        weight.data = weight.data.clone()
    return model.eval()


def _any_block(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", name.removeprefix("text_model."))


def check_fit(missing: Sequence[str], wrong: Sequence[str], label: str) -> None:
    """Raises UserError for weights that lack tensors of the model, or have others.

    Libraries fill missing tensors with random numbers and drop unknown ones, with no more than a log message.
    """
    if missing:
        raise UserError(f"The weights of {label} lack {len(missing)} tensors of the model, such as {missing[0]}.")
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(f"The weights of {label} do not fit the model: {wrong[0]}{more}.")


@contextmanager
def quiet_logging() -> Iterator[None]:
    """Silences libraries' warnings of missing, unused and random weights, which are checked here or asked for."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
