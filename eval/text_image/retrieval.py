"""Recall of image-caption retrieval, in both directions."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from debias_diffusion.data import Record
from debias_diffusion.devices import pick_device
from debias_diffusion.errors import UserError
from debias_diffusion.retrieval import encode_texts, recall_ranks

from ..common.cache import Parts
from ..common.encoders import TwoTower, check_encoders, compare, of_each
from ..common.inputs import (
    Pairs,
    check_batch_size,
    check_max_bad,
    check_output,
    check_share,
    print_left_out,
    read_benchmark,
    read_pairs,
)
from ..common.intervals import mean_interval, paired_difference
from ..common.report import Table, compared_tables, interval, show, write_report
from .image_features import ImageFeatures

DIRECTIONS = ("text_to_image", "image_to_text")
KS = (1, 5, 10)


@dataclass
class RetrievalConfig:
    """Settings of a retrieval evaluation.

    What is evaluated is either `data` (with `images`), pairs of one's own, or `dataset` with `root`, a benchmark.

    Attributes:
        encoders: CLIP models to compare: training runs, folders, files, hub ids, MODEL:PRETRAINED as open_clip names
            them (ViT-B-16-quickgelu:openai), toy/clip, toy/long-clip, toy/debias-clip.
        output: Folder for the results, a JSON and a picture. What is finished there is not done again.
        data: JSON file in ShareGPT4V's layout, JSONL file, folder of WebDataset shards, folder of images with captions
            beside them, or toy/test, scenes of the toy world.
        images: Folder that the data file's image paths start from; only for JSON and JSONL.
        dataset: A retrieval benchmark in place of data. One of urban1k, dci, long-dci, docci, iiw, sharegpt4v-1k, coco,
            flickr30k, flickr30k-test.
        root: Folder that the benchmark lies in, as its authors publish it.
        limit: Use only the first so many images. null uses all; auto is 1000 of the data, as ShareGPT4V's validation
            split has, and all of a benchmark.
        batch_size: Images, or captions, encoded at once.
        max_bad: Largest share of images or records that may be unreadable before the evaluation stops, from 0 to 1.
        device: Device to run on. The default is cuda where there is one, else cpu.
    """

    encoders: list[str]
    output: str
    data: str | None = None
    images: str | None = None
    dataset: str | None = None
    root: str | None = None
    limit: int | Literal["auto"] | None = "auto"
    batch_size: int = 64
    max_bad: float = 0.01
    device: str | None = None


@dataclass(frozen=True)
class Readable:
    """What of the data an encoder could see.

    Attributes:
        features: of the readable images, [N, D].
        good: their positions among all images, [N].
        captions: of these images, [M].
        image_of: the row in `features` of each caption's image, [M].
    """

    features: Tensor
    good: list[int]
    captions: list[str]
    image_of: list[int]


class Evaluation:
    """What evaluations of two-towers on image-caption pairs have in common.

    Attributes:
        pairs: what to evaluate on, each image once. An image with several captions stands there with its first.
        captions: all captions, [M].
        image_of: the position in `pairs.records` of each caption's image, [M].
        parts: what is finished.
        digests: of the data, and of the encoders so far.
        left_out: what could not be used so far.

    Raises:
        UserError: a setting cannot be used.
    """

    def __init__(self, name: str, config: RetrievalConfig):
        check_output(config.output)
        check_encoders(config.encoders)
        check_batch_size(config.batch_size)
        check_max_bad(config.max_bad)
        self.name, self.config = name, config
        self.pairs, self.captions, self.image_of = _given(config)
        self.device = pick_device(config.device)
        self.parts = Parts(Path(config.output) / "parts")
        self.digests = {"data": self.pairs.digest, "encoders": {}}
        self.left_out = list(self.pairs.bad)
        self._shown = False
        self._images = ImageFeatures(self.pairs.records, self.pairs.images, self.parts, config.batch_size, self.device)

    def of_each(self, work: Callable[[TwoTower], dict]) -> dict[str, dict]:
        """What `work` says of each encoder, by label."""

        def noted(encoder: TwoTower) -> dict:
            self.digests["encoders"][encoder.label] = encoder.digest
            return work(encoder)

        return of_each(self.config.encoders, self.device, noted)

    def read(self, encoder: TwoTower) -> Readable:
        """The features of the images, and the captions of those that can be read.

        Raises:
            UserError: more images or records than the share `max_bad` are unreadable, or all.
        """
        encoded = self._images.encode(encoder)
        if not self._shown:
            print_left_out(encoded.bad)
            self._shown = True
            self.left_out += encoded.bad
        # a data file is read beyond `limit`; its own faults were weighed against all of it
        bad = encoded.bad if self.config.dataset is None else self.pairs.bad + encoded.bad
        check_share(bad, len(self.pairs.records), self.config.max_bad)
        place = {position: row for row, position in enumerate(encoded.good)}
        kept = [
            (caption, place[image])
            for caption, image in zip(self.captions, self.image_of, strict=True)
            if image in place
        ]
        return Readable(encoded.features, encoded.good, [caption for caption, _ in kept], [row for _, row in kept])

    def depends(self, encoder: TwoTower, readable: Readable) -> dict:
        """Everything that decides a number of this encoder on this data."""
        seen = [readable.good, readable.captions, readable.image_of]
        texts = hashlib.sha256(json.dumps(seen).encode()).hexdigest()
        return encoder.depends | {"pixels": self._images.digest, "texts": texts}

    def write(self, encoders: dict[str, dict], compared: list[dict], notes: Sequence[str] = (), **more) -> dict:
        """The JSON, written and returned."""
        return write_report(
            self.name,
            self.config,
            digests=self.digests,
            left_out=self.left_out,
            seconds=self.parts.seconds,
            **more,
            encoders=encoders,
            compared=compared,
            notes=list(notes),
        )


def _given(config: RetrievalConfig) -> tuple[Pairs, list[str], list[int]]:
    """The pairs, each image once, all captions, and each one's image. Raises UserError for unusable settings."""
    own, benchmark = (config.data, config.images), (config.dataset, config.root)
    if (config.data is None) == (config.dataset is None) or (any(own) and any(benchmark)):
        raise UserError(
            f"data is {config.data!r} with images {config.images!r}, dataset is {config.dataset!r} with root "
            f"{config.root!r}. Give either --data, with --images unless it is shards, or --dataset with --root."
        )
    if config.dataset is None:
        limit = 1000 if config.limit == "auto" else config.limit
        pairs = read_pairs(config.data, config.images, limit, config.max_bad)
        return pairs, [record.caption for record in pairs.records], list(range(len(pairs.records)))
    if config.root is None:
        raise UserError(f"dataset is {config.dataset!r}, but root is not given. Give the folder that it lies in.")
    found = read_benchmark(config.dataset, config.root, None if config.limit == "auto" else config.limit)
    firsts = dict(zip(reversed(found.image_of), reversed(found.captions), strict=True))  # the earliest is set last
    records = [Record(image, image, firsts[position]) for position, image in enumerate(found.images)]
    return Pairs(records, found.source, found.bad, found.digest()), found.captions, found.image_of


