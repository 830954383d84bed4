"""The device that a model runs on."""

import torch

from .errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by precision


def pick_device(name: str | None = None) -> torch.device:
    """The device of that name; without a name the fastest available: cuda, mps, cpu.

    Raises:
        UserError: the device is not available.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"The device {name!r} is not available ({reason}). Use cpu, or leave the device out."
        ) from error


def pick_precision(name: str, device: torch.device) -> str:
    """fp32, bf16 or fp16: `name`, or for auto the device's fastest safe one.

    bf16 has the range of fp32; fp16 needs scaling where gradients are computed.
    """
    if name != "auto":
        return name
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
