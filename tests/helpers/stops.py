"""What a kill leaves in a folder, at any of its writes, without a process to kill."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

# All that pathlib, shutil and debias_diffusion change or sync files with, other than writing into an open one.
WRITES = ("mkdir", "replace", "rename", "fsync", "truncate", "unlink", "remove", "rmdir")


@contextmanager
def copied_at_writes(folder: Path, to: Path) -> Iterator[list[Path]]:
    """Copies `folder` before each call of `WRITES`, to subfolders of `to`: what a kill at that moment leaves.

    Yields the list of copies. A call before which nothing has changed since the last copy makes none.
    """
    copies, states, copying = [], [], False

    def copy(name: str) -> None:
        nonlocal copying
        if copying or not folder.exists():
            return
        copying = True
        content = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
        if content not in states[-1:]:
            states.append(content)
            copies.append(shutil.copytree(folder, to / f"{len(copies):03}-before-{name}"))
        copying = False

    def copied_before(name, function):
        def call(*arguments, **options):
            copy(name)
            return function(*arguments, **options)

        return call

    with mock.patch.multiple(os, **{name: copied_before(name, getattr(os, name)) for name in WRITES}):
        yield copies


class Stopped(BaseException):
    """What a stopped write raises."""


@contextmanager
def stopped_at(number: int) -> Iterator[list[str]]:
    """From the `number`th call of `WRITES` on, each raises `Stopped`, those of cleaning up too.

    Yields the names of the calls so far.
    """
    calls: list[str] = []

    def counted(name, function):
        def call(*arguments, **options):
            calls.append(name)
            if len(calls) >= number:
                raise Stopped(name)
            return function(*arguments, **options)

        return call

    with mock.patch.multiple(os, **{name: counted(name, getattr(os, name)) for name in WRITES}):
        yield calls