def plot(encoders: dict[str, dict]) -> Figure:
    """Bars of recall by k with their intervals, one panel a direction, one colour an encoder."""
    # A Figure of its own draws with Agg and leaves pyplot alone.
    figure = Figure(figsize=(9, 3.8), layout="constrained", dpi=150)
    width = 0.8 / len(encoders)
    for axes, direction in zip(figure.subplots(1, 2, sharey=True), DIRECTIONS, strict=True):
        for index, (label, found) in enumerate(encoders.items()):
            heights = found["recall_percent"][direction]
            places = np.arange(len(heights)) + (index - (len(encoders) - 1) / 2) * width
            ends = np.array([found["interval_percent"][direction][k] for k in heights]).T  # [2, ks]
            values = np.array(list(heights.values()))
            # A skewed sample's interval need not hold its mean to the last bit.
            error = np.maximum([values - ends[0], ends[1] - values], 0)
            bars = axes.bar(places, values, width, yerr=error, capsize=2, label=label, error_kw={"linewidth": 0.8})
            axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
        axes.set_xticks(np.arange(len(heights)), list(heights))
        axes.set(title=direction.replace("_", " "), ylim=(0, 115))
    figure.axes[0].set_ylabel("recall (%), with 95% intervals")
    figure.axes[1].legend(fontsize="small", loc="upper left")
    return figure


