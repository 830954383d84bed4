"""Stopping between two steps, when someone asks for it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator


class StopRequest:
    """Whether SIGTERM (Slurm, spot machines) or ctrl-C has asked a run to stop.

    The step under way is finished first, so that a checkpoint is of a whole step. Asked twice, it stops at once.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self._asked = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _ask(self, signum, frame) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    @property
    def here(self) -> bool:
        """Whether this process was asked."""
        return self._asked

    def asked(self) -> bool:
        """The same answer on every process, whichever of them was asked."""
        if self.accelerator.num_processes == 1:
            return self._asked
        asked = torch.tensor(int(self._asked), device=self.accelerator.device)
        return bool(self.accelerator.reduce(asked, reduction="sum").item())
