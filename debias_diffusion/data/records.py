"""Records that stay bytes, in memory or in a file, until they are read."""

import json
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..files import open_regular


@dataclass(frozen=True)
class Record:
    """One image and its caption, and a short caption where the data bring one. `sample_id` seeds all that is drawn."""

    sample_id: str
    image: str
    caption: str
    short: str | None = None


class PackedRecords(Sequence[Record]):
    """Records as positions in bytes instead of millions of objects. A slice, and an array of numbers, is a view.

    A forked worker shares its parent's memory until either writes to it. Python writes to every object it touches, to
    count references, so with objects each worker would end up with a copy of all captions.

    Args:
        content: bytes that `parse` makes a record of, from each start to its end.
        places: [N, 2] starts and ends, or the flat list of these numbers.
    """

    def __init__(self, content: "Content", places: np.ndarray | array, parse: Callable[[bytes | bytearray], Record]):
        self._content, self._parse = content, parse
        self._places = np.asarray(places, dtype=np.int64).reshape(-1, 2)

    @classmethod
    def pack(cls, records: Iterable[Record]) -> "PackedRecords":
        """Records that are kept in memory."""
        packed, places = bytearray(), array("q")
        for record in records:
            places.append(len(packed))
            packed += as_row(record)
            places.append(len(packed))
        return cls(packed, places, _unpack)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index):
        if isinstance(index, slice | np.ndarray):
            return PackedRecords(self._content, self._places[index], self._parse)
        return self._parse(self._content[slice(*self._places[index].tolist())])


def as_row(record: Any) -> bytes:
    """A line of JSON with the values of a record, good or bad."""
    return json.dumps([*vars(record).values()]).encode() + b"\n"


def _unpack(row: bytes | bytearray) -> Record:
    return Record(*json.loads(row))


class InFile:
    """The bytes of a file, which a slice reads. The system's cache holds them once for all processes.

    Safe for threads and workers: each read opens the file, because an open one has one position. It must not change.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = os.path.abspath(path)

    def __getitem__(self, part: slice) -> bytes:
        with open_regular(self._path) as file:
            file.seek(part.start)
            return file.read(part.stop - part.start)


Content = bytes | bytearray | InFile
