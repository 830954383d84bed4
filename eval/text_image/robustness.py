"""How shortsighted is an encoder? R@1 when the captions' sentences change places, are removed, or come late.

The edits are those of Figures 1a, 2, 3, 4 and S1 to S5 of the DeBias-CLIP paper, and all sentences in random order.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm

from debias_diffusion.methods.sampling import draw_generator, join_sentences
from debias_diffusion.retrieval import encode_texts, recall_ranks
from debias_diffusion.sentences import split_sentences

from ..common.encoders import TwoTower, compare
from ..common.intervals import by_group, drawn_ratios, ends, mean_interval, paired_difference
from ..common.report import Table, compared_tables, interval, show
from .retrieval import DIRECTIONS, Evaluation, Readable, RetrievalConfig, hits

PADDING = "This is a photo."  # Figures 2 and S2
MOST_PADDING = 5
SHUFFLES = 3  # random orders of every caption


@dataclass
class RobustnessConfig(RetrievalConfig):
    """Settings of a robustness evaluation: those of a retrieval evaluation."""


def keep(sentences: list[str]) -> list[str]:
    """The caption as it is."""
    return list(sentences)


def move2(sentences: list[str]) -> list[str]:
    """The first and second sentences swapped; a caption of one sentence keeps it."""
    return _swap_first(sentences, 1)


def move4(sentences: list[str]) -> list[str]:
    """The first and fourth sentences swapped, or the first and last of fewer than four (supplement, E.1)."""
    return _swap_first(sentences, 3)


def remove(sentences: list[str]) -> list[str]:
    """The first sentence dropped; a caption of one sentence keeps it."""
    return sentences[1:] or list(sentences)


def first2(sentences: list[str]) -> list[str]:
    """Only the first two sentences."""
    return sentences[:2]


def swap2(sentences: list[str]) -> list[str]:
    """Only the first two sentences, the second before the first."""
    return sentences[:2][::-1]


def first(sentences: list[str]) -> list[str]:
    """Only the first sentence."""
    return sentences[:1]


def padded(count: int, sentences: list[str]) -> list[str]:
    """The first two sentences behind `count` times "This is a photo." """
    return [PADDING] * count + sentences[:2]


def shuffled(seed: int, sentences: list[str]) -> list[str]:
    """All sentences in a random order that only the seed and the caption decide."""
    rng = draw_generator(seed, 0, join_sentences(sentences))
    return rng.sample(sentences, len(sentences))


def _swap_first(sentences: list[str], other: int) -> list[str]:
    """Sentence 0 swapped with sentence `other`, or with the last where there is no such sentence."""
    edited = list(sentences)
    other = min(other, len(edited) - 1)
    if other > 0:
        edited[0], edited[other] = edited[other], edited[0]
    return edited


@dataclass(frozen=True)
class Edit:
    """One way to edit captions.

    Attributes:
        title: the paper's name for it.
        base: the edit that it is compared with, by its key in `EDITS`; its own key: it is such a base itself.
        variants: functions of a caption's sentences; the R@1 of several is their mean.
    """

    title: str
    base: str
    variants: tuple[Callable[[list[str]], list[str]], ...]


EDITS = {
    "keep": Edit("Keep", "keep", (keep,)),
    "move2": Edit("Move 2", "keep", (move2,)),
    "move4": Edit("Move 4", "keep", (move4,)),
    "remove": Edit("Remove", "keep", (remove,)),
    "shuffle": Edit("Shuffle all", "keep", tuple(partial(shuffled, seed) for seed in range(SHUFFLES))),
    "first2": Edit("First 2", "first2", (first2,)),
    "swap2": Edit("Swap 2", "first2", (swap2,)),
    "first": Edit("First only", "first2", (first,)),
    **{
        f"padding{count}": Edit(f"Padding {count}", "first2", (partial(padded, count),))
        for count in range(1, MOST_PADDING + 1)
    },
}
LOSING = {name: edit for name, edit in EDITS.items() if edit.base != name}
# Encoders are compared by these drops; the paddings between say nothing that the most does not.
COMPARED = ("move2", "move4", "remove", "shuffle", "swap2", "first", f"padding{MOST_PADDING}")


def edit_caption(caption: str, edit: str) -> str:
    """`caption` with one of `EDITS`, in its first variant, applied to its sentences, joined by one space."""
    return join_sentences(EDITS[edit].variants[0](split_sentences(caption)))


@dataclass(frozen=True)
class Found:
    """What one encoder finds.

    Attributes:
        window: its window in tokens.
        over: how many edited captions exceed it, by edit; of several variants, their mean.
        hits: by edit and direction, 100 for each query that finds a partner of its own first, else 0: [variants, N].
        groups: by direction, the image of each query, [N]; None: each query is another image.
        one_sentence: how many captions have a single sentence.
    """

    window: int
    over: dict[str, float]
    hits: dict[str, dict[str, np.ndarray]]
    groups: dict[str, Sequence[int] | None]
    one_sentence: int

    def of(self, edit: str, direction: str) -> np.ndarray:
        """The mean over variants for each query, in percent, [N]."""
        return self.hits[edit][direction].mean(axis=0)

    def drop(self, edit: str, direction: str) -> np.ndarray:
        """What each query loses against the edit's base, in points, [N]."""
        return self.of(EDITS[edit].base, direction) - self.of(edit, direction)


