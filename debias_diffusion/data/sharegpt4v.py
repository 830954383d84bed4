"""Data files: a JSON list in ShareGPT4V's layout, or JSON lines."""

import hashlib
import io
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from ..errors import UserError
from ..files import bytes_digest, open_regular
from .bad_records import BadRecord, refused
from .captions import Captions, caption_of, check_caption, fold, is_text, short_of
from .json_list import BrokenList, NotAList, read_list
from .record_index import RecordIndex, load_index, save_index
from .records import InFile, InMemory, PackedRecords, Record, as_places, changed, stamp

SHAPE = '[{"image": "a/b.jpg", "conversations": [{"value": "question"}, {"value": "caption"}]}, ...]'
LINE_SHAPE = '{"image": "a/b.jpg", "caption": "caption"}'
INDEX = "records-index"  # file in a cache folder

_IN_MEMORY = 64 << 20  # bytes: a larger data file stays on the disk
_CHUNK = 4 << 20  # bytes read at once


# (number, start, end, value or ValueError("kind: detail")) of each entry or line
Parts = Iterable[tuple[int, int, int, object]]


def read_sharegpt4v(path: str | os.PathLike, cache: str | os.PathLike | None = None) -> Captions:
    """Reads a JSON list in ShareGPT4V's layout (`share-captioner_coco_lcs_sam_1246k_1107.json`).

    Runs of white space in captions become one space. An entry is bad if it has no image path, no caption, one of more
    than 32,768 characters, or is not UTF-8.

    A large file stays on the disk. Its records are read from it when they are needed, and it must not change meanwhile.

    Args:
        cache: folder that keeps the records' places in a large file, so that it is parsed once.

    Raises:
        UserError: the file is missing, is not JSON, is not a list, or has no usable entry.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"Data file {str(path)!r} is a folder. Give the JSON file itself.")
    try:
        return _read(path, SHAPE, "entry", _entries, cache)
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


def read_jsonl(path: str | os.PathLike, cache: str | os.PathLike | None = None) -> Captions:
    """Reads JSON lines of {"image": path, "caption": text}, or as in ShareGPT4V's layout.

    Either may bring a "short_caption", which `train --sampling given` reads.

    Blank lines are skipped. For bad lines, large files and `cache` see `read_sharegpt4v`.

    Raises:
        UserError: the file is missing, or has no usable line.
    """
    return _read(Path(path), f"{LINE_SHAPE} in each line", "line", _lines, cache)


def _read(
    path: Path, shape: str, label: str, parts: Callable[[BinaryIO], Parts], cache: str | os.PathLike | None
) -> Captions:
    """Reads a data file: `parts` parses it, `label` names a part in messages."""
    try:
        with ExitStack() as opened:
            file = opened.enter_context(open_regular(path))
            before, size = stamp(file), os.fstat(file.fileno()).st_size
            if size > _IN_MEMORY:
                index = _kept_index(file, size, label, parts, cache)
                if stamp(file) != before:
                    raise changed(path)
                content = InFile(path, index.sha256, (file, before))
                opened.pop_all()  # stays open as long as its records are in use
            else:
                raw = file.read()
                content, index = InMemory(raw), _make_index(io.BytesIO(raw), size, label, parts)
    except FileNotFoundError:
        raise UserError(f"Data file {str(path)!r} is not there. It must have the shape {shape}") from None
    except OSError as error:
        raise UserError(
            f"Data file {str(path)!r} cannot be read ({error.strerror}). It must have the shape {shape}"
        ) from error
    bad = [BadRecord(*fault) for fault in index.bad]
    if not len(index.places):
        first = f" The first fault: {bad[0]}." if bad else ""
        raise UserError(
            f"Data file {str(path)!r} has {len(bad)} entries and none is usable.{first} It must have the shape {shape}"
        )
    return Captions(PackedRecords.at(content, index.places, _record_at), bad, index.sha256)


def _kept_index(
    file: BinaryIO, size: int, label: str, parts: Callable[[BinaryIO], Parts], cache: str | os.PathLike | None
) -> RecordIndex:
    """The cached index, if the file's content is the same; else a new one, which is written to the cache."""
    cached = load_index(Path(cache, INDEX)) if cache else None
    if cached is not None and cached.label == label:
        if bytes_digest(iter(lambda: file.read(_CHUNK), b"")) == cached.sha256:
            return cached
        file.seek(0)
    index = _make_index(file, size, label, parts)
    if cache:
        save_index(Path(cache, INDEX), index)
    return index


def _make_index(file: BinaryIO, size: int, label: str, parts: Callable[[BinaryIO], Parts]) -> RecordIndex:
    places, bad = array("q"), []
    with _hashed(file, size) as (reader, sha256):
        for number, start, end, value in parts(reader):
            try:
                if isinstance(value, ValueError):
                    raise value
                _fields(value)
                places.extend((start, end))
            except ValueError as error:
                bad.append(astuple(refused(f"{label} {number}", error)))
        return RecordIndex(sha256(), label, as_places(places), bad)


@contextmanager
def _hashed(file: BinaryIO, size: int) -> Iterator[tuple[BinaryIO, Callable[[], str]]]:
    """Gives (reader of `file`, function that returns the sha256 of the bytes read so far), with a bar if it is large.

    Hashing runs in a thread and releases Python's lock, so it costs no time if there is a second core.
    """
    bar = tqdm(total=size, desc="reading records", unit="B", unit_scale=True, disable=size <= _IN_MEMORY)
    with ThreadPoolExecutor(1) as thread, bar:
        reader = _Hashed(file, thread, bar)
        yield io.BufferedReader(reader, _CHUNK), reader.sha256


class _Hashed(io.RawIOBase):
    def __init__(self, file: BinaryIO, thread: ThreadPoolExecutor, bar: tqdm):
        self._file, self._thread, self._bar = file, thread, bar
        self._total = hashlib.sha256()
        self._last = thread.submit(self._total.update, b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self._file.readinto(buffer)
        self._last.result()  # at most one chunk waits
        self._last = self._thread.submit(self._total.update, bytes(memoryview(buffer)[:count]))
        self._bar.update(count)
        return count

    def sha256(self) -> str:
        self._last.result()
        return self._total.hexdigest()


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
