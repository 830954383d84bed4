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
from .images import ImageSource, image_fault, is_there
from .records import Record

BAD_RECORDS = "bad-records.jsonl"
FEWEST = 1000  # records that a share is taken of while more are still to be read
_SHOWN = 5  # bad records printed by name
_LOOKED_UP = 200  # records that are looked up before a run
_NO_SHORT = "no short caption"  # kind of a bad record
_ADD_SHORT = (
    "Add a short_caption to the entries of a JSON or JSONL file or of shards, or take another --sampling, such as "
    "summary"
)

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
    except (ValueError, OSError) as error:
        bad.append(left_out(where, error))


def left_out(where: str, error: ValueError | OSError) -> BadRecord:
    """The record at `where`, whose reading raised ValueError("kind: detail") or an OSError."""
    if isinstance(error, OSError):
        return BadRecord(where, "unreadable file", f"its file: {error.strerror}")
    kind, _, detail = str(error).partition(": ")
    return BadRecord(where, kind, detail)


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


def without_short_caption(record: Record) -> BadRecord | None:
    """The bad record of one without a short caption."""
    if record.short is not None:
        return None
    return BadRecord(record.image, _NO_SHORT, f"{record.image}: its entry has no usable short_caption")


def look_up(records: Sequence[Record], images: ImageSource, max_bad: float, reads_short: bool = False) -> int:
    """How many of a sample of the records, spread evenly over the data, lack their image, or a short caption to read.

    Raises:
        UserError: all of them do, or a larger share than `max_bad`.
    """
    sample = [*records[:: max(1, len(records) // _LOOKED_UP)]]
    bad = [("image", record.image) for record in sample if not is_there(images, record.image)]
    bad += [("short_caption", record.image) for record in sample if reads_short and record.short is None]
    if bad and (len(bad) >= len(sample) or too_many(len(bad), len(sample), max_bad)):
        (kind, name), place = bad[0], f"Give another folder than {str(images.root)!r} for the image paths to start from"
        raise UserError(
            f"Of {len(sample)} records looked up, {len(bad)} cannot be used, for example {name!r}, whose {kind} is "
            f"missing; --max-bad allows a share of {max_bad:g}. {place if kind == 'image' else _ADD_SHORT}; "
            "`train --check-data` names all that are missing."
        )
    return len(bad)


def continue_hint(output: str, bad: Sequence[BadRecord]) -> str:
    """What to do when too many records of the run in `output` are bad, `bad` among them."""
    kinds = {record.kind for record in bad}
    are_images = all(kind.endswith("image") for kind in kinds)
    mend = "Mend the images where they are" if are_images else "Mend them in the data"
    mend = _ADD_SHORT if _NO_SHORT in kinds else mend
    return (
        f"They are named in {str(Path(output) / BAD_RECORDS)!r}. {mend}, or start the same command with a "
        "larger --max-bad: the run continues."
    )
