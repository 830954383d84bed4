"""The machine that a number was measured on, in words."""

import platform
from pathlib import Path

import torch


def machine(device: torch.device) -> str:
    """The GPU's name, or the processor's and how many threads PyTorch uses of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    model = next(names, platform.processor())
    return f"{model}, {torch.get_num_threads()} threads"
