"""What evaluations are given: pairs of a data file, a batch size."""

from collections.abc import Sequence

from debias_diffusion.data import BadRecord, Record, read_sharegpt4v
from debias_diffusion.errors import UserError


def read_pairs(data: str, limit: int | None) -> tuple[list[Record], list[BadRecord]]:
    """The first `limit` usable records of a data file, and its bad ones, which are also named on the console.

    Raises:
        UserError: the file cannot be used, or `limit` is below 1.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit} leaves nothing to evaluate. Give a number of pairs from 1, or null for all.")
    captions = read_sharegpt4v(data)
    print_left_out(captions.bad)
    return captions.records[:limit], captions.bad


def print_left_out(bad: Sequence[BadRecord]) -> None:
    """Says how many records were left out and why, the first five by name."""
    for record in bad[:5]:
        print(f"left out {record.where}: {record.kind} ({record.detail})")
    if len(bad) > 5:
        print(f"left out {len(bad) - 5} more; the report names all")


def check_batch_size(batch_size: int) -> None:
    """Raises UserError for a batch size below 1."""
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size} is not allowed. Give a whole number from 1.")
