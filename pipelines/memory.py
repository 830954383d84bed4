"""Whether a picture can fit the memory at all, and what to say when it did not."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from diffusers import AutoencoderKL

from debias_diffusion.errors import UserError, reason
from debias_diffusion.models.shipped import shipped


def decoding_bytes(base: str, dtype: torch.dtype, height: int, width: int, images: int = 1) -> int:
    """How much memory the decoder of a base's autoencoder holds at once at the very least, besides all weights.

    Its first block at full size holds its input, that input normalised, and that again activated, all float tensors
    [images, channels, height, width]. What it really takes was measured at 1.1 to 2.2 times as much on the CPU.

    Args:
        base: folder in diffusers' layout, hub id, or "toy/sdxl".
        dtype: of the models.
        height, width: in pixels.
        images: decoded at once.
    """
    channels = AutoencoderKL.load_config(shipped(base), subfolder="vae")["block_out_channels"]
    return 3 * images * channels[:2][-1] * height * width * dtype.itemsize


def free_bytes(device: torch.device) -> int | None:
    """The memory that this process can still get on a device; None where nobody knows."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    if device.type in ("cpu", "mps"):  # mps: the machine's own memory
        return psutil.virtual_memory().available + psutil.swap_memory().free
    return None


def check_memory(base: str, device: torch.device, dtype: torch.dtype, height: int, width: int, images: int = 1) -> None:
    """Refuses what surely cannot fit, before the system ends the process for it.

    Raises:
        UserError: `decoding_bytes` exceeds `free_bytes`. Says both, and what to lower.
    """
    free, needed = free_bytes(device), decoding_bytes(base, dtype, height, width, images)
    if free is not None and needed > free:
        several = f"{images:,} pictures at once" if images > 1 else "A picture"
        raise UserError(
            f"{several} of {height} x {width} pixels need{'s' * (images == 1)} at least {_gb(needed)} of memory to be "
            f"decoded, and {_gb(free)} are free on {device}. "
            + ("Draw fewer at once, or smaller ones." if images > 1 else "Draw a smaller one.")
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice: an accelerator's, or the machine's."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and re.search("DefaultCPUAllocator|out of memory", str(error)) is not None
    )


@contextmanager
def explain_memory(device: torch.device, advice: str) -> Iterator[None]:
    """Turns memory that does not suffice into a UserError that says what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"The memory of {device} does not suffice ({reason(error)}). What is finished stays. {advice}"
        ) from error
