"""Whether images can fit the memory at all, and what to say if they did not."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from debias_diffusion.errors import UserError, reason

from .loading import find_checkpoint, vae_channels


def decoding_bytes(base: str, dtype: torch.dtype, height: int, width: int, images: int = 1) -> int:
    """A lower bound of the memory that decoding latents takes at once, besides all weights.

    The decoder's first block at full size holds its input, the normalised input and its activation, all float tensors
    [images, channels, height, width]. On the CPU 1.1 to 2.2 times as much was measured.

    Args:
        base: see `find_checkpoint`.
        dtype: of the models.
        height, width: in pixels.
        images: decoded at once.
    """
    channels = vae_channels(find_checkpoint(base))
    return 3 * images * channels[:2][-1] * height * width * dtype.itemsize


def free_bytes(device: torch.device) -> int | None:
    """The memory that this process can still get on a device; None where that is unknown."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    if device.type in ("cpu", "mps"):  # mps: the machine's own memory
        return psutil.virtual_memory().available + psutil.swap_memory().free
    return None


def check_memory(base: str, device: torch.device, dtype: torch.dtype, height: int, width: int, images: int = 1) -> None:
    """Refuses what cannot fit, before the system kills the process.

    Raises:
        UserError: `decoding_bytes` exceeds `free_bytes`; says both, and what to lower.
    """
    free, needed = free_bytes(device), decoding_bytes(base, dtype, height, width, images)
    if free is not None and needed > free:
        several = f"{images:,} images at once" if images > 1 else "An image"
        raise UserError(
            f"{several} of {height} x {width} pixels need{'s' * (images == 1)} at least {_gb(needed)} of memory to be "
            f"decoded, and {_gb(free)} are free on {device}. "
            + ("Render fewer at once, or smaller ones." if images > 1 else "Render a smaller one.")
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, on an accelerator or the machine."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and re.search("DefaultCPUAllocator|out of memory", str(error)) is not None
    )


@contextmanager
def explain_memory(device: torch.device, advice: str) -> Iterator[None]:
    """Turns an out-of-memory error into a UserError with advice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"The memory of {device} does not suffice ({reason(error)}). What is finished stays. {advice}"
        ) from error
