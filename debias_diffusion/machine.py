"""The machine that a number was measured on, in words, and how seconds and bytes are measured."""

import ctypes
import gc
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
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


class PeakMemory:
    """By how many bytes the memory in use grew at most since `start`: of the GPU's allocator, or of this process.

    A process's peak can begin anew on Linux alone; elsewhere `read` gives None.
    """

    def __init__(self, device: torch.device):
        self.device, self._before = device, 0

    def start(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif Path("/proc/self/clear_refs").exists():
            ctypes.CDLL(None).malloc_trim(0)  # or what was freed and not given back would count as in use
            Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is in use now
        self._before = self._peak() or 0

    def read(self) -> int | None:
        peak = self._peak()
        return None if peak is None else peak - self._before

    def _peak(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)


def cost(run: Callable, device: torch.device) -> dict[str, float | None]:
    """Median seconds of `run()`, after a first call, and by how many GB it makes memory grow (see `PeakMemory`)."""
    memory = PeakMemory(device)
    memory.start()
    times = [seconds(run, device) for _ in range(2 if device.type == "cpu" else 6)]
    peak = memory.read()
    return {"seconds": round(median(times[1:]), 4), "gigabytes": None if peak is None else round(peak / 1e9, 3)}
