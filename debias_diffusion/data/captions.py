"""Captions in entries and files: where they are, and which ones can be used."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .bad_records import BadRecord, refused
from .records import Record

LONGEST_CAPTION = 32_768  # characters: thirty times the average; sampling from it takes at most about 0.1 s
_ANSWERS, _QUESTIONS = ("gpt", "assistant"), ("human", "user", "system")


@dataclass(frozen=True)
class Captions:
    """The usable `records` of a data set in order, and its `bad` ones."""

    records: Sequence[Record]
    bad: list[BadRecord]


def sort_out(
    parts: Iterable[tuple[str, object]], read: Callable[..., Record], collect: Callable[[Iterable], Sequence] = list
) -> Captions:
    """Reads each of `parts`, (where it is, part), as a record. Parts that `read` refuses are bad records.

    Args:
        read: raises ValueError("kind: detail") for a part that cannot be used.
        collect: makes the sequence of records.
    """
    bad = []

    def good() -> Iterator[Record]:
        for where, part in parts:
            try:
                record = read(part)
            except ValueError as error:
                bad.append(refused(where, error))
            else:
                yield record

    return Captions(collect(good()), bad)


def caption_of(entry: dict, where: str):
    """The "caption" of an entry, or the answer in its "conversations".

    Raises:
        ValueError("kind: `where`"): the entry has neither.
    """
    caption = entry.get("caption")
    if caption is None:
        try:
            caption = answer_of(entry)
        except (LookupError, TypeError):
            raise ValueError(f"no caption: {where}") from None
    return caption


def short_of(entry: dict) -> str | None:
    """The "short_caption" of an entry, folded; None where there is none that can be used."""
    short = entry.get("short_caption")
    if not is_text(short) or len(short) > LONGEST_CAPTION:
        return None
    return fold(short) or None


def answer_of(entry: dict):
    """The second turn of an entry's "conversations", or, if turns have roles, the first of "gpt" or "assistant".

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
    """`caption` with each run of white space replaced by one space."""
    return " ".join(caption.split())


def folded(caption, where: str) -> str:
    """`fold` of a caption. Raises as `check_caption`."""
    check_caption(caption, where)
    return fold(caption)


def utf8(content: bytes, where: str) -> str:
    """The text of a caption file. Raises ValueError("kind: `where` ...") unless it is UTF-8, with or without BOM."""
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
