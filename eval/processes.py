"""The processes of an evaluation: one for each GPU, as `accelerate launch` starts them, or a single one."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env

from debias_diffusion.devices import end_group_at_exit, pick_device
from debias_diffusion.errors import UserError
from debias_diffusion.files import folder_lock

Result = TypeVar("Result")

# The other processes wait while the main one reads all of the data, which may take longer than the default ten minutes.
# A failure ends the wait: launchers stop the rest once one process has failed.
_PATIENCE = timedelta(days=1)


class Processes:
    """All processes of this run. Every process calls the same methods in the same order.

    Args:
        device: where to run. None: each process on its own GPU; a single process where `pick_device` says.

    Attributes:
        count: number of processes.
        index: of this process, from 0.
        is_main: whether this process is the one that reads, scores and writes.
        device: where this process runs.

    Raises:
        UserError: there is no such device, or several processes cannot share it.
    """

    def __init__(self, device: str | None = None):
        # Without a GPU, accelerate takes each of several processes for a single one unless it is set to use the CPU.
        cpu = device == "cpu" or parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
        state = PartialState(cpu=cpu, timeout=_PATIENCE)
        end_group_at_exit()
        self.count, self.index, self.is_main = state.num_processes, state.process_index, state.is_main_process
        if self.count == 1:
            self.device = pick_device(device)
        elif device in (None, state.device.type):
            self.device = state.device
        else:
            raise UserError(
                f"device is {device!r}, but {self.count} processes run, each on a device of its own "
                f"({state.device.type}). Leave the device out, or start one process."
            )

    def from_main(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, which runs in the main process only; it must be picklable."""
        outcome = [work() if self.is_main else None]
        if self.count > 1:
            broadcast_object_list(outcome)
        return outcome[0]

    def gathered(self, values: list) -> list:
        """The values of all processes, once all have come here; they must be picklable."""
        return gather_object(values) if self.count > 1 else values

    @contextmanager
    def alone_in(self, folder: Path) -> Iterator[None]:
        """Creates and locks a folder for this run; inside the context only the main process prints.

        Raises:
            UserError: another run has the lock.
        """
        busy = f"Another process is writing to {str(folder)!r}. Wait for it, or give another output."
        with ExitStack() as stack:

            def hold() -> None:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(folder_lock(folder, busy))

            self.from_main(hold)
            stack.enter_context(self.only_main_prints())
            yield

    @contextmanager
    def only_main_prints(self) -> Iterator[None]:
        """Discards what the other processes print inside the context."""
        if self.is_main:
            yield
            return
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            yield
