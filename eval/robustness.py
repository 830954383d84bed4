"""How much of a caption does an encoder read? R@1 when sentences are moved, removed, or come later.

The edits are those of the DeBias-CLIP paper, Figures 1a, 2, 3, 4 and S1 to S5, and all sentences in random order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from debias_diffusion.files import bytes_digest
from debias_diffusion.methods.sampling import draw_generator, join_sentences
from debias_diffusion.retrieval import encode_texts, recall_ranks
from debias_diffusion.sentences import split_sentences

from .intervals import by_group, drawn_ratios, ends, mean_interval, paired_difference
from .options import AllConfig, RobustnessConfig
from .report import Table, cell, compared_tables, draw_bars, error_lengths
from .retrieval import DIRECTIONS, PairSession, Readable, hits
from .session import TwoTower, compare

PADDING = "This is a photo."  # Figures 2 and S2
MOST_PADDING = 5
SHUFFLES = 3  # random orders of every caption
_MOST_WIDTH = 100  # points of a share's interval; a wider one is of too few hits


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
    """All sentences in a random order, a function of the seed and the caption alone."""
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
        base: the key in `EDITS` of the edit that it is compared with; its own key for such a base.
        variants: functions of a caption's sentences; R@1 is the mean over them.
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
# Encoders are compared by these drops; fewer padding sentences add nothing to the largest number.
COMPARED = ("move2", "move4", "remove", "shuffle", "swap2", "first", f"padding{MOST_PADDING}")


def edit_caption(caption: str, edit: str) -> str:
    """`caption` with one of `EDITS`, in its first variant, applied to its sentences, joined by one space."""
    return join_sentences(EDITS[edit].variants[0](split_sentences(caption)))


@dataclass(frozen=True)
class EditedHits:
    """Which queries of one encoder succeed, by edit.

    Attributes:
        window: the encoder's context length.
        over: how many edited captions exceed it, by edit; the mean over its variants.
        hits: by edit and direction, 100 for each query with a match in first place, else 0: [variants, N].
        groups: by direction, the image of each query, [N]; None: each query is another image.
        one_sentence: how many captions have a single sentence.
        similarities: by edit, the cosine of each edited caption with its image, the mean over variants, [M].
        image_of: the image of each caption, [M].
        first_two_tokens: of the first two sentences of each caption, without SOT and EOT, [M].
    """

    window: int
    over: dict[str, float]
    hits: dict[str, dict[str, np.ndarray]]
    groups: dict[str, Sequence[int] | None]
    one_sentence: int
    similarities: dict[str, np.ndarray]
    image_of: Sequence[int]
    first_two_tokens: np.ndarray

    def of(self, edit: str, direction: str) -> np.ndarray:
        """The mean over variants for each query, in percent, [N]."""
        return self.hits[edit][direction].mean(axis=0)

    def drop(self, edit: str, direction: str) -> np.ndarray:
        """The loss of each query against the edit's base, in points, [N]."""
        return self.of(EDITS[edit].base, direction) - self.of(edit, direction)


def _evaluate(session: PairSession, encoder: TwoTower, edits: Sequence[str] = tuple(EDITS)) -> EditedHits:
    readable = session.read(encoder)
    tokenizer = encoder.backbone.tokenizer
    captions = [split_sentences(caption) for caption in readable.captions]
    variants = [(edit, variant) for edit in edits for variant in EDITS[edit].variants]
    results = {edit: [] for edit in edits}
    for edit, variant in tqdm(variants, desc=f"edits, {encoder.label}"):
        texts = [join_sentences(variant(sentences)) for sentences in captions]
        results[edit].append(_rank(session, encoder, readable, texts))
    return EditedHits(
        tokenizer.context_length,
        {
            edit: float(np.mean([result["longer_than_context"] for result in of_edit]))
            for edit, of_edit in results.items()
        },
        {
            edit: {way: np.stack([hits(result["ranks"][way], 1) for result in of_edit]) for way in DIRECTIONS}
            for edit, of_edit in results.items()
        },
        {"text_to_image": readable.image_of, "image_to_text": None},
        sum(len(sentences) < 2 for sentences in captions),
        {edit: np.mean([result["similarities"] for result in of_edit], axis=0) for edit, of_edit in results.items()},
        readable.image_of,
        np.array([tokenizer.count(join_sentences(first2(part))) - tokenizer.n_special for part in captions]),
    )


