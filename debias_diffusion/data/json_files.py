"""Data files: a JSON list in ShareGPT4V's layout, or JSON lines."""

import json
import os
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from ..errors import explain_failure
from ..files import open_regular, read_file
from .bad_records import BadRecord, leave_out
from .captions import Captions, caption_of, check_object, fold, is_text, parse_object, short_of, usable_captions
from .records import InFile, PackedRecords, Record

SHAPE = '[{"image": "a/b.jpg", "conversations": [{"value": "question"}, {"value": "caption"}]}, ...]'
LINE_SHAPE = '{"image": "a/b.jpg", "caption": "caption"}'

_IN_MEMORY = 64 << 20  # bytes: a larger data file stays on the disk
_CHUNK = 4 << 20  # bytes read at once
_DECODER = json.JSONDecoder(strict=False)  # control characters in strings are allowed
_OPENING = re.compile(r"(?:\xef\xbb\xbf)?[ \t\n\r]*\[")  # after the mark of UTF-8, if there is one
_SPACE, _COMMA, _CLOSING = (re.compile(rf"[ \t\n\r]*{mark}") for mark in ("", r",[ \t\n\r]*", r"\]"))

# (where, start, end, value or its bytes) of each entry or line; positions are in bytes
Entries = Iterator[tuple[str, int, int, object]]


def read_data_file(path: str | os.PathLike) -> Captions:
    """Reads a JSON list in ShareGPT4V's layout (`share-captioner_coco_lcs_sam_1246k_1107.json`), or JSON lines.

    Lines, of a file that ends in .jsonl, are {"image": path, "caption": text} or as in ShareGPT4V's layout; blank ones
    are skipped. Either may bring a "short_caption", which `train --sampling given` reads. The names of the hub's
    metadata.jsonl, {"file_name": path, "text": text}, are read, too.

    Runs of white space in captions become one space. An entry is bad if it has no image path, no caption that
    `check_caption` accepts, or is not UTF-8.

    A large file stays on the disk. Its records are read from it when they are needed, and it must not change meanwhile.

    Raises:
        OSError: the file cannot be read.
        UserError: it is no JSON list, or has no usable entry.
    """
    path, places = Path(path), array("q")
    bad: list[BadRecord] = []
    is_lines = path.suffix.lower() == ".jsonl"
    shape = f"It must have the shape {f'{LINE_SHAPE} in each line' if is_lines else SHAPE}"
    with open_regular(path) as file, explain_failure(f"Data file {str(path)!r} is not a JSON list", shape):
        size = os.fstat(file.fileno()).st_size
        is_large = size > _IN_MEMORY
        with tqdm(total=size, desc="reading records", unit="B", unit_scale=True, disable=not is_large) as bar:
            for where, start, end, value in (_lines if is_lines else read_entries)(file):
                with leave_out(where, bad):
                    _image_and_caption(parse_object(value) if isinstance(value, bytes) else check_object(value))
                    places.extend((start, end))
                bar.update(end - bar.n)
    content = InFile(path) if is_large else read_file(path)
    return usable_captions(f"Data file {str(path)!r}", PackedRecords(content, places, _record_at), bad, shape)


def read_entries(file: BinaryIO) -> Entries:
    """The entries of a JSON list.

    The file is read as Latin-1: each byte is one character, so positions are bytes, and a byte that is not UTF-8
    affects only its own entry. An entry that is not ASCII is given by its bytes, to be decoded as UTF-8.

    Raises:
        ValueError: the file is not a JSON list; says where.
    """
    text, base, separator = file.read(_CHUNK).decode("latin-1"), 0, _SPACE
    if not (opening := _OPENING.match(text)):
        raise ValueError(f"it begins with {text[:20]!r}")
    at, number = opening.end(), 0
    while not (closing := _CLOSING.match(text, at)):
        fault, value, start, end = None, None, at, at
        try:
            if not (separated := separator.match(text, at)):
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            start = separated.end()
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:  # broken, or cut by the chunk
            place = f"byte {base + getattr(error, 'pos', start)}, after {number} whole entries"
            fault = ValueError(f"{getattr(error, 'msg', error)}: {place}")
        is_cut = fault or end + len("e+1") > len(text)  # a number may go on
        if is_cut and (more := file.read(max(_CHUNK, len(text) - at))):
            base, text, at = base + at, text[at:] + more.decode("latin-1"), 0
            continue
        if fault:
            raise fault
        entry = text[start:end]
        yield f"entry {number}", base + start, base + end, value if entry.isascii() else entry.encode("latin-1")
        at, separator, number = end, _COMMA, number + 1
    if (text[closing.end() :] + file.read().decode("latin-1")).strip(" \t\n\r"):
        raise ValueError(f"Extra data: byte {base + closing.end()}, after {number} whole entries")


def _lines(file: BinaryIO) -> Entries:
    end = 0
    for number, line in enumerate(file, 1):
        start, end = end, end + len(line)
        if line.strip():
            yield f"line {number}", start, end, line


def _record_at(raw: bytes | bytearray) -> Record:
    """The record of a usable entry or line."""
    entry = parse_object(raw)
    image, caption = _image_and_caption(entry)
    return Record(sample_id=image, image=image, caption=fold(caption), short=short_of(entry))


def _image_and_caption(entry: dict) -> tuple[str, str]:
    """(image, caption before folding) of an entry. Raises ValueError("kind: detail") for one that cannot be used."""
    if "file_name" in entry:  # as the hub has it
        entry = {"image": entry["file_name"], "caption": entry.get("text")} | entry
    image = entry.get("image")
    if not is_text(image):
        raise ValueError(f"no image path: found {image!r}")
    return image, caption_of(entry, f"image {image}")
