"""What to say when memory runs out."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from debias_diffusion.errors import UserError, reason


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