def _rank(session: PairSession, encoder: TwoTower, readable: Readable, texts: list[str]) -> dict:
    """The ranks with these texts in place of the captions."""
    tokenizer, batch_size = encoder.backbone.tokenizer, session.config.batch_size

    def compute() -> dict:
        features = encode_texts(encoder.backbone, texts, batch_size, session.device, progress=False)
        ranks = recall_ranks(readable.features, features, image_of=readable.image_of)
        return {
            "longer_than_context": sum(tokenizer.count(text) > tokenizer.context_length for text in texts),
            "ranks": {direction: values.tolist() for direction, values in ranks.items()},
            "similarities": _similarities(readable, features).tolist(),
        }

    # The key holds the texts, not the edit's name: if two edits give the same texts, they are encoded once.
    digest = bytes_digest(["\0".join(texts).encode("utf-8", "surrogatepass")])
    depends = session.depends(encoder, readable) | {"edited": digest}
    return session.cache.result("robustness", depends, compute)


def _similarities(readable: Readable, texts: Tensor) -> Tensor:
    """The cosine of each caption, of features [M, D], with its image, [M]."""
    return F.cosine_similarity(readable.features[readable.image_of].double(), texts.double(), dim=1)


@dataclass(frozen=True)
class Share:
    """A ratio of two sums over the same queries.

    Attributes:
        percent: the ratio; nan where the divisor is 0.
        drawn: the ratio in each bootstrap sample, [SAMPLES]; nan likewise. Shares over equally many groups use the same
            samples.
    """

    percent: float
    drawn: np.ndarray

    def numbers(self) -> dict[str, float | None]:
        """ "share", "low" and "high", a 95% interval; all None if there is no ratio."""
        if np.isnan(self.percent):
            return {"share": None, "low": None, "high": None}
        return {"share": self.percent, **_low_and_high(self.drawn)}

    def minus(self, other: "Share") -> dict[str, float | None]:
        """ "difference" in points, its "low" and "high"; "p" is None, as there is no test."""
        return {"difference": self.percent - other.percent, **_low_and_high(self.drawn - other.drawn), "p": None}


def share(after: Sequence[float], before: Sequence[float], groups: Sequence[int] | None = None) -> Share:
    """Hits `after` as a share of the hits `before`.

    Args:
        after, before: hits of the same queries, in the same order, [N].
        groups: the image of each query, from 0, [N]; None: each query is another image. Images are resampled whole.
    """
    above, below = (by_group(values, groups)[0] for values in (after, before))
    percent = 100 * above.sum() / below.sum() if below.any() else np.nan
    return Share(float(percent), drawn_ratios(100 * above, below))


def _low_and_high(drawn: np.ndarray) -> dict[str, float]:
    return dict(zip(("low", "high"), ends(drawn), strict=True))


def _shares_kept(result: EditedHits) -> dict[str, Share]:
    """By direction, the share of R@1 that is kept when the first sentence is removed."""
    return {way: share(result.of("remove", way), result.of("keep", way), result.groups[way]) for way in DIRECTIONS}


