"""Data files: a JSON list in ShareGPT4V's layout, or JSON lines."""

import io
import json
import os
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from ..errors import UserError
from ..files import open_regular
from .bad_records import BadRecord, refused
from .captions import Captions, caption_of, check_caption, fold, is_text, short_of
from .json_list import BrokenList, NotAList, read_list
from .records import Content, InFile, InMemory, PackedRecords, Record, as_places

SHAPE = '[{"image": "a/b.jpg", "conversations": [{"value": "question"}, {"value": "caption"}]}, ...]'
LINE_SHAPE = '{"image": "a/b.jpg", "caption": "caption"}'

_IN_MEMORY = 64 << 20  # bytes: a larger data file stays on the disk
_CHUNK = 4 << 20  # bytes read at once


# (number, start, end, value or ValueError("kind: detail")) of each entry or line
Parts = Iterable[tuple[int, int, int, object]]


def read_sharegpt4v(path: str | os.PathLike) -> Captions:
    """Reads a JSON list in ShareGPT4V's layout (`share-captioner_coco_lcs_sam_1246k_1107.json`).

    Runs of white space in captions become one space. An entry is bad if it has no image path, no caption, one of more
    than 32,768 characters, or is not UTF-8.

    A large file stays on the disk. Its records are read from it when they are needed, and it must not change meanwhile.

    Raises:
        UserError: the file is missing, is not JSON, is not a list, or has no usable entry.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"Data file {str(path)!r} is a folder. Give the JSON file itself.")
    try:
        return _read(path, SHAPE, "entry", _entries)
    except BrokenList as error:
        last = f"entry {error.entries - 1} is the last whole one" if error.entries else "no entry before it is whole"
        raise UserError(
            f"Data file {str(path)!r} is not JSON ({error.reason}: line {_line(path, error.at)}, byte {error.at}; "
            f"{last}). It must have the shape {SHAPE}"
        ) from None
    except NotAList as error:
        raise UserError(
            f"Data file {str(path)!r} holds a {error}, not a list. It must have the shape {SHAPE}"
        ) from None


def read_jsonl(path: str | os.PathLike) -> Captions:
    """Reads JSON lines of {"image": path, "caption": text}, or as in ShareGPT4V's layout.

    Either may bring a "short_caption", which `train --sampling given` reads.

    Blank lines are skipped. For bad lines and large files see `read_sharegpt4v`.

    Raises:
        UserError: the file is missing, or has no usable line.
    """
    return _read(Path(path), f"{LINE_SHAPE} in each line", "line", _lines)


def _read(path: Path, shape: str, label: str, parts: Callable[[BinaryIO], Parts]) -> Captions:
    """Reads a data file: `parts` parses it, `label` names a part in messages."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            raw = None if size > _IN_MEMORY else file.read()
            content: Content = InFile(path) if raw is None else InMemory(raw)
            with tqdm(total=size, desc="reading records", unit="B", unit_scale=True, disable=raw is not None) as bar:
                places, bad = _find_records(parts(file if raw is None else io.BytesIO(raw)), label, bar)
    except FileNotFoundError:
        raise UserError(f"Data file {str(path)!r} is not there. It must have the shape {shape}") from None
    except OSError as error:
        raise UserError(
            f"Data file {str(path)!r} cannot be read ({error.strerror}). It must have the shape {shape}"
        ) from error
    if not places:
        first = f" The first fault: {bad[0]}." if bad else ""
        raise UserError(
            f"Data file {str(path)!r} has {len(bad)} entries and none is usable.{first} It must have the shape {shape}"
        )
    return Captions(PackedRecords.at(content, as_places(places), _record_at), bad)


def _find_records(parts: Parts, label: str, bar: tqdm) -> tuple[array, list[BadRecord]]:
    """Start and end of each usable record, one after the other, and the bad records."""
    places, bad = array("q"), []
    for number, start, end, value in parts:
        try:
            if isinstance(value, ValueError):
                raise value
            _fields(value)
            places.extend((start, end))
        except ValueError as error:
            bad.append(refused(f"{label} {number}", error))
        bar.update(end - bar.n)
    return places, bad


def _entries(file: BinaryIO) -> Parts:
    for number, (start, end, value) in enumerate(read_list(file)):
        yield number, start, end, ValueError(f"bad entry of JSON: {value}") if isinstance(value, ValueError) else value


def _lines(file: BinaryIO) -> Parts:
    end = 0
    for number, line in enumerate(file, 1):
        start, end = end, end + len(line)
        if line.strip():
            try:
                value = _parse(line)
            except ValueError as error:
                value = error
            yield number, start, end, value


def _line(path: Path, at: int) -> int:
    """The number, from 1, of the line that byte `at` is in."""
    with open_regular(path) as file:
        chunks = iter(lambda: file.read(min(_CHUNK, at - file.tell())), b"")
        return 1 + sum(chunk.count(b"\n") for chunk in chunks)


def _parse(line: bytes | bytearray):
    """A line of JSON. Raises ValueError("kind: detail")."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", error)  # JSONDecodeError's text would name a line 1
        raise ValueError(f"bad line of JSON: {reason}, it begins {line[:40]!r}") from None


def _record_at(raw: bytes | bytearray) -> Record:
    """The record of a usable entry or line."""
    entry = _parse(raw)
    image, caption = _fields(entry)
    return Record(sample_id=image, image=image, caption=fold(caption), short=short_of(entry))


def _fields(entry) -> tuple[str, str]:
    """(image, caption before folding) of an entry. Raises ValueError("kind: detail") if it has another shape."""
    if not isinstance(entry, dict):
        raise ValueError(f"not an object: found {type(entry).__name__}")
    image = entry.get("image")
    if not is_text(image):
        raise ValueError(f"no image path: found {image!r}")
    where = f"image {image}"
    caption = caption_of(entry, where)
    check_caption(caption, where)
    return image, caption
