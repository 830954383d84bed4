"""Captions in entries and files: where they are, and which ones can be used."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..errors import UserError
from .bad_records import BadRecord
from .records import Record

LARGEST_FILE = 1 << 20  # bytes of a caption's file
LONGEST_CAPTION = 32_768  # characters: thirty times the average; sampling from it takes at most about 0.1 s
LONGEST_PROMPT = 20_000  # characters: some 4,500 tokens, far more than one image can show
# Control characters but white space, as UTF-8. Those from U+0080 on may stay: ftfy reads them as Windows-1252.
_CONTROLS = bytes([*range(9), *range(14, 28), 127])
_ANSWERS, _QUESTIONS = ("gpt", "assistant"), ("human", "user", "system")
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True)
class Captions:
    """The usable `records` of a data set in order, and its `bad` ones."""

    records: Sequence[Record]
    bad: list[BadRecord]


def usable_captions(name: str, records: Sequence[Record], bad: list[BadRecord], advice: str) -> Captions:
    """What was read of `name`. Raises UserError, with the first bad record and `advice`, if no record is usable."""
    if not records:
        first = f" The first fault: {bad[0]}." if bad else ""
        raise UserError(f"{name} has no usable record, and {len(bad)} bad ones.{first} {advice}")
    return Captions(records, bad)


def parse_object(content: str | bytes | bytearray) -> dict:
    """The JSON object in a text; control characters in strings are allowed. Raises ValueError("kind: detail")."""
    try:
        value = _DECODER.decode(content if isinstance(content, str) else content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError's text would name a line 1
        raise ValueError(f"bad JSON: {getattr(error, 'msg', error)}, it begins {content[:40]!r}") from None
    return check_object(value)


def check_object(value) -> dict:
    """`value`, which must be a JSON object. Raises ValueError("kind: detail")."""
    if not isinstance(value, dict):
        raise ValueError(f"not an object: found {type(value).__name__}")
    return value


def caption_of(entry: dict, where: str) -> str:
    """The caption of an entry, or the answer in its conversations, not folded. Raises ValueError("kind: `where`")."""
    caption = answer_of(entry) if entry.get("caption") is None else entry["caption"]
    if caption is None:
        found = ", ".join(str(name) for name, value in entry.items() if value is not None)
        raise ValueError(f"no caption: {where} has only {found[:200]}")
    return check_caption(caption, where)


def short_of(entry: dict) -> str | None:
    """The "short_caption" of an entry, folded; None where there is none that can be used."""
    with suppress(ValueError):
        return fold(check_caption(entry.get("short_caption"), ""))


def answer_of(entry: dict):
    """The second turn of an entry's "conversations", or, if turns have roles, the first of "gpt" or "assistant".

    None where there is none.
    """
    with suppress(LookupError, TypeError):
        turns = entry["conversations"]
        if len(turns) > 1 and _role(turns[1]) in _ANSWERS:
            return turns[1]["value"]
        answers = [turn for turn in turns if _role(turn) in _ANSWERS]
        if answers or _role(turns[1]) not in _QUESTIONS:
            return (answers[0] if answers else turns[1])["value"]


def _role(turn) -> str | None:
    role = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
    return role.lower() if isinstance(role, str) else None


def check_caption(caption, where: str) -> str:
    """`caption`, by the one rule of what may be trained on, and what `synthesize` keeps.

    Raises:
        ValueError("kind: `where`"): `caption` is not text, empty, absurdly long, or holds a control character that is
            no white space, or half a surrogate pair, which JSON can hold and UTF-8 cannot.
    """
    if not isinstance(caption, str) or not caption.strip():
        raise ValueError(f"empty or non-text caption: {where}")
    try:
        content = caption.encode()
    except UnicodeEncodeError:
        raise ValueError(f"half a surrogate pair in a caption: {where}") from None
    if len(content.translate(None, _CONTROLS)) < len(content):  # six times as fast as a regular expression
        raise ValueError(f"control character in a caption: {where}")
    if len(caption) > LONGEST_CAPTION and (length := len(fold(caption))) > LONGEST_CAPTION:
        raise ValueError(f"absurdly long caption: {where}: {length} characters, at most {LONGEST_CAPTION} are read")
    return caption


def fold(caption: str) -> str:
    """`caption` with each run of white space replaced by one space."""
    return " ".join(caption.split())


def utf8(content: bytes, where: str) -> str:
    """The text of a caption file of at most `LARGEST_FILE` bytes. Raises ValueError("kind: `where` ...")."""
    if len(content) > LARGEST_FILE:
        raise ValueError(f"absurdly large caption: {where} has more than {LARGEST_FILE} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"bad caption file: {where} is not UTF-8 ({error.reason})") from None


def is_text(value) -> bool:
    """Whether `value` is a non-empty string that UTF-8 can encode. JSON can hold half a surrogate pair."""
    try:
        return isinstance(value, str) and value.encode() != b""
    except UnicodeEncodeError:
        return False


def text_fault(text: str) -> str | None:
    """Why a prompt cannot be read, in words that follow its name; None if it can, also if it is empty."""
    if len(text) > LONGEST_PROMPT:
        return f"has {len(text):,} characters; at most {LONGEST_PROMPT:,} are read. Shorten it"
    found = re.search("[\0\ud800-\udfff]", text)  # NUL, as in UTF-16 that is read as UTF-8, or half a surrogate pair
    return f"holds {found[0]!r}, which is no character. Write it as UTF-8" if found else None
