"""Records that stay bytes, in memory or in a file, until they are read."""

import hashlib
import json
import os
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import numpy as np

from ..errors import UserError
from ..files import open_regular


@dataclass(frozen=True)
class Record:
    """One image and its caption, and a short caption where the data bring one. `sample_id` seeds all that is drawn."""

    sample_id: str
    image: str
    caption: str
    short: str | None = None

    def values(self) -> list[str | None]:
        """As JSON values, which identify the record."""
        return [self.sample_id, self.image, self.caption, self.short]


class Content(Protocol):
    """Bytes by position."""

    def read(self, start: int, end: int) -> bytes | bytearray:
        """The bytes from `start` up to `end`."""


class PackedRecords(Sequence[Record]):
    """Records as positions in bytes instead of millions of objects. A slice is a view.

    A forked worker shares its parent's memory until either writes to it. Python writes to every object it touches, to
    count references, so with objects each worker would end up with a copy of all captions.
    """

    def __init__(self, records: Iterable[Record]):
        packed, places = bytearray(), array("q")
        for record in records:
            start = len(packed)
            packed += json.dumps(record.values()).encode()
            places.extend((start, len(packed)))
        self._content: Content = InMemory(packed)
        self._places = as_places(places)
        self._parse: Callable[[bytes | bytearray], Record] = _unpack

    @classmethod
    def at(cls, content: Content, places: np.ndarray, parse: Callable[[bytes | bytearray], Record]) -> "PackedRecords":
        """The records that `parse` makes of the bytes from start to end, `places` [N, 2], of `content`."""
        records = cls.__new__(cls)
        records._content, records._places, records._parse = content, places, parse
        return records

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return PackedRecords.at(self._content, self._places[index], self._parse)
        return self._parse(self._content.read(*self._places[index].tolist()))

    def __iter__(self):
        return (self[index] for index in range(len(self)))

    def __eq__(self, other) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"<{len(self)} records>"


def as_places(numbers: array) -> np.ndarray:
    """[N, 2], start and end of each piece, from the flat list of these numbers."""
    return np.frombuffer(numbers, dtype=np.int64).reshape(-1, 2)


def _unpack(row: bytes | bytearray) -> Record:
    return Record(*json.loads(row))


class InMemory:
    """Bytes in memory."""

    def __init__(self, content: bytes | bytearray):
        self._bytes = content

    def read(self, start: int, end: int) -> bytes | bytearray:
        return self._bytes[start:end]


class InFile:
    """The bytes of a file, read on demand. The system's cache holds them once for all processes.

    Safe for threads, and can be pickled for workers.

    Args:
        path: of a regular file.
        sha256: of its content, in hexadecimal.
        file: the open file and its `stamp` when it had that content. None opens and checks it.

    Raises:
        UserError: the file has other content, or cannot be read.
    """

    def __init__(self, path: str | os.PathLike, sha256: str, file: tuple[BinaryIO, tuple] | None = None):
        self._path, self._sha256 = os.path.abspath(path), sha256
        with self._explained():
            self._file, self._stamp = file or (open_regular(path), None)
            weakref.finalize(self, self._file.close)
            if self._stamp is None:
                self._check()

    def __reduce__(self):
        return InFile, (self._path, self._sha256)

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` up to `end`. Raises UserError when the file has changed, or can no longer be read."""
        with self._explained():
            content = os.pread(self._file.fileno(), end - start, start)
            if stamp(self._file) == self._stamp:  # checked afterwards: bytes read before a change are right
                return content
            self._check()
        return self.read(start, end)

    def _check(self) -> None:
        before, total, at = stamp(self._file), hashlib.sha256(), 0
        while chunk := os.pread(self._file.fileno(), 1 << 20, at):
            total.update(chunk)
            at += len(chunk)
        if total.hexdigest() != self._sha256 or stamp(self._file) != before:
            raise changed(self._path)
        self._stamp = before

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"The data file {self._path!r} cannot be read any more ({error.strerror}). Start the same command "
                "again when it can."
            ) from error


def stamp(file: BinaryIO) -> tuple:
    """Changes with an open file's content, and also with its name or permissions."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_ctime_ns


def changed(path: str | os.PathLike) -> UserError:
    """The error for a data file whose content has changed."""
    return UserError(
        f"The data file {os.fspath(path)!r} was changed while it was in use. Put the old one back and start the same "
        "command again, or start anew with another output."
    )
