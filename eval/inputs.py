"""What evaluations are given: image-caption pairs, a batch size."""

from collections.abc import Sequence
from dataclasses import dataclass

from debias_diffusion.data import BadRecord, ImageSource, Record, data_digest, open_data
from debias_diffusion.errors import UserError


@dataclass(frozen=True)
class Pairs:
    """What is evaluated on.

    Attributes:
        records: the pairs.
        images: what opens their images.
        bad: the records that the data cannot give.
        digest: of all the data.
    """

    records: list[Record]
    images: ImageSource
    bad: list[BadRecord]
    digest: str


def read_pairs(data: str, images: str | None, limit: int | None) -> Pairs:
    """The first `limit` usable pairs of what `data.open_data` reads; bad records are also named on the console.

    Raises:
        UserError: the data cannot be used, or `limit` is below 1.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit} leaves nothing to evaluate. Give a number of pairs from 1, or null for all.")
    captions, source = open_data(data, images)
    print_left_out(captions.bad)
    return Pairs(captions.records[:limit], source, captions.bad, data_digest(data, captions))


def print_left_out(bad: Sequence[BadRecord]) -> None:
    """Says how many records were left out and why, the first five by name."""
    for record in bad[:5]:
        print(f"left out {record}")
    if len(bad) > 5:
        print(f"left out {len(bad) - 5} more; the report names all")


def check_batch_size(batch_size: int) -> None:
    """Raises UserError for a batch size below 1."""
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size} is not allowed. Give a whole number from 1.")