def _find(own: Evaluation, encoder: TwoTower, edits: Sequence[str] = tuple(EDITS)) -> Found:
    readable = own.read(encoder)
    captions = [split_sentences(caption) for caption in readable.captions]
    variants = [(name, variant) for name in edits for variant in EDITS[name].variants]
    parts = {name: [] for name in edits}
    for name, variant in tqdm(variants, desc=f"edits, {encoder.label}"):
        parts[name].append(
            _part(own, encoder, readable, [join_sentences(variant(sentences)) for sentences in captions])
        )
    return Found(
        encoder.backbone.tokenizer.context_length,
        {name: float(np.mean([part["over_window"] for part in its])) for name, its in parts.items()},
        {
            name: {direction: np.stack([hits(part["ranks"][direction], 1) for part in its]) for direction in DIRECTIONS}
            for name, its in parts.items()
        },
        {"text_to_image": readable.image_of, "image_to_text": None},
        sum(len(sentences) < 2 for sentences in captions),
    )


def _part(own: Evaluation, encoder: TwoTower, readable: Readable, texts: list[str]) -> dict:
    """The ranks with these texts in place of the captions."""
    tokenizer, config = encoder.backbone.tokenizer, own.config

    def work() -> dict:
        features = encode_texts(encoder.backbone, texts, config.batch_size, own.device, progress=False)
        ranks = recall_ranks(readable.features, features, image_of=readable.image_of)
        return {
            "over_window": sum(tokenizer.count(text) > tokenizer.context_length for text in texts),
            "ranks": {direction: its.tolist() for direction, its in ranks.items()},
        }

    # By the texts and not by the edit's name: where two edits come to the same, the second need not be encoded.
    digest = hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()
    return own.parts.result("robustness", own.depends(encoder, readable) | {"edited": digest}, work)


@dataclass(frozen=True)
class Share:
    """A ratio of two sums over the same queries.

    Attributes:
        percent: the ratio; nan where the sum below is 0.
        drawn: the ratio in each of `SAMPLES` bootstrap samples, which are the same for all shares of as many groups,
            [SAMPLES]; nan likewise.
    """

    percent: float
    drawn: np.ndarray

    def numbers(self) -> dict[str, float | None]:
        """ "share", "low" and "high", a 95% interval; all None where there is no ratio."""
        if np.isnan(self.percent):
            return {"share": None, "low": None, "high": None}
        return {"share": self.percent, **_low_and_high(self.drawn)}

    def minus(self, other: "Share") -> dict[str, float | None]:
        """ "difference" in points, its "low" and "high"; "p" is None: nothing is tested."""
        return {"difference": self.percent - other.percent, **_low_and_high(self.drawn - other.drawn), "p": None}


