"""Does a caption resemble its image more, the more of it is read? After HiMo@K of HiMo-CLIP (arXiv 2511.06653)."""

from functools import partial

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.data.retrieval import TIE
from debias_diffusion.eval.image_features import PairSession
from debias_diffusion.eval.intervals import hits_interval, mean_interval
from debias_diffusion.eval.report import Table, cell, draw_bars
from debias_diffusion.text.sentences import join_sentences, split_sentences

from .options import GrowthConfig


def beginning(part: int, parts: int, sentences: list[str]) -> list[str]:
    """The first `part` of so many parts of the sentences, in whole ones; from `parts` sentences on no two are equal."""
    return sentences[: -(-part * len(sentences) // parts)]


def correlations(similarities: np.ndarray) -> np.ndarray:
    """Pearson's correlation of 1, ..., K with the similarities of K nested beginnings, [K, N] to [N].

    0 where these are all equal to rounding, as where an encoder reads no further than the first beginning.
    """
    steps = np.arange(len(similarities)) - (len(similarities) - 1) / 2
    centred = similarities - similarities.mean(axis=0)
    norms = np.sqrt((steps**2).sum() * (centred**2).sum(axis=0))
    return np.where(np.ptp(similarities, axis=0) > TIE, steps @ centred / np.where(norms, norms, 1), 0)


def in_order(similarities: np.ndarray) -> np.ndarray:
    """100 where each of K beginnings resembles the image more than the one before it, else 0, [K, N] to [N].

    By chance it is 100 / K! on average.
    """
    return 100.0 * (np.diff(similarities, axis=0) > TIE).all(axis=0)


# By name: K, a value for each caption, and the interval of their mean.
MEASURES = {
    "correlation of 4": (4, correlations, mean_interval),
    "% in order, of 2": (2, in_order, hits_interval),
    "% in order, of 3": (3, in_order, hits_interval),
}


def measure_growth(session: PairSession, label: str, backbone: Backbone) -> dict[str, dict]:
    """The means of `MEASURES` over the captions of at least K sentences, on beginnings that end with sentences.

    See `beginning`; the last one is the whole caption. HiMo-CLIP's own, for DOCCI, may end in a sentence.

    Returns:
        By name "captions", how many there are; "mean" and "interval", its 95% interval over groups: None without any.
    """
    readable, numbers = session.read(label, backbone), {}
    captions = [split_sentences(caption) for caption in readable.captions]
    for name, (parts, measure, interval) in tqdm(MEASURES.items(), desc=f"growth, {label}"):
        edits = [partial(beginning, part, parts) for part in range(1, parts + 1)]
        texts = [[join_sentences(edit(sentences)) for sentences in captions] for edit in edits]
        similarities = np.stack([session.rank(readable, of_part)["similarities"] for of_part in texts])
        longer = [at for at, sentences in enumerate(captions) if len(sentences) >= parts]
        values = measure(similarities[:, longer])
        groups = [readable.groups["text_to_image"][at] for at in longer]
        mean, ends = (float(values.mean()), interval(values, groups)) if longer else (None, [None, None])
        numbers[name] = {"captions": len(longer), "mean": mean, "interval": ends}
    return numbers


def evaluate_growth(config: GrowthConfig) -> dict:
    """The measures of `MEASURES`, by encoder; writes `growth.json` and `growth.png` and prints a table.

    What `evaluate robustness` has ranked into the same output folder is not encoded again.

    Returns:
        The content of the file, see `Session.report`; by encoder the numbers of `measure_growth`.

    Raises:
        UserError: the data or an encoder cannot be used.
    """
    session = PairSession("growth", config)
    return session.report(tables, figures, session.by_encoder(partial(measure_growth, session)))


def tables(report: dict) -> list[Table]:
    """The numbers of a report."""
    rows = [
        [label, *(cell(part["mean"], *part["interval"], form=".2f") for part in numbers.values())]
        for label, numbers in report["encoders"].items()
    ]
    return [Table(["similarity to the image of nested beginnings", *MEASURES], rows)]


def figures(report: dict) -> dict[str, Figure]:
    """Bars of the shares in order, with 95% intervals."""
    figure = Figure(figsize=(6, 3.5), layout="constrained", dpi=150)
    axes, names = figure.subplots(), [name for name in MEASURES if name.startswith("%")]
    groups = {}
    for label, numbers in report["encoders"].items():
        parts = [numbers[name] for name in names]
        means = [np.nan if part["mean"] is None else part["mean"] for part in parts]
        groups[label] = means, [part["interval"] for part in parts]
    draw_bars(axes, groups, names)
    axes.set_ylabel("captions (%), with 95% intervals")
    axes.legend(fontsize="small")
    return {"growth.png": figure}
