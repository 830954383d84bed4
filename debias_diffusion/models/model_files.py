"""Model files from anywhere: bounded reading, and a UserError for every fault in them."""

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers.utils import cached_file

from ..errors import UserError, reason

# In folders of two-towers: open_clip's configuration and weights; the difference from a base model.
CONFIG_FILE, WEIGHTS_FILE = "open_clip_config.json", "open_clip_model.safetensors"
DIFFERENCE = "difference.safetensors"

# Far above any model's, and far below anything that costs minutes or gigabytes before the weights are checked.
_MOST_BYTES = 16 << 20  # of a configuration
_DEEPEST = 30  # objects and lists inside each other
_MOST_LAYERS = 512
_LARGEST_NUMBER = 2**31
_SMALL = 2**24  # numbers that a model may hold beside its weights, such as masks
# Larger weights overflow after a few layers. Published ones stay below some thousands.
LARGEST_WEIGHT = 1e6


@contextmanager
def explain_failure(failure: str, advice: str = "") -> Iterator[None]:
    """Turns every error that a wrong or hostile file causes in a library into a UserError.

    Args:
        failure: the beginning of the message: "The text encoder 'runs/a' could not be loaded".
        advice: a sentence on what to do.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # Libraries in Rust panic on some files, and a PanicException is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{failure}: {reason(error)}.{advice and f' {advice}'}") from error


def read_config(file: Path) -> dict:
    """The JSON object in a model's configuration.

    Raises:
        UserError: it is not a regular file, not a JSON object, or has numbers or nesting that no model has.
    """
    label = repr(str(file))
    try:
        if not file.is_file():
            raise UserError(f"{label} is not there, or is no regular file.")
        if file.stat().st_size > _MOST_BYTES:
            raise UserError(f"{label} is not a configuration: it is larger than {_MOST_BYTES >> 20} MiB.")
        content = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{label} is not readable JSON: {reason(error)}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{label} is not a configuration: it must hold a JSON object, not a {type(content).__name__}.")
    check_bounds(content, label)
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}")


def check_bounds(config: Mapping, label: str) -> None:
    """Raises UserError for a configuration with more layers, larger numbers or deeper nesting than any model has.

    Otherwise a few bytes make a library build for hours before it compares anything with the weights.
    """
    waiting = [(key, value, 1) for key, value in config.items()]
    while waiting:
        key, value, depth = waiting.pop()
        if depth > _DEEPEST:
            raise UserError(f"{label} is nested more than {_DEEPEST} deep, as no model's configuration is.")
        if isinstance(value, dict):
            waiting += [(inner, part, depth + 1) for inner, part in value.items()]
        elif isinstance(value, list):
            waiting += [(key, part, depth + 1) for part in value]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            most = _MOST_LAYERS if "layers" in str(key) or "depth" in str(key) else _LARGEST_NUMBER
            if not (math.isfinite(value) and abs(value) <= most):
                raise UserError(f"{label} says {key}: {str(value)[:30]}; no model has more than {most:,}.")


def find_file(source: str | Path, name: str, subfolder: str = "") -> Path | None:
    """A file of a folder (Path) or of a repository of the hub (str, downloaded); None if it is missing."""
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


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], label: str) -> None:
    """Raises UserError, with names and counts, if weights hold NaN, infinity, or values beyond LARGEST_WEIGHT.

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
            damaged.append((name, values))
    if not damaged:
        return
    name, values = damaged[0]
    nans, infinite = int(values.isnan().sum()), int(values.isinf().sum())
    large = int((values.abs() > LARGEST_WEIGHT).sum()) - infinite
    counts = ((nans, "NaN"), (infinite, "infinite"), (large, f"beyond {LARGEST_WEIGHT:,.0f}"))
    summary = ", ".join(f"{count} {kind}" for count, kind in counts if count)
    more = f", and {len(damaged) - 1} more tensors hold such values" if len(damaged) > 1 else ""
    raise UserError(
        f"{label} has weights that give no results: of {values.numel():,} values in {name!r} there are {summary}{more}."
        " The file is damaged, or its training diverged. Get it again, or use an earlier checkpoint."
    )


def build_empty(build: Callable[[], nn.Module], most: int, label: str) -> nn.Module:
    """The module that a configuration describes, without memory for weights (on the meta device).

    Args:
        build: makes the module.
        most: an upper bound of the numbers in the files of weights, such as their size in bytes. Small excesses are
            left to `check_state`, which names the tensors.
        label: the model, in words.

    Raises:
        UserError: the module is many times larger than the weights.
    """
    with torch.device("meta"), torch.no_grad():
        module = build()
    numbers = sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))
    if numbers > 4 * most + _SMALL:
        raise UserError(
            f"The configuration of {label} is of a model with {numbers:,} numbers, but its weights are at most "
            f"{most:,}. They do not belong together."
        )
    return module.eval()


def check_state(state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], label: str) -> None:
    """Raises UserError unless `state` holds exactly the tensors of `expected`, in their shapes and fully stored.

    Libraries fill missing tensors with random numbers and drop unknown ones, with no more than a log message.
    """
    missing = sorted(expected.keys() - state.keys())
    if missing:
        raise UserError(f"The weights of {label} lack {len(missing)} tensors of the model, such as {missing[0]}.")
    faults = [f"{name} has no place in it" for name in sorted(state.keys() - expected.keys())]
    for name, model_tensor in expected.items():
        tensor = state[name]
        if tensor.shape != model_tensor.shape:
            faults.append(f"{name} is {tuple(tensor.shape)}, not {tuple(model_tensor.shape)}")
        elif not tensor.is_floating_point() or tensor.layout != torch.strided:
            faults.append(f"{name} is of {tensor.dtype}, not of floating-point numbers")
        # A few bytes can be made to look like gigabytes.
        elif tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            faults.append(f"{name} is larger than what the file holds of it")
    if faults:
        more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise UserError(f"The weights of {label} do not fit the model: {faults[0]}{more}.")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' reports of missing and unused weights, which are checked here."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)
