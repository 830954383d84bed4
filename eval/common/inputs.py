"""Inputs of evaluations: settings that check themselves, and captions with their images."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from debias_diffusion.data import BadRecord, ImageSource, Record, data_digest, open_data, read_captions
from debias_diffusion.data.bad_records import check_max_bad, check_share, print_left_out
from debias_diffusion.data.retrieval_sets import read_retrieval_set
from debias_diffusion.errors import UserError

from .encoders import check_encoders

AUTO_LIMIT = 1000  # pairs of data, as many as ShareGPT4V's validation split has


@dataclass
class BenchmarkConfig:
    """What evaluations of two-tower models on the files of one benchmark share.

    Attributes:
        encoders: CLIP models to compare: training runs, folders, files, hub ids, MODEL:PRETRAINED as open_clip names
            them (ViT-B-16-quickgelu:openai), toy/clip, toy/long-clip, toy/debias-clip.
        output: Folder for the results, a JSON file and a figure. Finished results in it are reused.
        batch_size: Images, or texts, encoded at once.
        max_bad: Largest share of records or images that may be unusable before the evaluation stops, from 0 to 1.
        device: Device to run on. The default is cuda where there is one, else cpu.
    """

    encoders: list[str]
    output: str
    batch_size: int = field(default=64, kw_only=True)
    max_bad: float = field(default=0.01, kw_only=True)
    device: str | None = field(default=None, kw_only=True)

    def __post_init__(self):
        check_settings(self)


def check_settings(config: Any, with_encoders: bool = True, of_images: bool = False) -> None:
    """What the settings of every evaluation call in `__post_init__`. Opens no data and no model.

    Args:
        of_images: the encoders are of generated images, see `check_encoders`.

    Raises:
        UserError: a setting that evaluations share is not allowed.
    """
    check_output(config.output)
    if with_encoders:
        check_encoders(config.encoders, of_images)
    if config.batch_size < 1:
        raise UserError(f"batch_size={config.batch_size} is not allowed. Give a whole number from 1.")
    check_max_bad(getattr(config, "max_bad", 0))
    limit = getattr(config, "limit", None)
    if limit not in (None, "auto") and limit < 1:
        raise UserError(f"limit={limit} leaves nothing to evaluate. Give a number of pairs from 1, or null for all.")


def check_output(output: str) -> None:
    """Raises UserError for an empty name, which would mean the current folder, and where no folder can be made."""
    if not output:
        raise UserError("There is no output. Give --output, a folder for the results.")
    path = Path(output).absolute()
    existing = next(place for place in (path, *path.parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        fault = "may not be written to" if existing.is_dir() else "is a file"
        raise UserError(f"The output {output!r} cannot be made: {str(existing)!r} {fault}. Give another folder.")


def check_source(config: Any) -> None:
    """Raises UserError unless the settings name either data or a benchmark (`dataset` and `root`), whole."""
    data, dataset, root, images = (getattr(config, name, None) for name in ("data", "dataset", "root", "images"))
    if (data is None) == (dataset is None) or (dataset is None) != (root is None) or (images and dataset):
        with_images = hasattr(config, "images")
        raise UserError(
            f"data is {data!r}{f' with images {images!r}' if with_images else ''}, dataset is {dataset!r} with root "
            f"{root!r}. Give either --data{', with --images unless it is shards' if with_images else ''}, or --dataset "
            "with --root."
        )


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
    if config.dataset is not None:
        return _read_benchmark(config.dataset, config.root, None if auto else config.limit, config.max_bad)
    images = None if only_captions else config.images
    return read_pairs(config.data, images, AUTO_LIMIT if auto else config.limit, config.max_bad, only_captions)


def read_pairs(data: str, images: str | None, limit: int | None, max_bad: float, only_captions: bool = False) -> Pairs:
    """The first `limit` usable pairs of `data`, see `data.open_data`; see `read_source`."""
    captions, source = (read_captions(data), None) if only_captions else open_data(data, images)
    print_left_out(captions.bad)
    check_share(captions.bad, len(captions.records) + len(captions.bad), max_bad)
    records = captions.records[:limit]
    texts = [record.caption for record in records]
    return Pairs(records, source, texts, list(range(len(records))), captions.bad, data_digest(data, captions))


def _read_benchmark(name: str, root: str, limit: int | None, max_bad: float) -> Pairs:
    benchmark = read_retrieval_set(name, root)
    print_left_out(benchmark.bad)
    check_share(benchmark.bad, len(benchmark.captions) + len(benchmark.bad), max_bad)
    used = benchmark.first(limit)
    first = dict(zip(reversed(used.image_of), reversed(used.captions), strict=True))  # the earliest is set last
    records = [Record(image, image, first[position]) for position, image in enumerate(used.images)]
    return Pairs(records, used.source, used.captions, used.image_of, used.bad, used.digest())