def share(after: Sequence[float], before: Sequence[float], groups: Sequence[int] | None = None) -> Share:
    """Which share of the hits `before` is there `after`.

    Args:
        after, before: hits of the same queries, in the same order, [N].
        groups: the image of each query, from 0, [N]; None: each is another. Images are drawn with all their queries.
    """
    above, below = (by_group(its, groups)[0] for its in (after, before))
    percent = 100 * above.sum() / below.sum() if below.any() else np.nan
    return Share(float(percent), drawn_ratios(100 * above, below))


def _low_and_high(drawn: np.ndarray) -> dict[str, float]:
    return dict(zip(("low", "high"), ends(drawn), strict=True))


def _shares_kept(found: Found) -> dict[str, Share]:
    """By direction, the share of R@1 that is kept when the first sentence is removed."""
    return {way: share(found.of("remove", way), found.of("keep", way), found.groups[way]) for way in DIRECTIONS}


def _numbers(label: str, found: Found, shares: dict[str, Share]) -> dict:
    by_edit = {name: {direction: found.of(name, direction) for direction in DIRECTIONS} for name in EDITS}
    orders = {direction: found.hits["shuffle"][direction].mean(axis=1) for direction in DIRECTIONS}
    kept = {direction: its.numbers() for direction, its in shares.items()}
    return {
        "window": found.window,
        "captions_over_window": found.over,
        "recall_at_1_percent": {
            name: {direction: float(values.mean()) for direction, values in its.items()}
            for name, its in by_edit.items()
        },
        "interval_percent": {
            name: {direction: mean_interval(values, found.groups[direction]) for direction, values in its.items()}
            for name, its in by_edit.items()
        },
        "drop_points": {
            name: {
                direction: paired_difference(
                    by_edit[edit.base][direction], by_edit[name][direction], found.groups[direction]
                )
                for direction in DIRECTIONS
            }
            for name, edit in LOSING.items()
        },
        "shuffles": {
            "recall_at_1_percent": {direction: values.tolist() for direction, values in orders.items()},
            "deviation_points": {direction: float(values.std(ddof=1)) for direction, values in orders.items()},
        },
        "kept_without_summary_percent": kept,
        "in_words": _in_words(label, kept["text_to_image"]),
    }


def _in_words(label: str, kept: dict) -> str:
    if kept["share"] is None:
        return f"{label} finds no image first even with whole captions, so it has nothing to lose."
    return (
        f"{label} keeps {kept['share']:.0f}% of its text-to-image R@1 when the first sentence is removed "
        f"(95%: {kept['low']:.0f} to {kept['high']:.0f})."
    )


def _compared(found: Mapping[str, Found], shares: Mapping[str, Mapping[str, Share]]) -> list[dict]:
    """Every two encoders' drops, in points, paired by query; then their shares kept when the summary is removed."""
    groups = next(iter(found.values())).groups
    drops = {f"drop of {EDITS[name].title}, {_words(way)}": (name, way) for way in DIRECTIONS for name in COMPARED}
    lost = {label: {score: its.drop(*drops[score]) for score in drops} for label, its in found.items()}
    lines = compare(lost, lambda a, b, score: paired_difference(a, b, groups[drops[score][1]]))
    kept = {
        label: {f"share kept without summary, {_words(way)}": its[way] for way in DIRECTIONS}
        for label, its in shares.items()
        if not any(np.isnan(its[way].percent) for way in DIRECTIONS)
    }
    return lines + compare(kept, lambda a, b, _: a.minus(b))


def _words(direction: str) -> str:
    return direction.replace("_", " ")


