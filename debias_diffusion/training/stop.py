"""Stopping between two steps after SIGTERM or ctrl-C."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator

_SAME_REQUEST = 2.0  # seconds within which a launcher forwards a ctrl-C that its processes have already received


class StopRequest:
    """Whether SIGTERM (Slurm, spot machines) or ctrl-C has asked a run to stop.

    The current step is finished first, so that a checkpoint is of a complete step. A second ctrl-C stops at once; a
    second SIGTERM does not, because schedulers repeat it and launchers forward it.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self._asked_at: float | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _ask(self, signum, frame) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif signum == signal.SIGINT and now - self._asked_at > _SAME_REQUEST:
            raise KeyboardInterrupt

    @property
    def here(self) -> bool:
        """Whether this process was asked."""
        return self._asked_at is not None

    def asked(self) -> bool:
        """Whether any process was asked: the same answer on all."""
        if self.accelerator.num_processes == 1:
            return self.here  # without a wait for the device
        if self.here:
            self.accelerator.set_trigger()
        return self.accelerator.check_trigger()
