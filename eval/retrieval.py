"""Recall of image-caption retrieval, in both directions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from debias_diffusion.data.retrieval import encode_texts, recall_ranks
from debias_diffusion.data.retrieval_sets import find_root
from debias_diffusion.files import json_digest

from .image_features import ImageSession
from .intervals import by_group, drawn_ratios, ends, mean_interval, paired_difference
from .options import RetrievalConfig, RobustnessConfig
from .report import Table, cell, compared_tables, draw_bars
from .retrieval_examples import disagreements, nearest_strangers, write_examples
from .session import TwoTower, compare_encoders, read_source

DIRECTIONS = ("text_to_image", "image_to_text")
KS = (1, 5, 10)


@dataclass(frozen=True)
class Readable:
    """The readable images of the data, encoded, and their captions.

    Attributes:
        features: of the readable images, [N, D].
        good: their positions among all images, [N].
        captions: of these images, [M].
        image_of: the row of `features` of each caption's image, [M].
    """

    features: Tensor
    good: list[int]
    captions: list[str]
    image_of: list[int]


class PairSession(ImageSession):
    """What the evaluations of two-towers on image-caption pairs share.

    Attributes:
        pairs: the images and captions.

    Raises:
        UserError: the data cannot be used.
    """

    def __init__(self, name: str, config: RobustnessConfig):
        self.pairs = read_source(config, config.labelled, config.held_out)
        # A data file is read beyond `limit`, so the share of its bad records was checked over all of it.
        super().__init__(name, config, self.pairs, self.pairs.bad if config.dataset else ())

    def read(self, encoder: TwoTower) -> Readable:
        """The features of the images, and the captions of those that can be read.

        Raises:
            UserError: more images or records than the share `max_bad` are unreadable, or all.
        """
        features, good = self.encode(encoder)
        row_of = {position: row for row, position in enumerate(good)}
        pairs = zip(self.pairs.captions, self.pairs.image_of, strict=True)
        kept = [(caption, row_of[image]) for caption, image in pairs if image in row_of]
        return Readable(features, good, [caption for caption, _ in kept], [row for _, row in kept])

    def depends(self, encoder: TwoTower, readable: Readable) -> dict:
        """Everything that affects a result of this encoder on this data, for the cache."""
        texts = json_digest({"all": [readable.good, readable.captions, readable.image_of]})
        return {"encoder": encoder.digest, "pixels": self.image_digest, "texts": texts}


def hits(ranks: Sequence[int], k: int) -> np.ndarray:
    """100 for each query whose match is among the first k, else 0: their mean is the recall in percent."""
    return 100.0 * (np.asarray(ranks) <= k)


def _retrieve(session: PairSession, encoder: TwoTower) -> dict:
    """One encoder's ranks, and what they are of, as JSON."""
    readable = session.read(encoder)
    tokenizer = encoder.backbone.tokenizer

    def compute() -> dict:
        batch_size, title = session.config.batch_size, f"captions, {encoder.label}"
        texts = encode_texts(encoder.backbone, readable.captions, batch_size, session.device, title)
        ranks = recall_ranks(readable.features, texts, image_of=readable.image_of)
        return {
            "images": len(readable.features),
            "image_of": readable.image_of,
            "window": tokenizer.context_length,
            "captions_longer_than_context": sum(
                tokenizer.count(caption) > tokenizer.context_length for caption in readable.captions
            ),
            "ranks": {direction: values.tolist() for direction, values in ranks.items()},
        }

    return session.cache.result("retrieval", session.depends(encoder, readable), compute)


def _groups(result: dict, direction: str) -> Sequence[int] | None:
    """The groups of queries to resample: captions of one image succeed and fail together."""
    return result["image_of"] if direction == "text_to_image" else None


