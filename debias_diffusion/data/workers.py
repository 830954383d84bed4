"""Worker processes that read data, and leave it to the main process when to stop."""

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
    """Gives an iterator over `loader`, whose workers ignore SIGTERM and ctrl-C, and have ended when the context has.

    Schedulers, `timeout` and terminals signal every process of a job. A worker that obeyed would end the run with an
    error, where the main process finishes its step and writes a checkpoint. Workers whose main process was killed end
    within seconds, whatever they are doing.

    Raises:
        UserError: a worker has raised it.
    """
    if loader.num_workers and sys.platform == "linux":
        # Whatever Python's default is: only what is forked from here inherits the mask, and shares the records' memory.
        loader.multiprocessing_context = "fork"
    loader.worker_init_fn = _end_with_main_process
    with _blocked_signals():  # a worker inherits the mask, from its first moment on
        batches = iter(loader)
        workers = getattr(batches, "_workers", ())
        # An exit waits for all workers, and these do not hear its SIGTERM: they end before, whatever interrupts this.
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
        worker.kill()  # only one that hangs is still there, or all after an interrupt


def _end_with_main_process(worker: int) -> None:
    """Watches from a thread: torch's own watch waits for a sample that is being read, and for what nobody takes."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """SIGTERM and ctrl-C are blocked for what is forked within; a ctrl-C that comes meanwhile is heard afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    asked: list[int] = []
    # The mask is this thread's alone: another one may take the signal, and Python then interrupts this one.
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number)) if is_main else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_main:
            signal.signal(signal.SIGINT, signal.SIG_DFL if handler is None else handler)
        if asked:
            signal.raise_signal(signal.SIGINT)
