"""Worker processes that read data and leave it to the main process when to stop.

PyTorch's own workers obey the SIGTERM and ctrl-C that schedulers and terminals send to every process of a job, which
ends the run before its checkpoint. After a kill of the main process they look for it only between samples.
"""

import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Literal

from accelerate.utils import get_int_from_env
from torch.utils.data import DataLoader

from ..errors import UserError
from ..files import read_file

_STOPS = (signal.SIGTERM, signal.SIGINT)


def count_workers(workers: int | Literal["auto"], root: Path = Path("/")) -> int:
    """How many processes read data for each process that asks: for "auto" the cores, less one, that each of those on
    this machine has, from 2 to 16."""
    if workers != "auto":
        return workers
    return max(2, min(16, (usable_cores(root) - 1) // get_int_from_env(["LOCAL_WORLD_SIZE"], 1)))


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use, by its affinity and the quotas of its cgroups (version 2) below `root`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError):  # of Linux alone
        group = re.search(rb"^0::/(.*)$", read_file(root / "proc/self/cgroup"), re.MULTILINE)
        folder = root / "sys/fs/cgroup" / (group[1].decode() if group else "")
        for limits in (parent / "cpu.max" for parent in (folder, *folder.parents)):
            quota, period = read_file(limits).split() if limits.exists() else (b"max", b"1")
            cores = cores if quota == b"max" else min(cores, max(1, int(quota) // int(period)))
    return cores


@contextmanager
def load_batches(loader: DataLoader) -> Iterator[Iterator]:
    """Gives an iterator over `loader`. Its workers ignore SIGTERM and ctrl-C, and end with the context.

    If the main process is killed, workers end within seconds, whatever they are doing.

    Raises:
        UserError: a worker raised it.
    """
    # Python's exit would wait for workers that are left, which ignore its SIGTERM: after a start that failed, an end
    # that was interrupted, or where one hangs.
    workers: list[BaseProcess] = []
    kill, others = Finalize(None, _kill, [workers], exitpriority=0), multiprocessing.active_children()
    if loader.num_workers and sys.platform == "linux":
        loader.multiprocessing_context = "fork"  # only a forked worker shares the records' memory
    loader.worker_init_fn = _end_with_main_process
    try:
        with _without_stops():  # workers start so
            try:
                batches = iter(loader)
            finally:
                workers += set(multiprocessing.active_children()).difference(others)
        try:
            yield batches
        finally:
            if loader.num_workers:
                batches._shutdown_workers()
    except UserError as error:
        traceback, _, message = str(error).rpartition(f"{UserError.__name__}: ")
        if "DataLoader worker" not in traceback:
            raise
        raise UserError(message.strip()) from error  # torch puts a worker's traceback before its message
    finally:
        kill()


@contextmanager
def _without_stops() -> Iterator[None]:
    """Holds SIGTERM and ctrl-C back from this thread and the processes that it starts; Windows has no way to."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(workers: list[BaseProcess]) -> None:
    for worker in workers:
        with suppress(RuntimeError):  # torch raises in its SIGCHLD handler that it was killed
            worker.kill()
            worker.join()


def _end_with_main_process(worker: int) -> None:
    for stop in _STOPS:
        signal.signal(stop, signal.SIG_IGN)

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
