"""ShareGPT4V's JSON: a list of {"image": path, "conversations": [question, {"value": caption}]}; and one line each."""

import hashlib
import io
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from ..errors import UserError
from ..files import open_regular
from .json_list import BrokenList, NotAList, read_list
from .record_index import RecordIndex, load_index, save_index
from .records import InFile, InMemory, PackedRecords, Record, as_places, changed, stamp

SHAPE = '[{"image": "a/b.jpg", "conversations": [{"value": "question"}, {"value": "caption"}]}, ...]'
LINE_SHAPE = '{"image": "a/b.jpg", "caption": "caption"}'
LONGEST_CAPTION = 32_768  # characters: thirty times the average; drawing from it takes at most about 0.1 s
INDEX = "records-index"  # the file in a cache folder

_IN_MEMORY = 64 << 20  # bytes: a larger data file stays on the disk
_PIECE = 4 << 20  # bytes read at once
_ANSWERS, _QUESTIONS = ("gpt", "assistant"), ("human", "user", "system")


@dataclass(frozen=True)
class BadRecord:
    """A record that was left out: where it stands, which kind of fault, and what was found."""

    where: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{printable(self.where)}: {self.kind} ({printable(self.detail)})"


def printable(text: str) -> str:
    """Text from data, without what would move a terminal's cursor or change its colours."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


@dataclass(frozen=True)
class Captions:
    """What data hold: the usable `records` in their order, and the `bad` ones; `sha256` of the file they came from."""

    records: Sequence[Record]
    bad: list[BadRecord]
    sha256: str | None = field(default=None, compare=False)


# (number, start, end, value or ValueError("kind: detail")) of each entry or line
Parts = Iterable[tuple[int, int, int, object]]


def read_sharegpt4v(path: str | os.PathLike, cache: str | os.PathLike | None = None) -> Captions:
    """Reads a data file in ShareGPT4V's layout (`share-captioner_coco_lcs_sam_1246k_1107.json`).

    Newlines and other runs of white space in captions become one space. A record without an image path, with an empty
    caption or with one of more than 32,768 characters is left out and named in `bad`; so is one that is not UTF-8.

    A large file stays on the disk and is read where a record is asked for, from then on only as long as it does not
    change; `cache` is a folder that keeps where its records lie, so that it need not be parsed again.

    Raises:
        UserError: the file is missing, is not JSON, is not a list of such records, or holds no usable one.
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
    """Reads a data file of one JSON object a line: {"image": path, "caption": text}, or as in ShareGPT4V's layout.

    Blank lines are passed over. A line that is not JSON, or no such record, is left out and named in `bad`. For large
    files and `cache` see `read_sharegpt4v`.

    Raises:
        UserError: the file is missing, or holds no usable line.
    """
    return _read(Path(path), f"{LINE_SHAPE} in each line", "line", _lines, cache)


def _read(
    path: Path, shape: str, label: str, parts: Callable[[BinaryIO], Parts], cache: str | os.PathLike | None
) -> Captions:
    """Reads a data file; `parts` parses it, and `label` is what its parts are called."""
    try:
        file = open_regular(path)
        before, size = stamp(file), os.fstat(file.fileno()).st_size
        if size > _IN_MEMORY:
            index = _kept_index(file, size, label, parts, cache)
            if stamp(file) != before:
                raise changed(path)
            content = InFile(path, index.sha256, (file, before))
        else:
            with file:
                raw = file.read()
            content, index = InMemory(raw), _make_index(io.BytesIO(raw), size, label, parts)
    except FileNotFoundError:
        raise UserError(f"Data file {str(path)!r} is not there. It must have the shape {shape}") from None
    except OSError as error:
        raise UserError(
            f"Data file {str(path)!r} cannot be read ({error.strerror}). It must have the shape {shape}"
        ) from error
    bad = [BadRecord(*fault) for fault in index.bad]
    captions = Captions(PackedRecords.at(content, index.places, _record_at), bad, index.sha256)
    return _require_some(captions, path, shape)


def _kept_index(
    file: BinaryIO, size: int, label: str, parts: Callable[[BinaryIO], Parts], cache: str | os.PathLike | None
) -> RecordIndex:
    """The index from the cache, if it is of this very content; else a new one, which is kept there."""
    known = load_index(Path(cache, INDEX)) if cache else None
    if known is not None and known.label == label:
        total = hashlib.sha256()
        while chunk := file.read(_PIECE):
            total.update(chunk)
        if total.hexdigest() == known.sha256:
            return known
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
                kind, _, detail = str(error).partition(": ")
                bad.append((f"{label} {number}", kind, detail))
        return RecordIndex(sha256(), label, as_places(places), bad)


@contextmanager
def _hashed(file: BinaryIO, size: int) -> Iterator[tuple[BinaryIO, Callable[[], str]]]:
    """(what reads the file, the sha256 of all that it has read), with a bar for a large one.

    Hashing lets go of Python's lock, so that it costs no time where there is a second core.
    """
    bar = tqdm(total=size, desc="reading records", unit="B", unit_scale=True, disable=size <= _IN_MEMORY)
    with ThreadPoolExecutor(1) as thread, bar:
        reader = _Hashed(file, thread, bar)
        yield io.BufferedReader(reader, _PIECE), reader.sha256


