"""The machine that a number was measured on, in words, and how seconds and bytes are measured."""

import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch


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