def _numbers(label: str, result: EditedHits, shares: dict[str, Share]) -> dict:
    by_edit = {name: {direction: result.of(name, direction) for direction in DIRECTIONS} for name in EDITS}
    orders = {direction: result.hits["shuffle"][direction].mean(axis=1) for direction in DIRECTIONS}
    kept = {direction: share.numbers() for direction, share in shares.items()}
    return {
        "window": result.window,
        "captions_longer_than_context": result.over,
        "recall_at_1_percent": {
            name: {direction: float(values.mean()) for direction, values in by_direction.items()}
            for name, by_direction in by_edit.items()
        },
        "interval_percent": {
            name: {way: mean_interval(values, result.groups[way]) for way, values in by_direction.items()}
            for name, by_direction in by_edit.items()
        },
        "drop_points": {
            name: {
                direction: paired_difference(
                    by_edit[edit.base][direction], by_edit[name][direction], result.groups[direction]
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
        "similarity": {
            name: {"mean": float(values.mean()), "interval": mean_interval(values, result.image_of)}
            for name, values in result.similarities.items()
        },
        "first_two_sentences_tokens": float(result.first_two_tokens.mean()),
        "in_words": _in_words(label, kept["text_to_image"]),
    }


def _in_words(label: str, kept: dict) -> str:
    if kept["share"] is None:
        return f"{label} finds no image first even with whole captions, so it has nothing to lose."
    if _is_too_low(kept):
        return f"{label} finds too few images first to say what share of its R@1 it keeps without the first sentence."
    return (
        f"{label} keeps {kept['share']:.0f}% of its text-to-image R@1 when the first sentence is removed "
        f"(95%: {kept['low']:.0f} to {kept['high']:.0f})."
    )


def _is_too_low(kept: dict) -> bool:
    """Whether a share is of so few hits that its interval says nothing."""
    return kept["high"] - kept["low"] > _MOST_WIDTH


def _compared(results: Mapping[str, EditedHits], shares: Mapping[str, Mapping[str, Share]]) -> list[dict]:
    """Every two encoders' drops, in points, paired by query; then their shares kept when the summary is removed."""
    groups = next(iter(results.values())).groups
    drops = {f"drop of {EDITS[name].title}, {_words(way)}": (name, way) for way in DIRECTIONS for name in COMPARED}
    lost = {label: {score: result.drop(*drops[score]) for score in drops} for label, result in results.items()}
    lines = compare(lost, lambda a, b, score: paired_difference(a, b, groups[drops[score][1]]))
    kept = {
        label: {f"share kept without summary, {_words(way)}": by_way[way] for way in DIRECTIONS}
        for label, by_way in shares.items()
        if not any(np.isnan(by_way[way].percent) for way in DIRECTIONS)
    }
    return lines + compare(kept, lambda a, b, _: a.minus(b))


def _words(direction: str) -> str:
    return direction.replace("_", " ")


def plot(encoders: dict[str, dict]) -> Figure:
    """R@1 under edits of whole captions, of the first two sentences and behind padding sentences, and the share kept
    without the first sentence, with 95% intervals: a row for each direction, a colour for each encoder.
    """
    # Without pyplot, which would keep the figure and may open a window.
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
        _shares(kept, encoders, direction)
        of_whole.set_ylabel(f"{_words(direction)}\nR@1 (%)")
    for of_one_kind in (rows[:, :3], rows[:, 3:]):  # R@1, and shares: each on one scale
        highest = max(axes.get_ylim()[1] for axes in of_one_kind.flat)
        for axes in of_one_kind.flat:
            axes.set_ylim(0, highest)
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


def _values(numbers: dict, direction: str, edits: Sequence[str]) -> tuple[list[float], list[list[float]]]:
    """R@1 under each edit, [E], and its intervals, [E, 2]"""
    recall, intervals = (numbers[name] for name in ("recall_at_1_percent", "interval_percent"))
    return [recall[edit][direction] for edit in edits], [intervals[edit][direction] for edit in edits]


def _bars(axes: Axes, encoders: dict[str, dict], direction: str, edits: Sequence[str]) -> None:
    groups = {label: _values(numbers, direction, edits) for label, numbers in encoders.items()}
    draw_bars(axes, groups, [EDITS[edit].title for edit in edits])
    axes.margins(y=0.08)


def _curves(axes: Axes, encoders: dict[str, dict], direction: str, edits: Sequence[str]) -> None:
    for label, numbers in encoders.items():
        values, intervals = _values(numbers, direction, edits)
        lengths = error_lengths(values, intervals)
        axes.errorbar(range(len(edits)), values, yerr=lengths, marker="o", markersize=3, capsize=2, label=label)
    axes.set_xticks(range(len(edits)))


def _shares(axes: Axes, encoders: dict[str, dict], direction: str) -> None:
    for index, numbers in enumerate(encoders.values()):
        kept = numbers["kept_without_summary_percent"][direction]
        if kept["share"] is not None:
            error = error_lengths([kept["share"]], [[kept["low"], kept["high"]]])
            bars = axes.bar([index], [kept["share"]], color=f"C{index}", yerr=error, capsize=3)
            axes.bar_label(bars, fmt="%.0f%%", fontsize=9, padding=1)
    axes.set(xticks=[], ylim=(0, max(110, axes.get_ylim()[1])), ylabel="%")


def hits_by_edit(config: RobustnessConfig, edits: Sequence[str]) -> dict[str, EditedHits]:
    """Which queries succeed under each edit, by encoder. Writes no report, only the cache.

    Args:
        config: the settings.
        edits: of `EDITS`.

    Raises:
        UserError: the data or an encoder cannot be used.
    """
    session = PairSession("robustness", config)
    return session.by_encoder(partial(_evaluate, session, edits=edits))


def evaluate_robustness(config: RobustnessConfig) -> dict:
    """R@1 under every edit of `EDITS`; writes `robustness.json` and `.png` into `config.output` and prints tables.

    All captions of an image are edited, and count as in `evaluate_retrieval`. A caption of one sentence has nothing to
    move or remove, and counts unedited.

    Returns:
        The content of the file: settings, versions, digests, numbers of images, captions and captions of one sentence;
        by encoder its context length ("window"), how many edited captions exceed it, R@1 in percent by edit and
        direction, the drops against each edit's base in points, R@1 in each random order, the share of R@1 kept when
        the first sentence is removed (None if R@1 is 0), the mean cosine of captions and their images by edit, all with
        95% intervals (bootstrap over images); the mean number of tokens of captions' first two sentences, without SOT
        and EOT; the encoders compared; the bad records, seconds.

    Raises:
        UserError: the data or an encoder cannot be used.
    """
    session = PairSession("robustness", config)
    results = session.by_encoder(partial(_evaluate, session))
    shares = {label: _shares_kept(result) for label, result in results.items()}
    encoders = {label: _numbers(label, result, shares[label]) for label, result in results.items()}
    first = next(iter(results.values()))
    queries = {direction: len(first.of("keep", direction)) for direction in DIRECTIONS}
    report = session.report(
        encoders,
        _compared(results, shares),
        _notes(first.one_sentence, queries["text_to_image"]),
        images=queries["image_to_text"],
        captions=queries["text_to_image"],
        one_sentence_captions=first.one_sentence,
    )
    for numbers in encoders.values():
        print(numbers["in_words"])
    return report


def _notes(one_sentence: int, captions: int) -> list[str]:
    if not one_sentence:
        return []
    return [
        f"{one_sentence} of {captions} captions have a single sentence, which no edit moves or removes: this makes the "
        "drops smaller and the share kept larger."
    ]


def tables(report: dict) -> list[Table]:
    """The numbers of a report: shares kept, R@1 and drops by edit for each encoder, and the encoders compared."""
    rows = [
        [label, *(_kept(numbers["kept_without_summary_percent"][way]) for way in DIRECTIONS)]
        for label, numbers in report["encoders"].items()
    ]
    result = [Table(["share of R@1 kept without the first sentence, percent", *map(_words, DIRECTIONS)], rows)]
    result.append(_similarities_table(report["encoders"]))
    header = ["captions cut", *(f"{column}, {_words(way)}" for way in DIRECTIONS for column in ("R@1", "drop"))]
    for label, numbers in report["encoders"].items():
        result.append(Table([label, *header], [_row(numbers, name) for name in EDITS]))
    # Without those from image to text, which are in the JSON: twice as many lines would hide the important ones.
    shown = [line for line in report["compared"] if line["score"].endswith(_words(DIRECTIONS[0]))]
    return result + compared_tables(shown)


def _similarities_table(encoders: dict[str, dict]) -> Table:
    """Whether a whole caption is more similar to its image than its first sentence is; tokens of the first two."""
    edits = {"first": "first sentence", "keep": "whole caption"}
    rows = []
    for label, numbers in encoders.items():
        of_edits = [numbers["similarity"][edit] for edit in edits]
        cells = [cell(of_edit["mean"], *of_edit["interval"], form=".3f") for of_edit in of_edits]
        rows.append([label, *cells, numbers["first_two_sentences_tokens"]])
    return Table(["mean similarity of image and text", *edits.values(), "tokens of sentences 1 and 2"], rows)


def _row(numbers: dict, edit: str) -> list[str | None]:
    cells = [EDITS[edit].title, f"{numbers['captions_longer_than_context'][edit]:.0f}"]
    for way in DIRECTIONS:
        value, ends = (numbers[name][edit][way] for name in ("recall_at_1_percent", "interval_percent"))
        drop = numbers["drop_points"].get(edit, {}).get(way)
        cells.append(cell(value, *ends))
        cells.append(drop and cell(drop["difference"], drop["low"], drop["high"]))
    return cells


def _kept(kept: dict) -> str | None:
    if kept["share"] is not None and _is_too_low(kept):
        return "too low to say"
    return cell(*kept.values())


def figures(report: dict) -> dict[str, Figure]:
    """The figure of a report, by file name."""
    return {"robustness.png": plot(report["encoders"])}


def settings_for(everything: AllConfig) -> RobustnessConfig:
    """Its settings in `evaluate all`."""
    return everything.settings(RobustnessConfig)
