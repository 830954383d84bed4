"""Records that stay bytes, in memory or in a file, until they are read."""

import json
import os
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import eq

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
    """

    def __init__(self, records: Iterable[Record]):
        packed, places = bytearray(), array("q")
        for record in records:
            start = len(packed)
            packed += json.dumps([*vars(record).values()]).encode()
            places.extend((start, len(packed)))
        self._content: Content = packed
        self._places = as_places(places)
        self._parse: Callable[[bytes | bytearray], Record] = _unpack

    @classmethod
    def at(
        cls, content: "Content", places: np.ndarray, parse: Callable[[bytes | bytearray], Record]
    ) -> "PackedRecords":
        """The records that `parse` makes of the bytes from start to end, `places` [N, 2], of `content`."""
        records = cls.__new__(cls)
        records._content, records._places, records._parse = content, places, parse
        return records

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index):
        if isinstance(index, slice | np.ndarray):
            return PackedRecords.at(self._content, self._places[index], self._parse)
        return self._parse(self._content[slice(*self._places[index].tolist())])

    def __eq__(self, other) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    def __repr__(self) -> str:
        return f"<{len(self)} records>"


def as_places(numbers: array) -> np.ndarray:
    """[N, 2], start and end of each piece, from the flat list of these numbers."""
    return np.frombuffer(numbers, dtype=np.int64).reshape(-1, 2)


def _unpack(row: bytes | bytearray) -> Record:
    return Record(*json.loads(row))


class InFile:
    """The bytes of a file, which a slice reads. The system's cache holds them once for all processes.

    Safe for threads, and can be pickled for workers. The file must not change.
    """

    def __init__(self, path: str | os.PathLike):
        self._path, self._file = os.path.abspath(path), open_regular(path)
        weakref.finalize(self, self._file.close)

    def __reduce__(self):
        return InFile, (self._path,)

    def __getitem__(self, part: slice) -> bytes:
        return os.pread(self._file.fileno(), part.stop - part.start, part.start)


Content = bytes | bytearray | InFile
