"""The processes of a run, one for each GPU as `accelerate launch` starts them, or a single one."""

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env

from .devices import end_group_at_exit, pick_device
from .errors import UserError

# The other processes wait while the main one reads all of the data, which may take longer than the default ten minutes.
# A failure ends the wait: launchers stop the rest once one process has failed.
_PATIENCE = timedelta(days=1)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Processes:
    """The processes that share a run's work; a single one by default.

    Every process calls the same methods in the same order. The main one reads, scores and writes.

    Attributes:
        device: of this process.
        count: how many there are.
        index: of this one, from 0, which is the main one.
    """

    device: torch.device
    count: int = 1
    index: int = 0

    @classmethod
    def connect(cls, device: str | None = None) -> "Processes":
        """All that were launched together.

        Without `device` each process has its own GPU, and a single process what `pick_device` says. Raises UserError if
        there is no such device, or several processes cannot share it.
        """
        # Without a GPU, accelerate takes each of several processes for a single one unless it is set to use the CPU.
        cpu = device == "cpu" or parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
        state = PartialState(cpu=cpu, timeout=_PATIENCE)
        end_group_at_exit()
        if state.num_processes == 1:
            return cls(pick_device(device))
        if device in (None, state.device.type):
            return cls(state.device, state.num_processes, state.process_index)
        raise UserError(
            f"device is {device!r}, but {state.num_processes} processes run, each on a device of its own "
            f"({state.device.type}). Leave the device out, or start one process."
        )

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def from_main(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, which runs in the main process only; it must be picklable."""
        outcome = [work() if self.is_main else None]
        if self.count > 1:
            broadcast_object_list(outcome)
        return outcome[0]

    def gathered(self, values: list) -> list:
        """The values of all processes, once all have come here; they must be picklable."""
        return gather_object(values) if self.count > 1 else values

    def gathered_by_round(self, made: Iterable[list], rounds: int) -> Iterator[list]:
        """What all processes have made in each round, as soon as all have; in the last ones a process may make nothing.

        So the main process writes for all, and what is made is lost only of the round in which a run is killed.
        """
        for values, _ in zip_longest(made, range(rounds), fillvalue=[]):
            yield self.gathered(values)

    def only_main_prints(self) -> AbstractContextManager:
        """Discards what the other processes print inside the context."""
        return nullcontext() if self.is_main else redirect_stdout(io.StringIO())
