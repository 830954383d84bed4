"""What evaluations are given: image-caption pairs, a benchmark, a batch size."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from debias_diffusion.data import BadRecord, ImageSource, Record, data_digest, open_data, read_captions
from debias_diffusion.data.bad_records import check_max_bad, check_share, print_left_out  # noqa: F401
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

    records: Sequence[Record]
    images: ImageSource
    bad: list[BadRecord]
    digest: str


def read_pairs(data: str, images: str | None, limit: int | None, max_bad: float) -> Pairs:
    """The first `limit` usable pairs of what `data.open_data` reads; bad records are also named on the console.

    Raises:
        UserError: the data cannot be used, or more of them than the share `max_bad`, or `limit` is below 1.
    """
    _check_limit(limit)
    captions, source = open_data(data, images)
    print_left_out(captions.bad)
    check_share(captions.bad, len(captions.records) + len(captions.bad), max_bad)
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


@dataclass(frozen=True)
class Texts:
    """Captions, where no image is opened.

    Attributes:
        captions: at least one, [M].
        image_of: the image of each, from 0, [M].
        bad: the records that the data cannot give.
        digest: of all the data, or of a benchmark's images and captions in use.
    """

    captions: list[str]
    image_of: list[int]
    bad: list[BadRecord]
    digest: str


def read_texts(
    data: str | None, dataset: str | None, root: str | None, limit: int | Literal["auto"] | None, max_bad: float
) -> Texts:
    """The captions of the first `limit` images of data, or of a benchmark; bad records are also named on the console.

    Args:
        data: what `data.open_data` takes, but its images need not be there.
        dataset: a retrieval benchmark in place of data.
        root: the folder that the benchmark lies in.
        limit: None takes all; "auto" 1,000 of data and all of a benchmark.
        max_bad: the largest share of captions that may be unusable, in all of what is read.

    Raises:
        UserError: the data cannot be used, or more of them than `max_bad`, or `limit` is below 1.
    """
    if (data is None) == (dataset is None) or (dataset is None) != (root is None):
        raise UserError(
            f"data is {data!r}, dataset is {dataset!r} with root {root!r}. Give either --data, or --dataset with "
            "--root."
        )
    if limit == "auto":
        limit = 1000 if dataset is None else None
    _check_limit(limit)
    if dataset is not None:
        benchmark = read_benchmark(dataset, root, None)
        check_share(benchmark.bad, len(benchmark.captions) + len(benchmark.bad), max_bad)
        used = benchmark.first(limit)
        return Texts(used.captions, used.image_of, used.bad, used.digest())
    found = read_captions(data)
    print_left_out(found.bad)
    check_share(found.bad, len(found.records) + len(found.bad), max_bad)
    captions = [record.caption for record in found.records[:limit]]
    return Texts(captions, list(range(len(captions))), found.bad, data_digest(data, found))


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit} leaves nothing to evaluate. Give a number of pairs from 1, or null for all.")


def check_output(output: str) -> None:
    """Raises UserError for an empty name, which would mean the current folder, and where no folder can be made."""
    if not output:
        raise UserError("There is no output. Give --output, a folder for the results.")
    path = Path(output).absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "may not be written to" if there.is_dir() else "is a file"
        raise UserError(f"The output {output!r} cannot be made: {str(there)!r} {what}. Give another folder.")


def check_batch_size(batch_size: int) -> None:
    """Raises UserError for a batch size below 1."""
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size} is not allowed. Give a whole number from 1.")
