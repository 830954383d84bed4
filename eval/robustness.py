"""How much of a caption does an encoder read? R@1 when sentences are moved, removed, or come later."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.text.sentences import join_sentences, split_sentences

from .caption_edits import EDITS, LOSING, MOST_PADDING, PADDING
from .image_features import PairSession
from .intervals import Groups, by_group, drawn_ratios, ends, hits_interval, mean_interval, paired_difference
from .options import RobustnessConfig
from .report import Table, cell, compared_tables, draw_bars, error_lengths
from .retrieval import DIRECTIONS, hits, in_words
from .session import compare_encoders

ShareKept = tuple[dict[str, float | None], np.ndarray]  # see `share_kept`

_MOST_WIDTH = 100  # points of a share's interval; a wider one is of too few hits
# Encoders are compared by these drops; fewer padding sentences add nothing to the largest number.
COMPARED = ("move2", "move4", "remove", "shuffle", "swap2", "first", f"padding{MOST_PADDING}")


@dataclass(frozen=True)
class EditedHits:
    """Which queries of one encoder succeed, by edit.

    Attributes:
        context_length: of the encoder.
        longer_than_context: how many edited captions exceed it, by edit; the mean over its variants.
        hits: by edit and direction, 100 for each query with a match in first place, else 0: [variants, N].
        groups: by direction, the name of the group of each query, [N], see `toy_scenes.family`.
        one_sentence: how many captions have a single sentence.
        similarities: by edit, the cosine of each edited caption with its image, the mean over variants, [M].
        first_two_tokens: of the first two sentences of each caption, without SOT and EOT, [M].
    """

    context_length: int
    longer_than_context: dict[str, float]
    hits: dict[str, dict[str, np.ndarray]]
    groups: dict[str, list[str]]
    one_sentence: int
    similarities: dict[str, np.ndarray]
    first_two_tokens: list[int]

    def of(self, edit: str, direction: str) -> np.ndarray:
        """The mean over variants for each query, in percent, [N]."""
        return self.hits[edit][direction].mean(axis=0)

    def drop(self, edit: str, direction: str) -> np.ndarray:
        """The loss of each query against the edit's base, in points, [N]."""
        return self.of(EDITS[edit].base, direction) - self.of(edit, direction)


def rank_edits(session: PairSession, label: str, backbone: Backbone, edits: Sequence[str] = tuple(EDITS)) -> EditedHits:
    """Which queries of one encoder succeed under these of `EDITS`."""
    readable, tokenizer = session.read(label, backbone), backbone.tokenizer
    captions = [split_sentences(caption) for caption in readable.captions]
    longer, succeeded, similarities = {}, {}, {}
    for edit in tqdm(edits, desc=f"edits, {label}"):
        texts = [[join_sentences(variant(sentences)) for sentences in captions] for variant in EDITS[edit].variants]
        ranked = [session.rank(readable, of_variant) for of_variant in texts]
        longer[edit] = float(np.mean([rank["longer_than_context"] for rank in ranked]))
        succeeded[edit] = {way: np.stack([hits(rank["ranks"][way], 1) for rank in ranked]) for way in DIRECTIONS}
        similarities[edit] = np.mean([rank["similarities"] for rank in ranked], axis=0)
    return EditedHits(
        tokenizer.context_length,
        longer,
        succeeded,
        readable.groups,
        sum(len(sentences) < 2 for sentences in captions),
        similarities,
        [tokenizer.count(join_sentences(part[:2])) - tokenizer.n_special for part in captions],
    )


def share_kept(after: Sequence[float], before: Sequence[float], groups: Groups = None) -> ShareKept:
    """Hits `after` as a share of the hits `before`.

    Args:
        after, before: hits of the same queries, in the same order, [N].
        groups: of the queries.

    Returns:
        "share" in percent, "low" and "high" (95% interval), all None where nothing was hit before, the last two also
        where only one group was; and the share in each bootstrap sample, [SAMPLES], nan likewise. Shares over equally
        many groups use the same samples.
    """
    above, below = (by_group(values, groups)[0] for values in (after, before))
    samples = drawn_ratios(100 * above, below)
    share = float(100 * above.sum() / below.sum()) if below.any() else None
    return dict(zip(("share", "low", "high"), (share, *ends(samples)), strict=True)), samples


def share_difference(a: ShareKept, b: ShareKept) -> dict[str, float | None]:
    """ "difference" of two shares, a - b, in points, its "low" and "high"; "p" is None, as there is no test."""
    low, high = ends(a[1] - b[1])
    return {"difference": a[0]["share"] - b[0]["share"], "low": low, "high": high, "p": None}


