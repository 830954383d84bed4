"""Stops at any write, as a kill does, without a process to kill."""

import os
from contextlib import contextmanager
from unittest import mock

WRITES = ("replace", "rename", "fsync", "unlink", "remove", "rmdir")


class Stopped(BaseException):
    """No `except Exception` may swallow it, as no program survives a kill."""


@contextmanager
def stopped_at(write: int):
    """From the write of this number on every rename, sync and removal raises, cleaning up in `finally` included.

    Yields a list with the name of each call that was asked for.
    """
    asked = []

    def counted(name, function):
        def call(*arguments, **options):
            asked.append(name)
            if len(asked) > write:
                raise Stopped
            return function(*arguments, **options)

        return call

    with mock.patch.multiple(os, **{name: counted(name, getattr(os, name)) for name in WRITES}):
        yield asked
