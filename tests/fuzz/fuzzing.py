"""How long and with which examples the tests of this folder search.

In CI each test searches for a few seconds, always with the same examples in the same order, so that it cannot fail one
day and pass the next. `make fuzz` sets FUZZ_SECONDS: each test then searches that long, with new examples every time.
"""

import faulthandler
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import hypothesis

SECONDS = float(os.environ.get("FUZZ_SECONDS", 0))
_HANGS = 120  # seconds after which something that takes milliseconds hangs, also on a busy machine


def rounds(seconds: float) -> Iterator[int]:
    """Numbers to seed one round of a search each, until `seconds`, or FUZZ_SECONDS in its place, are over."""
    start, first = time.monotonic(), random.randrange(2**32) if SECONDS else 0
    number = first
    while number == first or time.monotonic() - start < (SECONDS or seconds):
        yield number
        number += 1


def fuzz(search: Callable[[], None], seconds: float) -> None:
    """Calls a hypothesis test (decorated with `examples` and `given`) once a round, with other examples each time.

    A failure names the round's seed; hypothesis prints the smallest example it found.
    """
    for number in rounds(seconds):
        try:
            hypothesis.seed(number)(search)()
        except BaseException as error:
            error.add_note(f"seed of the round: {number}") if hasattr(error, "add_note") else print("seed", number)
            raise


def examples(count: int) -> hypothesis.settings:
    """Settings of a search: so many examples a round, slow ones and large ones allowed."""
    return hypothesis.settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )


@contextmanager
def no_hang() -> Iterator[None]:
    """Ends what hangs, with an error that no `except Exception` swallows and the stack where it hung."""

    def ring(signum, frame):
        faulthandler.dump_traceback()
        raise KeyboardInterrupt(f"nothing came back within {_HANGS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(_HANGS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