def _by_edit(edits: Iterable[str], value: Callable[[str, str], Any]) -> dict[str, dict[str, Any]]:
    """{edit: {direction: value(edit, direction)}}"""
    return {edit: {direction: value(edit, direction) for direction in DIRECTIONS} for edit in edits}


def _numbers(result: EditedHits, shares: dict[str, ShareKept]) -> dict:
    groups, kept = result.groups, {direction: share for direction, (share, _) in shares.items()}
    orders = {direction: result.hits["shuffle"][direction].mean(axis=1) for direction in DIRECTIONS}
    return {
        "window": result.context_length,
        "captions_longer_than_context": result.longer_than_context,
        "recall_at_1_percent": _by_edit(EDITS, lambda edit, way: float(result.of(edit, way).mean())),
        "interval_percent": _by_edit(EDITS, lambda edit, way: hits_interval(result.of(edit, way), groups[way])),
        "drop_points": _by_edit(
            LOSING,
            lambda edit, way: paired_difference(result.of(EDITS[edit].base, way), result.of(edit, way), groups[way]),
        ),
        "shuffles": {
            "recall_at_1_percent": {direction: values.tolist() for direction, values in orders.items()},
            "deviation_points": {direction: float(values.std(ddof=1)) for direction, values in orders.items()},
        },
        "kept_without_summary_percent": kept,
        "similarity": {
            name: {"mean": float(values.mean()), "interval": mean_interval(values, groups["text_to_image"])}
            for name, values in result.similarities.items()
        },
        "first_two_sentences_tokens": float(np.mean(result.first_two_tokens)),
    }


def _is_too_low(kept: dict) -> bool:
    """Whether a share is of so few hits that its interval says nothing."""
    return kept["low"] is not None and kept["high"] - kept["low"] > _MOST_WIDTH


def _compared(results: Mapping[str, EditedHits], shares: Mapping[str, Mapping[str, ShareKept]]) -> list[dict]:
    """Every two encoders' drops, in points, paired by query; then their shares kept when the summary is removed."""
    groups = next(iter(results.values())).groups
    drops = {f"drop of {EDITS[name].title}, {in_words(way)}": (name, way) for way in DIRECTIONS for name in COMPARED}
    lost = {label: {score: result.drop(*drops[score]) for score in drops} for label, result in results.items()}
    lines = compare_encoders(lost, lambda a, b, score: paired_difference(a, b, groups[drops[score][1]]))
    kept = {
        label: {f"share kept without summary, {in_words(way)}": by_way[way] for way in DIRECTIONS}
        for label, by_way in shares.items()
        if not any(share["share"] is None for share, _ in by_way.values())
    }
    return lines + compare_encoders(kept, lambda a, b, _: share_difference(a, b))


def evaluate_robustness(config: RobustnessConfig) -> dict:
    """R@1 under every edit of `EDITS`; writes `robustness.json` and `.png` into `config.output` and prints tables.

    All captions of an image are edited, and count as in `evaluate_retrieval`. A caption of one sentence has nothing to
    move or remove, and counts unedited.

    Returns:
        The content of the file, see `Session.report`, with numbers of images, captions and captions of one sentence. By
        encoder its context length ("window"), how many edited captions exceed it, R@1 in percent by edit and direction,
        the drops against each edit's base in points, R@1 in each random order, the share of R@1 kept when the first
        sentence is removed (None if R@1 is 0), the mean cosine of captions and their images by edit, all with 95%
        intervals over groups of queries; the mean number of tokens of captions' first two sentences, without SOT and
        EOT.

    Raises:
        UserError: the data or an encoder cannot be used.
    """
    session = PairSession("robustness", config)
    results = session.by_encoder(partial(rank_edits, session))
    shares = {  # of R@1, kept when the first sentence is removed
        label: {
            way: share_kept(result.of("remove", way), result.of("keep", way), groups)
            for way, groups in result.groups.items()
        }
        for label, result in results.items()
    }
    encoders = {label: _numbers(result, shares[label]) for label, result in results.items()}
    first, notes = next(iter(results.values())), []
    if first.one_sentence:
        notes = [
            f"{first.one_sentence} of {len(first.first_two_tokens)} captions have a single sentence, which no edit "
            "moves or removes: this makes the drops smaller and the share kept larger."
        ]
    return session.report(
        tables,
        figures,
        encoders,
        _compared(results, shares),
        notes,
        images=len(first.of("keep", "image_to_text")),
        captions=len(first.first_two_tokens),
        one_sentence_captions=first.one_sentence,
    )


