"""ShareGPT4V's JSON: a list of {"image": path, "conversations": [question, {"value": caption}]}; and one line each."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import UserError

SHAPE = '[{"image": "a/b.jpg", "conversations": [{"value": "question"}, {"value": "caption"}]}, ...]'
LINE_SHAPE = '{"image": "a/b.jpg", "caption": "caption"}'


@dataclass(frozen=True)
class Record:
    """One image and its caption. `sample_id` seeds everything drawn for it."""

    sample_id: str
    image: str
    caption: str


class PackedRecords(Sequence[Record]):
    """Records in two arrays instead of as millions of objects.

    A worker process shares the memory of the process it was forked from until either writes to it, and Python writes to
    every object it looks at, to count references. So each worker would come to hold a copy of all captions.
    """

    def __init__(self, records: Sequence[Record]):
        rows = [json.dumps([record.sample_id, record.image, record.caption]).encode() for record in records]
        self._ends = np.cumsum([len(row) for row in rows])
        self._bytes = np.frombuffer(b"".join(rows), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]  # negative ones too, and IndexError
        start = self._ends[index - 1] if index else 0
        return Record(*json.loads(self._bytes[start : self._ends[index]].tobytes()))


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
    """What a data file holds: the usable `records` in their order, and the `bad` ones."""

    records: list[Record]
    bad: list[BadRecord]


def read_sharegpt4v(path: str | os.PathLike) -> Captions:
    """Reads a data file in ShareGPT4V's layout (`share-captioner_coco_lcs_sam_1246k_1107.json`).

    Newlines and other runs of white space in captions become one space. A record without an image path or with an
    empty caption is left out and named in `bad`.

    Raises:
        UserError: the file is missing, is not JSON, is not a list of such records, or holds no usable one.
    """
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
    except FileNotFoundError:
        raise UserError(f"Data file {os.fspath(path)!r} is not there. Give a JSON file of the shape {SHAPE}") from None
    except IsADirectoryError:
        raise UserError(f"Data file {os.fspath(path)!r} is a folder. Give the JSON file itself.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"Data file {os.fspath(path)!r} is not JSON ({error}). It must have the shape {SHAPE}"
        ) from None
    if not isinstance(entries, list):
        raise UserError(
            f"Data file {os.fspath(path)!r} holds a {type(entries).__name__}, not a list. "
            f"It must have the shape {SHAPE}"
        )
    captions = sort_out(((f"entry {index}", entry) for index, entry in enumerate(entries)), _record)
    return _require_some(captions, path, SHAPE)


def read_jsonl(path: str | os.PathLike) -> Captions:
    """Reads a data file of one JSON object a line: {"image": path, "caption": text}, or as in ShareGPT4V's layout.

    Blank lines are passed over. A line that is not JSON, or no such record, is left out and named in `bad`.

    Raises:
        UserError: the file is missing, or holds no usable line.
    """
    try:
        with open(path, "rb") as file:
            lines = ((f"line {number}", line) for number, line in enumerate(file, 1) if line.strip())
            captions = sort_out(lines, lambda line: _record(_parse(line)))
    except FileNotFoundError:
        raise UserError(
            f"Data file {os.fspath(path)!r} is not there. Give a file with lines of the shape {LINE_SHAPE}"
        ) from None
    return _require_some(captions, path, LINE_SHAPE + " in each line")


def sort_out(parts: Iterable[tuple[str, object]], read: Callable[..., Record]) -> Captions:
    """The records that `read` makes of `parts`, which are (where it stands, part).

    What `read` refuses, by ValueError("kind: detail"), is bad.
    """
    records, bad = [], []
    for where, part in parts:
        try:
            records.append(read(part))
        except ValueError as error:
            kind, _, detail = str(error).partition(": ")
            bad.append(BadRecord(where, kind, detail))
    return Captions(records, bad)


def _require_some(captions: Captions, path: str | os.PathLike, shape: str) -> Captions:
    bad = captions.bad
    if not captions.records:
        first = f" The first fault: {bad[0].where}, {bad[0].kind} ({bad[0].detail})." if bad else ""
        raise UserError(
            f"Data file {os.fspath(path)!r} has {len(bad)} entries and none is usable.{first} "
            f"It must have the shape {shape}"
        )
    return captions


def _parse(line: bytes):
    """A line of JSON. Raises ValueError("kind: detail")."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", error)  # JSONDecodeError's own words would speak of a line 1
        raise ValueError(f"bad line of JSON: {reason}, it begins {line[:40]!r}") from None


def _record(entry) -> Record:
    """One entry as a Record. Raises ValueError("kind: detail") for an entry of another shape."""
    if not isinstance(entry, dict):
        raise ValueError(f"not an object: found {type(entry).__name__}")
    image = entry.get("image")
    if not is_text(image):
        raise ValueError(f"no image path: found {image!r}")
    return Record(sample_id=image, image=image, caption=caption_of(entry, f"image {image}"))


def caption_of(entry: dict, where: str) -> str:
    """An entry's "caption", or the answer among its "conversations", with runs of white space made one space.

    Raises:
        ValueError("kind: `where`"): there is none.
    """
    caption = entry.get("caption")
    if caption is None:
        try:
            caption = entry["conversations"][1]["value"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"no caption: {where}") from None
    return fold(caption, where)


def fold(caption, where: str) -> str:
    """`caption` with runs of white space made one space. Raises ValueError("kind: `where`") unless it is text."""
    if not isinstance(caption, str) or not caption.strip():
        raise ValueError(f"empty or non-text caption: {where}")
    return " ".join(caption.split())


def utf8(content: bytes, where: str) -> str:
    """A caption file's text. Raises ValueError("kind: `where` is ...") unless it is UTF-8, with or without its mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"bad caption file: {where} is not UTF-8 ({error.reason})") from None


def is_text(value) -> bool:
    """Whether `value` is text that is not empty and can be written (JSON can name half a surrogate pair)."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= letter <= "\udfff" for letter in value)
