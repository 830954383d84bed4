"""How long and with which examples the tests of tests/fuzz search.

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
    start = time.monotonic()
    number = first = random.randrange(2**32) if SECONDS else 0
    while number == first or time.monotonic() - start < (SECONDS or seconds):
        yield number
        number += 1


def fuzz(search: Callable[[], None], seconds: float, count: int = 200) -> None:
    """Calls a test that hypothesis has `given` examples, with `count` others each round.

    A failure names the round's seed; hypothesis prints the smallest example it found.
    """
    checks = list(hypothesis.HealthCheck)
    limits = hypothesis.settings(max_examples=count, database=None, deadline=None, suppress_health_check=checks)
    search = limits(search)
    for number in rounds(seconds):
        try:
            hypothesis.seed(number)(search)()
        except BaseException:
            print("seed of the round:", number)
            raise


@contextmanager
def no_hang(seconds: int = _HANGS) -> Iterator[None]:
    """Ends what hangs, with an error that no `except Exception` swallows and the stack where it hung."""

    def ring(signum, frame):
        faulthandler.dump_traceback()
        raise KeyboardInterrupt(f"nothing came back within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
