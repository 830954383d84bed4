"""Several processes of one run without the 25 seconds of a launcher: they are forked from the test's own process."""

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState

PATIENCE = 60  # seconds, for what takes a few


def forked(count: int, work: Callable[[int], Any], group: bool = True, patience: float = PATIENCE) -> list[Any]:
    """What `work(rank)` returns in each of `count` forked processes, as `torch.load(weights_only=True)` reads it.

    A process that fails ends the others; its traceback is in the AssertionError.

    Args:
        group: the processes form one group over gloo, as a launcher's do.
        patience: seconds until they are killed.

    torch must have had one thread from its first operation on (conftest.py), or a child hangs.
    """
    assert torch.get_num_threads() == 1, "a process of several threads cannot be forked"
    status = {}  # exit codes by process
    with tempfile.TemporaryDirectory() as folder:
        children = []
        try:
            for rank in range(count):
                children.append(_fork(rank, count, work, folder, group))
            ends = time.monotonic() + patience
            while len(status) < count and time.monotonic() < ends and not any(status.values()):
                for child in set(children) - status.keys():
                    if (ended := os.waitpid(child, os.WNOHANG))[0]:
                        status[child] = os.waitstatus_to_exitcode(ended[1])
                time.sleep(0.005)
        finally:
            for child in set(children) - status.keys():  # hangs, or waits for one that has failed
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        failed = "\n".join(file.read_text() for file in sorted(Path(folder).glob("*.txt")))
        codes = [status.get(child, f"ended after {patience} s, or because another had failed") for child in children]
        assert codes == [0] * count, f"exit codes {codes}\n{failed}"
        return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(count)]


def _fork(rank: int, count: int, work: Callable[[int], Any], folder: str, group: bool) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        return child
    try:
        if group:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, "ACCELERATE_USE_CPU": "true"}
            os.environ |= {name: str(value) for name, value in place.items()}
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
            AcceleratorState._reset_state(True)
        torch.save(work(rank), f"{folder}/{rank}.pt")
        if group:
            dist.barrier()  # who leaves earlier would break what another still receives
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        Path(folder, f"{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)


def ranks(count: int, work: Callable[[Accelerator], Any]) -> list[Any]:
    """What `work(accelerator)` returns in each process of one group."""
    return forked(count, lambda _: work(Accelerator(cpu=True)))
