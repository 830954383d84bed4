"""Worker processes that read data, and leave it to the main process when to stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.data import DataLoader

from ..errors import UserError


@contextmanager
def load_batches(loader: DataLoader) -> Iterator[Iterator]:
    """Gives an iterator over `loader`, whose workers ignore SIGTERM and ctrl-C, and have ended when the context has.

    Schedulers, `timeout` and terminals signal every process of a job. A worker that obeyed would end the run with an
    error, where the main process finishes its step and writes a checkpoint. A worker whose main process was killed ends
    by itself within seconds.
    """
    with _blocked_signals():  # a worker inherits the mask, from its first moment on
        batches = iter(loader)
    try:
        yield batches
    except UserError as error:
        traceback, _, message = str(error).rpartition(f"{UserError.__name__}: ")
        if "DataLoader worker" not in traceback:
            raise
        raise UserError(message.strip()) from error  # torch puts a worker's traceback before its message
    finally:
        if loader.num_workers:
            # Not left to the garbage collector: an error's traceback may keep the workers until the interpreter's exit,
            # which would wait for them, because they do not hear its SIGTERM.
            batches._shutdown_workers()
            for worker in batches._workers:
                worker.kill()  # only one that hangs is still there


@contextmanager
def _blocked_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