class _Hashed(io.RawIOBase):
    def __init__(self, file: BinaryIO, thread: ThreadPoolExecutor, bar: tqdm):
        self._file, self._thread, self._bar = file, thread, bar
        self._total = hashlib.sha256()
        self._last = thread.submit(self._total.update, b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self._file.readinto(buffer)
        self._last.result()  # no more than one piece waits
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
    """The number, from 1, of the line in which a byte lies."""
    with open_regular(path) as file:
        pieces = iter(lambda: file.read(min(_PIECE, at - file.tell())), b"")
        return 1 + sum(piece.count(b"\n") for piece in pieces)


def sort_out(
    parts: Iterable[tuple[str, object]], read: Callable[..., Record], collect: Callable[[Iterable], Sequence] = list
) -> Captions:
    """The records that `read` makes of `parts`, which are (where it stands, part), as `collect` keeps them.

    What `read` refuses, by ValueError("kind: detail"), is bad.
    """
    bad = []

    def good() -> Iterator[Record]:
        for where, part in parts:
            try:
                record = read(part)
            except ValueError as error:
                kind, _, detail = str(error).partition(": ")
                bad.append(BadRecord(where, kind, detail))
            else:
                yield record

    return Captions(collect(good()), bad)


def _require_some(captions: Captions, path: Path, shape: str) -> Captions:
    bad = captions.bad
    if not captions.records:
        first = f" The first fault: {bad[0].where}, {bad[0].kind} ({bad[0].detail})." if bad else ""
        raise UserError(
            f"Data file {str(path)!r} has {len(bad)} entries and none is usable.{first} It must have the shape {shape}"
        )
    return captions


def _parse(line: bytes | bytearray):
    """A line of JSON. Raises ValueError("kind: detail")."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", error)  # JSONDecodeError's own words would speak of a line 1
        raise ValueError(f"bad line of JSON: {reason}, it begins {line[:40]!r}") from None


def _record_at(raw: bytes | bytearray) -> Record:
    """The record of an entry or line that can be used."""
    image, caption = _fields(_parse(raw))
    return Record(sample_id=image, image=image, caption=fold(caption))


def _fields(entry) -> tuple[str, str]:
    """(image, caption as it stands there) of one entry. Raises ValueError("kind: detail") for one of another shape."""
    if not isinstance(entry, dict):
        raise ValueError(f"not an object: found {type(entry).__name__}")
    image = entry.get("image")
    if not is_text(image):
        raise ValueError(f"no image path: found {image!r}")
    where = f"image {image}"
    caption = caption_of(entry, where)
    check_caption(caption, where)
    return image, caption


def caption_of(entry: dict, where: str):
    """An entry's "caption", or the answer among its "conversations".

    Raises:
        ValueError("kind: `where`"): there is none.
    """
    caption = entry.get("caption")
    if caption is None:
        try:
            caption = answer_of(entry)
        except (LookupError, TypeError):
            raise ValueError(f"no caption: {where}") from None
    return caption


def answer_of(entry: dict):
    """The second turn of an entry's "conversations"; the first of "gpt" or "assistant", where roles say so.

    Raises:
        LookupError, TypeError: there is none.
    """
    turns = entry["conversations"]
    if len(turns) > 1 and _role(turns[1]) in _ANSWERS:
        return turns[1]["value"]
    roles = [_role(turn) for turn in turns]
    answers = [turn for turn, role in zip(turns, roles, strict=True) if role in _ANSWERS]
    if not answers and roles[1] in _QUESTIONS:
        raise LookupError("no turn is an answer")
    return (answers[0] if answers else turns[1])["value"]


def _role(turn) -> str | None:
    role = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
    return role.lower() if isinstance(role, str) else None


def check_caption(caption, where: str) -> None:
    """Raises ValueError("kind: `where`") unless `caption` is text, not empty and not absurdly long."""
    if not isinstance(caption, str) or not caption.strip():
        raise ValueError(f"empty or non-text caption: {where}")
    if len(caption) > LONGEST_CAPTION and (length := len(fold(caption))) > LONGEST_CAPTION:
        raise ValueError(f"absurdly long caption: {where}: {length} characters, at most {LONGEST_CAPTION} are read")


def fold(caption: str) -> str:
    """`caption` with runs of white space made one space."""
    return " ".join(caption.split())


def folded(caption, where: str) -> str:
    """`caption` with runs of white space made one space. Raises as `check_caption`."""
    check_caption(caption, where)
    return fold(caption)


def utf8(content: bytes, where: str) -> str:
    """A caption file's text. Raises ValueError("kind: `where` is ...") unless it is UTF-8, with or without its mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"bad caption file: {where} is not UTF-8 ({error.reason})") from None


def is_text(value) -> bool:
    """Whether `value` is text that is not empty and can be written (JSON can name half a surrogate pair)."""
    return isinstance(value, str) and value != "" and (value.isascii() or _can_be_written(value))


def _can_be_written(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False
