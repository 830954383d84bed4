"""Where the records of a large data file lie in it, kept on the disk, so that the file is parsed once."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..files import open_regular, whole_file

_RULES = ("captions.py", "json_list.py", "sharegpt4v.py")  # the code that decides which records can be used


class RecordIndex(NamedTuple):
    """
    Attributes:
        sha256: of the data file, in hexadecimal.
        label: what its parts are called, "entry" or "line".
        places: [N, 2], where each usable record starts and ends.
        bad: (where, kind, detail) of the others.
    """

    sha256: str
    label: str
    places: np.ndarray
    bad: list[tuple[str, str, str]]


def load_index(path: Path) -> RecordIndex | None:
    """What `save_index` has written; None where there is none, or it is damaged, or other code has made it."""
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
    """Keeps the index. A disk that is full or may not be written to is no error: the file is parsed again next time."""
    fields = {"rules": _rules(), "sha256": index.sha256, "label": index.label, "bad": index.bad}
    content = json.dumps(fields).encode() + b"\n" + index.places.astype("<i8").tobytes()
    try:
        with whole_file(path) as temporary:
            temporary.write_bytes(hashlib.sha256(content).digest() + content)
    except OSError:
        pass


def _rules() -> str:
    """Changes with the code, so that no index outlives a change of what a usable record is."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in _RULES)).hexdigest()