def _numbers(result: dict) -> dict:
    recall, interval = {}, {}
    for direction in DIRECTIONS:
        by_k = {f"R@{k}": hits(result["ranks"][direction], k) for k in KS}
        recall[direction] = {name: float(values.mean()) for name, values in by_k.items()}
        groups = _groups(result, direction)
        interval[direction] = {name: mean_interval(values, groups) for name, values in by_k.items()}
    mean_r, mean_r_interval = mean_recall(result)
    return {
        "window": result["window"],
        "captions_longer_than_context": result["captions_longer_than_context"],
        "recall_percent": recall,
        "interval_percent": interval,
        "mean_r_percent": mean_r,
        "mean_r_interval_percent": mean_r_interval,
    }


def mean_recall(result: dict) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Mean-R, the mean of R@1, R@5 and R@10 in percent (Lin et al., Not All Attention Heads Are What You Need, Table 1)

    Args:
        result: {"ranks": {direction: ranks}, "image_of": ...}

    Returns:
        by direction, as in the paper, and of "both": mean-R, and [low, high] of the 95% bootstrap interval over images.
    """
    mean_r, samples = {}, {}
    for direction in DIRECTIONS:
        values = np.mean([hits(result["ranks"][direction], k) for k in KS], axis=0)  # of each query
        sums, counts = by_group(values, _groups(result, direction))
        mean_r[direction] = float(sums.sum() / counts.sum())
        samples[direction] = drawn_ratios(sums, counts)  # of the same images in both directions
    mean_r["both"] = float(np.mean(list(mean_r.values())))
    samples["both"] = np.mean(list(samples.values()), axis=0)
    return mean_r, {name: ends(ratios) for name, ratios in samples.items()}


def compare_at_1(results: dict[str, dict]) -> list[dict]:
    """R@1 of every two encoders compared, in points, paired by query.

    Args:
        results: {label: {"ranks": {direction: ranks}, "image_of": ...}}
    """
    names = {f"R@1 {in_words(direction)}": direction for direction in DIRECTIONS}
    values = {
        label: {name: hits(result["ranks"][direction], 1) for name, direction in names.items()}
        for label, result in results.items()
    }
    groups = {name: _groups(next(iter(results.values())), direction) for name, direction in names.items()}
    return compare_encoders(values, lambda a, b, name: paired_difference(a, b, groups[name]))


def in_words(direction: str) -> str:
    return direction.replace("_", " ")


def retrieval_ranks(config: RobustnessConfig) -> dict[str, dict]:
    """The rank of every query's match, by encoder, for one data set. Writes no report, only the cache.

    Returns:
        {label: {"ranks": {direction: ranks from 1}, "image_of": the image of each caption, ...}}

    Raises:
        UserError: the data or an encoder cannot be used.
    """
    session = PairSession("retrieval", config)
    return session.by_encoder(partial(_retrieve, session))


def evaluate_retrieval(config: RetrievalConfig) -> dict:
    """Retrieval with whole captions; writes `retrieval.json` and `.png` into `config.output` and prints tables.

    Several benchmarks are evaluated one after the other, each into a folder of its name in `config.output`. With
    `config.examples` also `retrieval_examples.html`. Captions longer than a model's context length are cut, and
    counted. See `recall_ranks` for several captions an image, ties and duplicates.

    Returns:
        The content of the file, see `Session.report`, with numbers of images and captions. By encoder its context
        length ("window"), how many captions exceed it, recalls and mean-R (see `mean_recall`) in percent with 95%
        intervals (bootstrap over images). Of several benchmarks {name: content}.

    Raises:
        UserError: the data or an encoder cannot be used.
    """
    if len(config.dataset) < 2:
        return _evaluate(config)
    roots = {name: str(find_root(name, config.root)) for name in config.dataset}  # before the first takes its time
    reports = {}
    for name, root in roots.items():
        print(f"\n{name}")
        reports[name] = _evaluate(replace(config, dataset=[name], root=root, output=str(Path(config.output) / name)))
    columns = [f"{name}, {in_words(direction)}" for name in reports for direction in DIRECTIONS]
    rows = []
    for label in reports[name]["encoders"]:
        recalls = [report["encoders"][label]["recall_percent"] for report in reports.values()]
        rows.append([label, *(recall[direction]["R@1"] for recall in recalls for direction in DIRECTIONS)])
    print(f"\n{Table(['R@1 in percent', *columns], rows)}")
    return reports


def _evaluate(config: RetrievalConfig) -> dict:
    session = PairSession("retrieval", config)
    results = session.by_encoder(partial(_retrieve, session))
    encoders = {label: _numbers(result) for label, result in results.items()}
    first = next(iter(results.values()))
    if config.examples:
        _write_examples(session, results)
    counts = {"images": first["images"], "captions": len(first["image_of"])}
    return session.report(tables, figures, encoders, compare_at_1(results), **counts)


def _write_examples(session: PairSession, results: dict[str, dict]) -> None:
    """The page of captions that one encoder gets right and another wrong."""
    ranks = {label: result["ranks"]["text_to_image"] for label, result in results.items()}
    disagreed = disagreements(ranks, session.config.examples)
    readables = []  # the same images for every encoder

    def rank_first(encoder: TwoTower) -> dict[int, int]:
        readable = session.read(encoder)
        readables[:] = [readable]
        queries = sorted({query for part in disagreed if part.wrong == encoder.label for query in part.queries})
        if not queries:
            return {}
        captions = [readable.captions[query] for query in queries]
        texts = encode_texts(encoder.backbone, captions, session.config.batch_size, session.device, False)
        strangers = nearest_strangers(readable.features, texts, [readable.image_of[query] for query in queries])
        return dict(zip(queries, strangers, strict=True))

    first = session.by_encoder(rank_first)
    (readable,) = readables
    records = [session.pairs.records[position] for position in readable.good]
    path = Path(session.config.output) / "retrieval_examples.html"
    write_examples(path, disagreed, first, readable.captions, readable.image_of, records, session.pairs.images)
    print(f"Captions that one encoder gets right and another wrong: {path}")


def tables(report: dict) -> list[Table]:
    """The numbers of a report, and the encoders compared."""
    encoders, result = report["encoders"], []
    for direction in DIRECTIONS:
        rows = []
        for label, numbers in encoders.items():
            recall, interval = (numbers[name][direction] for name in ("recall_percent", "interval_percent"))
            cells = [cell(recall[name], *interval[name]) for name in recall]
            rows.append([label, numbers["captions_longer_than_context"], *cells])
        header = [f"recall in percent, {in_words(direction)}", "captions cut", *(f"R@{k}" for k in KS)]
        result.append(Table(header, rows))
    rows = []
    for label, numbers in encoders.items():
        mean_r, interval = numbers["mean_r_percent"], numbers["mean_r_interval_percent"]
        rows.append([label, *(cell(mean_r[name], *interval[name]) for name in mean_r)])
    header = ["mean of R@1, R@5, R@10 in percent", *map(in_words, DIRECTIONS), "both"]
    return [*result, Table(header, rows), *compared_tables(report["compared"])]


def figures(report: dict) -> dict[str, Figure]:
    """Bars of recall at k with 95% intervals: a panel for each direction, a colour for each encoder."""
    figure = Figure(figsize=(9, 3.8), layout="constrained", dpi=150)
    for axes, direction in zip(figure.subplots(1, 2, sharey=True), DIRECTIONS, strict=True):
        groups = {
            label: [list(numbers[name][direction].values()) for name in ("recall_percent", "interval_percent")]
            for label, numbers in report["encoders"].items()
        }
        draw_bars(axes, groups, [f"R@{k}" for k in KS], digits=1)
        axes.set(title=in_words(direction), ylim=(0, 115))
    figure.axes[0].set_ylabel("recall (%), with 95% intervals")
    figure.axes[1].legend(fontsize="small", loc="upper left")
    return {"retrieval.png": figure}
