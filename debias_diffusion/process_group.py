"""Ends one process of several that share their work."""

import atexit
import os
import sys
from typing import NoReturn

import torch.distributed


def _grouped() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def end_group_at_exit() -> None:
    """Closes the process group at exit, if accelerate has opened one; call it wherever that may have happened.

    A group still open during the interpreter's shutdown has threads that can abort the process, with exit code -6.
    """
    if _grouped():
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
