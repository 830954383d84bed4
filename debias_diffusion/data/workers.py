"""Worker processes that read data and leave it to the main process when to stop.

PyTorch's own workers obey the SIGTERM and ctrl-C that schedulers and terminals send to every process of a job, which
ends the run before its checkpoint. After a kill of the main process they look for it only between samples.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize

from torch.utils.data import DataLoader

from ..errors import UserError


@contextmanager
def load_batches(loader: DataLoader) -> Iterator[Iterator]:
    """Gives an iterator over `loader`. Its workers ignore SIGTERM and ctrl-C, and end with the context.

    If the main process is killed, workers end within seconds, whatever they are doing.

    Raises:
        UserError: a worker raised it.
    """
    if loader.num_workers and sys.platform == "linux":
        # Only a forked worker inherits the signal mask and shares the records' memory.
        loader.multiprocessing_context = "fork"
    loader.worker_init_fn = _end_with_main_process
    with _blocked_signals():  # a worker inherits the mask, from its first moment on
        batches = iter(loader)
        workers = getattr(batches, "_workers", ())
        # Python's exit waits for all workers, and these ignore its SIGTERM, so they are killed first.
        end_workers = Finalize(None, _end, args=(workers,), exitpriority=0)
    try:
        yield batches
    except UserError as error:
        traceback, _, message = str(error).rpartition(f"{UserError.__name__}: ")
        if "DataLoader worker" not in traceback:
            raise
        raise UserError(message.strip()) from error  # torch puts a worker's traceback before its message
    finally:
        if workers:
            batches._shutdown_workers()
        end_workers()


def _end(workers: Iterable[multiprocessing.Process]) -> None:
    for worker in workers:
        worker.kill()  # of those left: one that hangs, or all after an interrupt


def _end_with_main_process(worker: int) -> None:
    """Watches from a thread, because torch's own check waits while a sample is read or a queue is full."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Blocks SIGTERM and ctrl-C for processes forked inside; a ctrl-C that comes meanwhile is raised afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    interrupts: list[int] = []
    # The mask is this thread's alone: another one may take the signal, and Python then interrupts this one.
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number)) if is_main else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_main:
            signal.signal(signal.SIGINT, signal.SIG_DFL if handler is None else handler)
        if interrupts:
            signal.raise_signal(signal.SIGINT)
