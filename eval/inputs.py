"""Inputs of evaluations: settings that check themselves, and captions with their images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from debias_diffusion.data.bad_records import BadRecord, check_share, print_left_out
from debias_diffusion.data.images import ImageSource
from debias_diffusion.data.records import Record
from debias_diffusion.data.retrieval_sets import read_retrieval_set
from debias_diffusion.data.sources import data_digest, open_data, read_captions
from debias_diffusion.encoders import EncoderSpec
from debias_diffusion.errors import UserError
from debias_diffusion.jobs import Job

AUTO_LIMIT = 1000  # pairs of data, as many as ShareGPT4V's validation split has


@dataclass(frozen=True)
class Pairs:
    """Captions and their images.

    Attributes:
        records: the images, each with its first caption, [N].
        images: opens them; None if only captions were read.
        captions: all captions, at least one, [M].
        image_of: the position in `records` of each caption's image, [M].
        bad: the bad records of all the data.
        digest: of all the data; of a benchmark, of the images and captions in use.
    """

    records: Sequence[Record]
    images: ImageSource | None
    captions: list[str]
    image_of: list[int]
    bad: list[BadRecord]
    digest: str


def read_source(config: Any, only_captions: bool = False) -> Pairs:
    """The first `limit` images, with their captions, of the data or the benchmark that settings name.

    A limit of "auto" is 1,000 pairs of data and all of a benchmark. Bad records are also named on the console.

    Args:
        config: has `data`, `dataset`, `root`, `limit`, `max_bad` and, unless `only_captions`, `images`.
        only_captions: images of data need not be there.

    Raises:
        UserError: the data cannot be used, or more of it than the share `max_bad`.
    """
    auto = config.limit == "auto"
    if config.dataset:
        [name] = [config.dataset] if isinstance(config.dataset, str) else config.dataset
        return _read_benchmark(name, config.root, None if auto else config.limit, config.max_bad)
    images = None if only_captions else config.images
    unseen_by = config.specs if getattr(config, "held_out", False) else ()
    return read_pairs(
        config.data, images, AUTO_LIMIT if auto else config.limit, config.max_bad, only_captions, unseen_by
    )


def read_pairs(
    data: str,
    images: str | None,
    limit: int | None,
    max_bad: float,
    only_captions: bool = False,
    unseen_by: Sequence[EncoderSpec] = (),
) -> Pairs:
    """The first `limit` usable pairs of `data`, see `data.open_data`; see `read_source`.

    Args:
        unseen_by: encoders; only pairs that none of them was trained on.
    """
    captions, source = (read_captions(data), None) if only_captions else open_data(data, images)
    print_left_out(captions.bad)
    check_share(captions.bad, len(captions.records) + len(captions.bad), max_bad)
    records, digest = captions.records, data_digest(data, captions)
    if unseen_by:
        counts = _held_out(unseen_by, digest)
        if not counts:
            raise UserError(f"None of the encoders was trained on the data {data!r}. Leave out --held-out.")
        records = records[: min(counts.values())]
    records = records[:limit]
    texts = [record.caption for record in records]
    return Pairs(records, source, texts, list(range(len(records))), captions.bad, digest)


def _held_out(encoders: Sequence[EncoderSpec], digest: str) -> dict[EncoderSpec, int]:
    """By training run on the data with this digest, how many pairs, the first of the data, it was not trained on."""
    counts = {}
    for spec in encoders:
        model = Path(spec.place)
        for folder in (model, model.parent):  # of a run, and of its model
            job = Job.read(folder)
            if job.inputs.get("data") == digest:
                counts[spec] = job.settings["validation"] + job.settings.get("keep_best", 0)
    return counts


def trained_on(encoders: Mapping[str, EncoderSpec], pairs: Pairs) -> tuple[dict[str, int], list[str]]:
    """By label of an encoder, how many of the pairs it was trained on, as far as its run says; and that in words.

    Args:
        encoders: by label.
    """
    held_out, used = _held_out(list(encoders.values()), pairs.digest), len(pairs.records)
    counts = {label: max(0, used - held_out[spec]) for label, spec in encoders.items() if spec in held_out}
    return counts, [
        f"{label} was trained on {count} of these {used} pairs. --held-out evaluates on the others."
        for label, count in counts.items()
        if count
    ]


def _read_benchmark(name: str, root: str, limit: int | None, max_bad: float) -> Pairs:
    benchmark = read_retrieval_set(name, root)
    print_left_out(benchmark.bad)
    check_share(benchmark.bad, len(benchmark.captions) + len(benchmark.bad), max_bad)
    used = benchmark.first(limit)
    first = dict(zip(reversed(used.image_of), reversed(used.captions), strict=True))  # the earliest is set last
    records = [Record(image, image, first[position]) for position, image in enumerate(used.images)]
    return Pairs(records, used.source, used.captions, used.image_of, used.bad, used.digest())
