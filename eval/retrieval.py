"""Recall of image-caption retrieval, in both directions."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from debias_diffusion.clip.backbone import Backbone

from .image_features import PairSession
from .intervals import by_group, drawn_ratios, hits_interval, paired_difference, percent_ends
from .options import RetrievalConfig
from .report import Table, cell, compared_tables, draw_bars
from .retrieval_sets import find_root
from .session import compare_encoders

DIRECTIONS = ("text_to_image", "image_to_text")
KS = (1, 5, 10)


def hits(ranks: Sequence[int], k: int) -> np.ndarray:
    """100 for each query whose match is among the first k, else 0: their mean is the recall in percent."""
    return 100.0 * (np.asarray(ranks) <= k)


def retrieve(session: PairSession, label: str, backbone: Backbone) -> dict:
    """One encoder's ranks of every query's match, see `PairSession.rank`, and what they are of."""
    readable, window = session.read(label, backbone), backbone.tokenizer.context_length
    ranks = session.rank(readable, readable.captions, f"captions, {label}")
    return ranks | {"groups": readable.groups, "window": window}


def _numbers(result: dict) -> dict:
    recall, interval = {}, {}
    for direction, groups in result["groups"].items():
        by_k = {f"R@{k}": hits(result["ranks"][direction], k) for k in KS}
        recall[direction] = {name: float(values.mean()) for name, values in by_k.items()}
        interval[direction] = {name: hits_interval(values, groups) for name, values in by_k.items()}
    mean_r, mean_r_interval = mean_recall(result)
    return {
        "window": result["window"],
        "captions_longer_than_context": result["longer_than_context"],
        "recall_percent": recall,
        "interval_percent": interval,
        "mean_r_percent": mean_r,
        "mean_r_interval_percent": mean_r_interval,
    }


def mean_recall(result: dict) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Mean-R, the mean of R@1, R@5 and R@10 in percent (Lin et al., Not All Attention Heads Are What You Need, Table 1)

    Args:
        result: see `retrieve`.

    Returns:
        by direction, as in the paper, and of "both": mean-R, and [low, high] of the 95% interval over groups.
    """
    mean_r, samples, orders = {}, {}, [[*dict.fromkeys(groups)] for groups in result["groups"].values()]
    assert orders[0] == orders[1], "captions are not in the order of their images: the same draw takes other groups"
    for direction, groups in result["groups"].items():
        values = np.mean([hits(result["ranks"][direction], k) for k in KS], axis=0)  # of each query
        sums, counts = by_group(values, groups)
        mean_r[direction] = float(sums.sum() / counts.sum())
        samples[direction] = drawn_ratios(sums, counts)  # of the same groups in both directions
    mean_r["both"] = float(np.mean(list(mean_r.values())))
    samples["both"] = np.mean(list(samples.values()), axis=0)
    return mean_r, {name: percent_ends(mean_r[name], len(sums), drawn) for name, drawn in samples.items()}


def in_words(direction: str) -> str:
    return direction.replace("_", " ")


def evaluate_retrieval(config: RetrievalConfig) -> dict:
    """Retrieval with whole captions; writes `retrieval.json` and `.png` into `config.output` and prints tables.

    Several benchmarks are evaluated one after the other, each into a folder of its name in `config.output`. Captions
    longer than a model's context length are cut, and counted. See `recall_ranks` for several captions an image,
    ties and duplicates.

    Returns:
        The content of the file, see `Session.report`, with numbers of images and captions. By encoder its context
        length ("window"), how many captions exceed it, recalls and mean-R (see `mean_recall`) in percent with 95%
        intervals (bootstrap over groups of queries). Of several benchmarks {name: content}.

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
    results = session.by_encoder(partial(retrieve, session))
    first = next(iter(results.values()))
    groups = {f"R@1 {in_words(way)}": of_way for way, of_way in first["groups"].items()}
    at_1 = {
        label: {f"R@1 {in_words(way)}": hits(result["ranks"][way], 1) for way in DIRECTIONS}
        for label, result in results.items()
    }
    return session.report(
        tables,
        figures,
        {label: _numbers(result) for label, result in results.items()},
        compare_encoders(at_1, lambda a, b, score: paired_difference(a, b, groups[score])),
        images=len(first["groups"]["image_to_text"]),
        captions=len(first["groups"]["text_to_image"]),
    )


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
