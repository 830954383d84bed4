"""What evaluations are given: image-caption pairs, a benchmark, a batch size."""

from collections.abc import Sequence
from dataclasses import dataclass

from debias_diffusion.data import BadRecord, ImageSource, Record, data_digest, open_data
from debias_diffusion.data.retrieval_sets import RetrievalSet, read_retrieval_set
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
    _check_limit(limit)
    captions, source = open_data(data, images)
    print_left_out(captions.bad)
    return Pairs(captions.records[:limit], source, captions.bad, data_digest(data, captions))


def read_benchmark(name: str, root: str, limit: int | None) -> RetrievalSet:
    """The first `limit` images of a retrieval benchmark with their captions; what is left out is also named on the
    console.

    Raises:
        UserError: the benchmark cannot be used, or `limit` is below 1.
    """
    _check_limit(limit)
    benchmark = read_retrieval_set(name, root)
    print_left_out(benchmark.bad)
    return benchmark.first(limit)


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit} leaves nothing to evaluate. Give a number of pairs from 1, or null for all.")


def check_share(bad: Sequence[BadRecord], count: int, max_bad: float) -> None:
    """Raises UserError when more than one, and more than the share `max_bad`, of `count` records are in `bad`."""
    if len(bad) > max(1, max_bad * count):
        raise UserError(
            f"{len(bad)} of {count} records cannot be used, more than the share of {max_bad:g} that --max-bad allows. "
            f"The first: {bad[0]}."
        )


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


def check_max_bad(max_bad: float) -> None:
    """Raises UserError for a share outside of [0, 1]."""
    if not 0 <= max_bad <= 1:
        raise UserError(f"max_bad is {max_bad}, but must be in [0, 1].")
