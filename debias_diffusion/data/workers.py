"""Worker processes that read data, and leave it to the main process when to stop."""

import ctypes
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from accelerate.utils import get_int_from_env
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..errors import UserError
from ..files import read_file

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


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
    """An iterator over `loader`, whose workers ignore SIGTERM and ctrl-C, and end with the context.

    Raises:
        UserError: a worker raised it.
    """
    if loader.num_workers and sys.platform == "linux":
        loader.multiprocessing_context = "fork"  # only a forked worker shares the records' memory
    loader.worker_init_fn = _heed_main_process
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
            batches._shutdown_workers()


@contextmanager
def read_records(
    records: Sequence, read: Callable, workers: int | Literal["auto"], indices: Sequence[int] | None = None, **bar
) -> Iterator[Iterator]:
    """What `read` makes of the records at `indices` (None: of all), in this order, whichever worker is ready first.

    Args:
        bar: options of the progress bar.
    """
    indices = range(len(records)) if indices is None else indices
    loader = DataLoader(records, None, sampler=indices, num_workers=count_workers(workers), collate_fn=read)
    with load_batches(loader) as results, tqdm(results, **{"total": len(indices)} | bar) as shown:
        yield iter(shown)


def _heed_main_process(worker: int) -> None:
    """The signals that schedulers and terminals send to every process of a job end no worker; the main process does,
    and on Linux also its death, whatever a worker is doing; elsewhere torch ends one that has read its batch."""
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if (main := multiprocessing.parent_process()) and os.getppid() != main.pid:  # it has died before
            os._exit(1)