def hits(ranks: Sequence[int], k: int) -> np.ndarray:
    """100 for each query whose partner is among the first k, else 0, so that their mean is the recall in percent."""
    return 100.0 * (np.asarray(ranks) <= k)


def _retrieve(own: Evaluation, encoder: TwoTower) -> dict:
    """One encoder's ranks with what belongs to them, as JSON."""
    readable = own.read(encoder)
    tokenizer = encoder.backbone.tokenizer

    def work() -> dict:
        texts = encode_texts(
            encoder.backbone, readable.captions, own.config.batch_size, own.device, f"captions, {encoder.label}"
        )
        ranks = recall_ranks(readable.features, texts, image_of=readable.image_of)
        over = sum(tokenizer.count(caption) > tokenizer.context_length for caption in readable.captions)
        return {
            "images": len(readable.features),
            "image_of": readable.image_of,
            "window": tokenizer.context_length,
            "captions_over_window": over,
            "ranks": {direction: its.tolist() for direction, its in ranks.items()},
        }

    return own.parts.result("retrieval", own.depends(encoder, readable), work)


def _groups(found: dict, direction: str) -> Sequence[int] | None:
    """Captions of one image succeed and fail together."""
    return found["image_of"] if direction == "text_to_image" else None


def _numbers(found: dict) -> dict:
    recall, interval = {}, {}
    for direction in DIRECTIONS:
        by_k = {f"R@{k}": hits(found["ranks"][direction], k) for k in KS}
        recall[direction] = {name: float(values.mean()) for name, values in by_k.items()}
        groups = _groups(found, direction)
        interval[direction] = {name: mean_interval(values, groups) for name, values in by_k.items()}
    return {
        "window": found["window"],
        "captions_over_window": found["captions_over_window"],
        "recall_percent": recall,
        "interval_percent": interval,
    }


def compare_at_1(found: dict[str, dict]) -> list[dict]:
    """Every two encoders' R@1, in points, paired by query.

    Args:
        found: {label: {"ranks": {direction: ranks}, "image_of": ...}}
    """
    names = {f"R@1 {direction.replace('_', ' ')}": direction for direction in DIRECTIONS}
    values = {label: {name: hits(its["ranks"][names[name]], 1) for name in names} for label, its in found.items()}
    groups = {name: _groups(next(iter(found.values())), direction) for name, direction in names.items()}
    return compare(values, lambda a, b, name: paired_difference(a, b, groups[name]))


def evaluate_retrieval(config: RetrievalConfig) -> dict:
    """Retrieval with whole captions; writes `retrieval.json` and `.png` into `config.output` and prints tables.

    Captions over a model's window are cut, and counted. `recall_ranks` says how several captions an image, ties and
    duplicates count.

    Returns:
        What the file holds: settings, versions, digests, how many images and captions; by encoder the window, how many
        captions exceed it, recalls in percent with their 95% intervals (bootstrap over images); the encoders' R@1
        compared, in points; what was left out, seconds.

    Raises:
        UserError: a setting cannot be used.
    """
    own = Evaluation("retrieval", config)
    found = own.of_each(partial(_retrieve, own))
    encoders = {label: _numbers(its) for label, its in found.items()}
    its = next(iter(found.values()))
    report = own.write(encoders, compare_at_1(found), images=its["images"], captions=len(its["image_of"]))
    show(report, tables(report), figures(report))
    return report


def tables(report: dict) -> list[Table]:
    """A report's numbers, and the encoders compared."""
    found = []
    for direction in DIRECTIONS:
        rows = [
            [label, its["captions_over_window"], *_with_intervals(its, direction)]
            for label, its in report["encoders"].items()
        ]
        columns = [column for k in KS for column in (f"R@{k}", "95%")]
        found.append(Table([f"recall in percent, {direction.replace('_', ' ')}", "captions cut", *columns], rows))
    return found + compared_tables(report["compared"])


def _with_intervals(numbers: dict, direction: str) -> list[str | float]:
    recall, ends = (numbers[name][direction] for name in ("recall_percent", "interval_percent"))
    return [cell for name in recall for cell in (recall[name], interval(ends[name]))]


def figures(report: dict) -> dict[str, Figure]:
    """The picture of a report, by its file's name."""
    return {"retrieval.png": plot(report["encoders"])}
