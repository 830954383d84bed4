"""Work that is stopped at any of its writes, without a process to kill."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

# All that pathlib, shutil and debias_diffusion change or sync files with, other than writing into an open one.
WRITES = ("mkdir", "replace", "rename", "fsync", "truncate", "unlink", "remove", "rmdir")


class Stopped(BaseException):
    """What a stopped write raises."""


def stop(name: str) -> None:
    raise Stopped(name)


@contextmanager
def stopped_at(number: int, stop: Callable[[str], None] = stop) -> Iterator[None]:
    """Before the `number`th call of `WRITES` and each that follows, those of cleaning up too, `stop` is called."""
    calls = 0

    def counted(name, function):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls >= number:
                stop(name)
            return function(*arguments, **options)

        return call

    with mock.patch.multiple(os, **{name: counted(name, getattr(os, name)) for name in WRITES}):
        yield
