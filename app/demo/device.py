"""The device of the models, used by one request at a time even if its visitor leaves."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from debias_diffusion.errors import UserError, reason

from .live_generation import Drawn, Step, draw
from .models import DemoModels
from .request import BUDGET, Request


class Device:
    """Models with a lock: one request uses them at a time.

    The page's queue already lets one request through at a time. But a cancelled request leaves the queue before its
    current step has ended; the next request waits here for that step.

    Args:
        models: the demo's models.
        budget: denoising steps of one request, as `live_generation.check_budget` counts them.
    """

    def __init__(self, models: DemoModels, budget: int = BUDGET):
        self.models, self.budget = models, budget
        self._free = threading.Lock()

    @contextmanager
    def alone(self) -> Iterator[DemoModels]:
        """The models, for the caller alone within the context.

        Raises:
            UserError: the device runs out of memory within the context.
        """
        with self._free:
            try:
                yield self.models
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"{self.models.device} is out of memory ({reason(error)}). Try a shorter prompt."
                ) from error

    def draw(self, request: Request) -> Iterator[Step | Drawn]:
        """As `live_generation.draw`. Closing the iterator returns at once; its current step ends in another thread.

        Raises:
            UserError: the request cannot be drawn.
        """
        cancelled = threading.Event()
        drawing = draw(self.models, request, cancelled.is_set, self.budget)  # starts with the first item
        self._free.acquire()
        try:
            # `yield from` would close the drawing, and wait for its step, when this iterator is closed.
            for item in drawing:  # noqa: UP028
                yield item
        finally:
            cancelled.set()
            threading.Thread(target=self._end, args=(drawing,), daemon=True).start()

    def _end(self, drawing: Iterator) -> None:
        try:
            drawing.close()
        finally:
            self._free.release()
