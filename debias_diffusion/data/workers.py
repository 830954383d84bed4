"""Worker processes that read data, and leave it to the main process when to stop."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

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
    loader.worker_init_fn = partial(_end_with_main_process, os.getpid())
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


def _end_with_main_process(main_process: int, worker: int) -> None:
    """Watches from a thread: torch's own watch waits for a sample that is being read, and for what nobody takes."""

    def watch() -> None:
        while os.getppid() == main_process:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _blocked_signals() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
