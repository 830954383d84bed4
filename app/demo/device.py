"""The device that draws and reads: for one request at a time, whatever becomes of those who asked."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from debias_diffusion.errors import UserError, reason

from .drawing import Drawn, Step, draw
from .models import Models
from .requests import BUDGET, Request


class Device:
    """Models, and whose turn it is to use them.

    The page's queue already lets one request through at a time. But a request that is broken off leaves the queue
    before the step that it is in has ended; the next one waits here for that.

    Args:
        models: what draws and reads.
        budget: denoising steps that one request may take, as `drawing.check_budget` counts them.
    """

    def __init__(self, models: Models, budget: int = BUDGET):
        self.models, self.budget = models, budget
        self._free = threading.Lock()

    @contextmanager
    def alone(self) -> Iterator[Models]:
        """The models, while nobody else uses them.

        Raises:
            UserError: memory does not suffice for what is done with them.
        """
        with self._free:
            try:
                yield self.models
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"The memory of {self.models.device} does not suffice ({reason(error)}). Try a shorter prompt."
                ) from error

    def draw(self, request: Request) -> Iterator[Step | Drawn]:
        """As `drawing.draw`. Closing it returns at once; what is under way ends with its step, and beside.

        Raises:
            UserError: the request cannot be drawn.
        """
        broken_off = threading.Event()
        drawing = draw(self.models, request, broken_off.is_set, self.budget)  # begins with the first news
        self._free.acquire()
        try:
            # Not `yield from`, which would close the drawing, and wait for its step, where this is closed.
            for news in drawing:  # noqa: UP028
                yield news
        finally:
            broken_off.set()
            threading.Thread(target=self._end, args=(drawing,), daemon=True).start()

    def _end(self, drawing: Iterator) -> None:
        try:
            drawing.close()
        finally:
            self._free.release()