def plot(encoders: dict[str, dict]) -> Figure:
    """A row a direction: R@1 under the edits of whole captions, of the first two sentences, behind padding sentences,
    and the share kept without the first sentence. A colour an encoder; everything with its 95% interval.
    """
    # A Figure of its own draws with Agg and leaves pyplot alone.
    figure = Figure(figsize=(14, 6.6), layout="constrained", dpi=130)
    whole, opening = (
        [name for name, edit in EDITS.items() if edit.base == base and not name.startswith("padding")]
        for base in ("keep", "first2")
    )
    paddings = ["first2", *(name for name in EDITS if name.startswith("padding"))]
    rows = figure.subplots(len(DIRECTIONS), 4, width_ratios=(5, 3, 3, 1.5))
    for (of_whole, of_two, behind, kept), direction in zip(rows, DIRECTIONS, strict=True):
        _bars(of_whole, encoders, direction, whole)
        _bars(of_two, encoders, direction, opening)
        _curves(behind, encoders, direction, paddings)
        highest = max(axes.get_ylim()[1] for axes in (of_two, behind))  # of the same captions
        for axes in (of_two, behind):
            axes.set_ylim(0, highest)
        _shares(kept, encoders, direction)
        of_whole.set_ylabel(f"{_words(direction)}\nR@1 (%)")
    titles = (
        "whole captions",
        "first two sentences",
        f"first two behind\n“{PADDING}”",
        "share of R@1 kept\nwithout sentence 1",
    )
    for axes, title in zip(rows[0], titles, strict=True):
        axes.set_title(title, fontsize=10)
    rows[1, 2].set_xlabel("padding sentences")
    figure.legend(*rows[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _values(numbers: dict, direction: str, edits: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """R@1 [E] and its interval's lengths below and above it, [2, E]"""
    values = np.array([numbers["recall_at_1_percent"][edit][direction] for edit in edits])
    ends = np.array([numbers["interval_percent"][edit][direction] for edit in edits]).T
    # A skewed sample's interval need not hold its mean to the last bit.
    return values, np.maximum([values - ends[0], ends[1] - values], 0)


def _bars(axes: Axes, encoders: dict[str, dict], direction: str, edits: Sequence[str]) -> None:
    width = 0.84 / len(encoders)
    for index, (label, numbers) in enumerate(encoders.items()):
        values, error = _values(numbers, direction, edits)
        places = np.arange(len(edits)) + (index - (len(encoders) - 1) / 2) * width
        bars = axes.bar(places, values, width, yerr=error, capsize=2, label=label, error_kw={"linewidth": 0.8})
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
    axes.set_xticks(np.arange(len(edits)), [EDITS[edit].title for edit in edits])
    axes.margins(y=0.08)


def _curves(axes: Axes, encoders: dict[str, dict], direction: str, edits: Sequence[str]) -> None:
    for label, numbers in encoders.items():
        values, error = _values(numbers, direction, edits)
        axes.errorbar(range(len(edits)), values, yerr=error, marker="o", markersize=3, capsize=2, label=label)
    axes.set_xticks(range(len(edits)))


def _shares(axes: Axes, encoders: dict[str, dict], direction: str) -> None:
    for index, numbers in enumerate(encoders.values()):
        kept = numbers["kept_without_summary_percent"][direction]
        if kept["share"] is not None:
            error = np.maximum([[kept["share"] - kept["low"]], [kept["high"] - kept["share"]]], 0)
            bars = axes.bar([index], [kept["share"]], color=f"C{index}", yerr=error, capsize=3)
            axes.bar_label(bars, fmt="%.0f%%", fontsize=9, padding=1)
    axes.set(xticks=[], ylim=(0, max(110, axes.get_ylim()[1])), ylabel="%")


def recall_at_1(config: RobustnessConfig, edits: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """R@1 alone, in percent, by encoder, edit and direction; writes nothing but what is not to be done again.

    Args:
        config: the settings.
        edits: of `EDITS`.

    Raises:
        UserError: a setting cannot be used.
    """
    own = Evaluation("robustness", config)
    found = own.of_each(partial(_find, own, edits=edits))
    return {
        label: {edit: {direction: float(its.of(edit, direction).mean()) for direction in DIRECTIONS} for edit in edits}
        for label, its in found.items()
    }


def evaluate_robustness(config: RobustnessConfig) -> dict:
    """R@1 under every edit of `EDITS`; writes `robustness.json` and `.png` into `config.output` and prints tables.

    All of an image's captions are edited, and count as in `evaluate_retrieval`. A caption of one sentence has nothing
    to move or to lose, and counts as it is.

    Returns:
        What the file holds: settings, versions, digests, how many images, captions and captions of one sentence; by
        encoder its window, how many edited captions exceed it, R@1 in percent by edit and direction, the drops against
        each edit's base in points, R@1 in each random order, the share of R@1 that is kept when the first sentence is
        removed (None where R@1 is 0 already), all with 95% intervals (bootstrap over images); the encoders compared;
        what was left out, seconds.

    Raises:
        UserError: a setting cannot be used.
    """
    own = Evaluation("robustness", config)
    found = own.of_each(partial(_find, own))
    shares = {label: _shares_kept(its) for label, its in found.items()}
    encoders = {label: _numbers(label, its, shares[label]) for label, its in found.items()}
    its = next(iter(found.values()))
    queries = {direction: len(its.of("keep", direction)) for direction in DIRECTIONS}
    report = own.write(
        encoders,
        _compared(found, shares),
        _notes(its.one_sentence, queries["text_to_image"]),
        images=queries["image_to_text"],
        captions=queries["text_to_image"],
        one_sentence_captions=its.one_sentence,
    )
    show(report, tables(report), figures(report))
    for numbers in encoders.values():
        print(numbers["in_words"])
    return report


def _notes(one_sentence: int, captions: int) -> list[str]:
    if not one_sentence:
        return []
    return [
        f"{one_sentence} of {captions} captions have a single sentence, which no edit moves or removes: they make the "
        "drops smaller and the share kept larger."
    ]


def tables(report: dict) -> list[Table]:
    """A report's numbers: the shares kept, for each encoder R@1 and drops by edit, and the encoders compared."""
    rows = [
        [label, *(_with_interval(*numbers["kept_without_summary_percent"][way].values()) for way in DIRECTIONS)]
        for label, numbers in report["encoders"].items()
    ]
    found = [Table(["share of R@1 kept without the first sentence, percent", *map(_words, DIRECTIONS)], rows)]
    header = ["captions cut", *(f"{what}, {_words(way)}" for way in DIRECTIONS for what in ("R@1", "drop"))]
    for label, numbers in report["encoders"].items():
        found.append(Table([label, *header], [_row(numbers, name) for name in EDITS]))
    # as many again from image to text would hide what matters; the JSON has them
    shown = [line for line in report["compared"] if line["score"].endswith(_words(DIRECTIONS[0]))]
    return found + compared_tables(shown)


def _row(numbers: dict, edit: str) -> list[str | None]:
    cells = [EDITS[edit].title, f"{numbers['captions_over_window'][edit]:.0f}"]
    for way in DIRECTIONS:
        value, ends = (numbers[name][edit][way] for name in ("recall_at_1_percent", "interval_percent"))
        drop = numbers["drop_points"].get(edit, {}).get(way)
        cells.append(_with_interval(value, *ends))
        cells.append(drop and _with_interval(drop["difference"], drop["low"], drop["high"]))
    return cells


def _with_interval(value: float | None, low: float | None, high: float | None) -> str | None:
    return None if value is None else f"{value:.1f} ({interval([low, high])})"


def figures(report: dict) -> dict[str, Figure]:
    """The picture of a report, by its file's name."""
    return {"robustness.png": plot(report["encoders"])}