def tables(report: dict) -> list[Table]:
    """The numbers of a report: shares kept, R@1 and drops by edit for each encoder, and the encoders compared."""
    encoders, similar = report["encoders"], {"first": "first sentence", "keep": "whole caption"}
    shares, similarities, by_edit = [], [], []
    columns = ["captions cut", *(f"{column}, {in_words(way)}" for way in DIRECTIONS for column in ("R@1", "drop"))]
    for label, numbers in encoders.items():
        kept = [numbers["kept_without_summary_percent"][way] for way in DIRECTIONS]
        shares.append([label, *("too low to say" if _is_too_low(share) else cell(*share.values()) for share in kept)])
        means = [numbers["similarity"][edit] for edit in similar]
        cells = [cell(number["mean"], *number["interval"], form=".3f") for number in means]
        similarities.append([label, *cells, numbers["first_two_sentences_tokens"]])
        by_edit.append(Table([label, *columns], [_row(numbers, name) for name in EDITS]))
    result = [
        Table(["share of R@1 kept without the first sentence, percent", *map(in_words, DIRECTIONS)], shares),
        Table(
            ["mean similarity of image and text", *similar.values(), "tokens of sentences 1 and 2"],
            similarities,
        ),
        *by_edit,
    ]
    # Without those from image to text, which are in the JSON: twice as many lines would hide the important ones.
    shown = [line for line in report["compared"] if line["score"].endswith(in_words(DIRECTIONS[0]))]
    return result + compared_tables(shown)


def _row(numbers: dict, edit: str) -> list[str | None]:
    cells = [EDITS[edit].title, f"{numbers['captions_longer_than_context'][edit]:.0f}"]
    for way in DIRECTIONS:
        value, interval = (numbers[name][edit][way] for name in ("recall_at_1_percent", "interval_percent"))
        drop = numbers["drop_points"].get(edit, {}).get(way)
        cells += [cell(value, *interval), drop and cell(drop["difference"], drop["low"], drop["high"])]
    return cells


def figures(report: dict) -> dict[str, Figure]:
    """R@1 under edits of whole captions, with sentence 1 moved through them, of the first two sentences and behind
    padding sentences, and the share kept without the first sentence, with 95% intervals: a row for each direction, a
    colour for each encoder.
    """
    encoders, figure = report["encoders"], Figure(figsize=(16, 6.6), layout="constrained", dpi=130)
    curves = {part: [name for name in EDITS if name.startswith(part)] for part in ("after", "padding")}
    whole = [name for name, edit in EDITS.items() if edit.base == "keep" and name not in curves["after"]]
    opening = ["first2", "swap2", "first"]
    panels = (whole, ["keep", *curves["after"]], opening, ["first2", *curves["padding"]])
    rows = figure.subplots(len(DIRECTIONS), 5, width_ratios=(5, 3, 3, 3, 1.5))
    for row, direction in zip(rows, DIRECTIONS, strict=True):
        for axes, edits in zip(row, panels, strict=False):
            groups = {}
            for label, numbers in encoders.items():
                parts = (numbers["recall_at_1_percent"], numbers["interval_percent"])
                groups[label] = [[by_way[edit][direction] for edit in edits] for by_way in parts]
            if edits[-1] not in (whole[-1], opening[-1]):
                for label, (values, intervals) in groups.items():
                    errors = {"yerr": error_lengths(values, intervals), "capsize": 2}
                    axes.errorbar(range(len(values)), values, marker="o", markersize=3, label=label, **errors)
                axes.set_xticks(range(len(edits)))
            else:
                draw_bars(axes, groups, [EDITS[edit].title for edit in edits])
                axes.margins(y=0.08)
        kept = {label: numbers["kept_without_summary_percent"][direction] for label, numbers in encoders.items()}
        draw_bars(
            row[4], {label: ([of["share"] or np.nan], [[of["low"], of["high"]]]) for label, of in kept.items()}, [""]
        )
        row[4].set_ylabel("%")
        row[0].set_ylabel(f"{in_words(direction)}\nR@1 (%)")
    for scaled in (rows[:, :4], rows[:, 4:]):  # R@1, and shares: each on one scale
        highest = max(axes.get_ylim()[1] for axes in scaled.flat)
        for axes in scaled.flat:
            axes.set_ylim(0, highest)
    titles = ("whole captions", "sentence 1 moved", "first two sentences", f"first two behind\n“{PADDING}”")
    for axes, title in zip(rows[0], (*titles, "share of R@1 kept\nwithout sentence 1"), strict=True):
        axes.set_title(title, fontsize=10)
    rows[1, 1].set_xlabel("quarters of the others before it")
    rows[1, 3].set_xlabel("padding sentences")
    figure.legend(*rows[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return {"robustness.png": figure}
