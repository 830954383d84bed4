"""The device, memory and precision that a model runs in, what they cost, and the processes that share its work."""

import atexit
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import NoReturn

import torch
import torch.distributed
from accelerate.utils.memory import should_reduce_batch_size

from .errors import OutOfMemory, UserError, reason

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by precision


def pick_device(name: str | None = None) -> torch.device:
    """The device of that name; without a name the fastest available: cuda, mps, cpu."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        problem = f"The device {name!r} is not available ({str(error).splitlines()[0]})."
        raise UserError(f"{problem} Use cpu, or leave the device out.") from error


def pick_precision(name: str, device: torch.device) -> str:
    """fp32, bf16 or fp16: `name`, or for auto the device's fastest safe one.

    bf16 has the range of fp32; fp16 needs scaling where gradients are computed.
    """
    if name != "auto":
        return name
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Mixed precision for "bf16" and "fp16", nothing for "fp32". Not accelerate's, which a process sets but once."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that a GPU fetches when its turn comes, instead of one that waits for everything before."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@contextmanager
def explain_memory(device: torch.device, advice: str) -> Iterator[None]:
    """Turns an out-of-memory error into an OutOfMemory with advice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not should_reduce_batch_size(error):
            raise
        raise OutOfMemory(
            f"The memory of {device} does not suffice ({reason(error)}). What is finished stays. {advice}"
        ) from error


def machine_name(device: torch.device) -> str:
    """The GPU's name, or the processor's and how many threads PyTorch uses of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.processor())}, {torch.get_num_threads()} threads"


def seconds(run: Callable, device: torch.device) -> float:
    """How long `run()` takes."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - started


def cost(run: Callable, device: torch.device) -> dict[str, float | None]:
    """Median seconds of `run()`, after a first call, and on an NVIDIA GPU by how many GB it makes memory grow."""
    on_gpu, before = device.type == "cuda", 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.max_memory_allocated(device)
    times = [seconds(run, device) for _ in range(6 if on_gpu else 2)]
    grown = round((torch.cuda.max_memory_allocated(device) - before) / 1e9, 3) if on_gpu else None
    return {"seconds": round(median(times[1:]), 4), "gigabytes": grown}


def _grouped() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def end_group_at_exit() -> None:
    """Closes the process group at exit, if accelerate has opened one; call it wherever that may have happened.

    A group still open during the interpreter's shutdown has threads that can abort the process, with exit code -6.
    """
    atexit.unregister(_end_group)
    atexit.register(_end_group)


def _end_group() -> None:
    # NCCL's end waits for all processes; after an uncaught exception here they will not come.
    if _grouped() and (torch.distributed.get_backend() == "gloo" or not hasattr(sys, "last_value")):
        torch.distributed.destroy_process_group()


def is_lost_connection(error: Exception) -> bool:
    """Whether another process ended while this one waited for it."""
    return _grouped() and (isinstance(error, torch.distributed.DistError) or "third_party/gloo" in str(error))


def leave(code: int) -> NoReturn:
    """Exits with `code`. One process of several exits without waiting for the others, which may not come."""
    if _grouped():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)
