"""Bad records, such as unreadable images and unusable captions: how they are named, and how many stop a command."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import UserError
from ..files import append, read_file
from .images import image_fault
from .records import Record

BAD_RECORDS = "bad-records.jsonl"
FEWEST = 1000  # records that a share is taken of while more are still to be read
_SHOWN = 5  # bad records printed by name

T = TypeVar("T")


@dataclass(frozen=True)
class BadRecord:
    """A skipped record: where it is in the data, the kind of fault, and the details."""

    where: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{printable(self.where)}: {self.kind} ({printable(self.detail)})"


def printable(text: str) -> str:
    """Text from data, without characters that would control a terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


@contextmanager
def leave_out(where: str, bad: list[BadRecord]) -> Iterator[None]:
    """Adds the record at `where` to `bad` if its reading raises ValueError("kind: detail") or an OSError."""
    try:
        yield
    except ValueError as error:
        kind, _, detail = str(error).partition(": ")
        bad.append(BadRecord(where, kind, detail))
    except OSError as error:
        bad.append(BadRecord(where, "unreadable file", f"its file: {error.strerror}"))


def read_or_bad(record: Record, read: Callable[[str], T]) -> T | BadRecord:
    """`read` of the record's image, or a BadRecord if that raises any Exception but UserError.

    A damaged image makes decoders raise almost anything, so no list of errors would be complete.
    """
    try:
        return read(record.image)
    except UserError:
        raise
    except Exception as error:
        kind, detail = image_fault(error)
        return BadRecord(record.image, kind, f"{record.image}: {detail}")


def print_left_out(bad: Sequence, listed_in: str = "the report") -> None:
    """Prints how many records are left out, the first five by name; `listed_in` says where all are."""
    for record in bad[:_SHOWN]:
        print(f"Left out: {record}")
    if len(bad) > _SHOWN:
        print(f"Left out: {len(bad) - _SHOWN:,} more; {listed_in} names all")


def report_bad(bad: Sequence[BadRecord], output: Path) -> None:
    """Prints bad records, counted by kind, and adds them to the output folder's `bad-records.jsonl`."""
    if not bad:
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(record.kind for record in bad).most_common())
    print(f"{len(bad)} bad records ({kinds}), all in {output / BAD_RECORDS}")
    print_left_out(bad, BAD_RECORDS)
    add_bad(bad, output)


def add_bad(bad: Sequence[BadRecord], output: Path) -> None:
    """Adds bad records to the output folder's `bad-records.jsonl`, which lists each once."""
    path, written = output / BAD_RECORDS, set()
    output.mkdir(parents=True, exist_ok=True)
    if path.exists():
        written = set(read_file(path).splitlines())
    lines = dict.fromkeys(json.dumps(vars(record), ensure_ascii=False) for record in bad)
    if new := [line for line in lines if line.encode() not in written]:
        append(path, "\n".join(new))


def too_many(bad: int, count: int, max_bad: float) -> bool:
    """Whether more than one of `count` records, and more than the share `max_bad`, are bad. A share of 0 allows none.

    One is always allowed otherwise, or a share of 0.01 would allow none in data of fewer than 100 records.
    """
    return bad > (max(1, max_bad * count) if max_bad else 0)


def check_share(
    bad: Sequence[BadRecord], count: int, max_bad: float, advice: str = "", total: int | None = None
) -> None:
    """Raises UserError, which names the first bad record, if `too_many` of `count` records are bad.

    Args:
        total: how many are, with those before `bad`.
    """
    total = len(bad) if total is None else total
    if too_many(total, count, max_bad):
        first = f" The first: {bad[0]}." if bad else ""
        raise UserError(
            f"{total} of {count} records cannot be used, more than the share of {max_bad:g} that --max-bad allows."
            f"{first} {advice}".rstrip()
        )


def report_all(bad: Sequence[BadRecord], count: int, max_bad: float, output: Path, advice: str) -> None:
    """`report_bad` in place of an earlier run's, then `check_share`, whose error says where all are named."""
    path = output / BAD_RECORDS
    path.unlink(missing_ok=True)
    report_bad(bad, output)
    check_share(bad, count, max_bad, f"All are named in {str(path)!r}. {advice}")
