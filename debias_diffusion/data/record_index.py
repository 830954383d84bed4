"""On-disk index of a large data file: the position of each record, so that the file is parsed once."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..files import atomic_file, bytes_digest, open_regular

_RULES = ("captions.py", "json_list.py", "sharegpt4v.py")  # the code that decides which records can be used


class RecordIndex(NamedTuple):
    """
    Attributes:
        sha256: of the data file, in hexadecimal.
        label: "entry" or "line".
        places: [N, 2], start and end of each usable record, in bytes.
        bad: (where, kind, detail) of each bad record.
    """

    sha256: str
    label: str
    places: np.ndarray
    bad: list[tuple[str, str, str]]


def load_index(path: Path) -> RecordIndex | None:
    """The index that `save_index` wrote; None if it is missing, damaged, or made by other code."""
    try:
        with open_regular(path) as file:
            digest, content = file.read(32), file.read()
    except OSError:
        return None
    if hashlib.sha256(content).digest() != digest:
        return None
    head, _, places = content.partition(b"\n")
    fields = json.loads(head)
    if fields.pop("rules") != _rules():
        return None
    return RecordIndex(places=np.frombuffer(places, dtype="<i8").reshape(-1, 2), **fields)


def save_index(path: Path, index: RecordIndex) -> None:
    """Writes the index. A full or read-only disk is no error: the data file is parsed again next time."""
    fields = {"rules": _rules(), "sha256": index.sha256, "label": index.label, "bad": index.bad}
    content = json.dumps(fields).encode() + b"\n" + index.places.astype("<i8").tobytes()
    try:
        with atomic_file(path) as temporary:
            temporary.write_bytes(hashlib.sha256(content).digest() + content)
    except OSError:
        pass


def _rules() -> str:
    """A digest of the code, so that an index is not used after the rules for usable records have changed."""
    return bytes_digest(Path(__file__).with_name(name).read_bytes() for name in _RULES)
