"""How much of retrieval depends on the first sentence: recall under edits of the caption's sentences."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from debias_diffusion.captions import join_sentences
from debias_diffusion.retrieval import encode_images, encode_texts, recall_at_k
from debias_diffusion.sentences import split_sentences

from .inputs import print_left_out
from .report import table
from .retrieval import Evaluation, RetrievalConfig

DIRECTIONS = ("text_to_image", "image_to_text")


@dataclass
class RobustnessConfig(RetrievalConfig):
    """Settings of a robustness evaluation: those of a retrieval evaluation.

    Attributes:
        output: Folder for the results, `robustness.json` and `robustness.png`.
    """


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


def _swap_first(sentences: list[str], other: int) -> list[str]:
    """Sentence 0 swapped with sentence `other`, or with the last where there is no such sentence."""
    edited = list(sentences)
    other = min(other, len(edited) - 1)
    if other > 0:
        edited[0], edited[other] = edited[other], edited[0]
    return edited


# The edits of Figures 1a and S3, by the names used there.
EDITS: dict[str, Callable[[list[str]], list[str]]] = {"keep": keep, "move2": move2, "move4": move4, "remove": remove}


def edit_caption(caption: str, edit: str) -> str:
    """`caption` with one of `EDITS` applied to its sentences, joined by one space."""
    return join_sentences(EDITS[edit](split_sentences(caption)))


def compare(recall: dict[str, dict[str, float]]) -> dict:
    """R@1 by edit and direction (percent), with the drops against `keep` and the share kept under `remove`."""
    before, after = recall["keep"], recall["remove"]
    return {
        "recall_at_1_percent": recall,
        "drop_points": {
            edit: {direction: before[direction] - values[direction] for direction in DIRECTIONS}
            for edit, values in recall.items()
        },
        "kept_without_summary_percent": {
            direction: 100.0 * after[direction] / before[direction] if before[direction] else None
            for direction in DIRECTIONS
        },
    }


def plot(recall: dict[str, dict[str, float]]) -> Figure:
    """Bars of R@1 by edit, one panel a direction. A Figure of its own draws with Agg and leaves pyplot alone."""
    figure = Figure(figsize=(8, 3.5), layout="constrained", dpi=150)
    for axes, direction in zip(figure.subplots(1, 2, sharey=True), DIRECTIONS, strict=True):
        bars = axes.bar(list(recall), [values[direction] for values in recall.values()])
        axes.bar_label(bars, fmt="%.1f")
        axes.set(title=direction.replace("_", " "), ylim=(0, 110))
    figure.axes[0].set_ylabel("R@1 (%)")
    return figure


def evaluate_robustness(config: RobustnessConfig) -> dict:
    """R@1 under every edit; writes `robustness.json` and `robustness.png` and prints a table.

    Returns:
        What the file holds: settings, versions, digests, R@1 in percent by edit and direction, the drops against
        `keep` in percentage points, the percentage of R@1 that is kept when the first sentence is removed (null where
        R@1 is 0 already), how many captions have a single sentence and so stay the same, the pairs left out, seconds.

    Raises:
        UserError: a setting cannot be used.
    """
    own = Evaluation(config)
    backbone, device = own.backbone, own.device
    image_features, good, unreadable = encode_images(backbone, own.records, own.images, config.batch_size, device)
    print_left_out(unreadable)
    captions = [own.records[index].caption for index in good]
    recall = {}
    for edit in EDITS:
        edited = [edit_caption(caption, edit) for caption in captions]
        recalls = recall_at_k(image_features, encode_texts(backbone, edited, config.batch_size, device), ks=(1,))
        recall[edit] = {direction: recalls[direction]["R@1"] for direction in DIRECTIONS}
    numbers = {
        "pairs": len(captions),
        "one_sentence_captions": sum(len(split_sentences(caption)) == 1 for caption in captions),
        **compare(recall),
    }
    report = own.write("robustness", unreadable, numbers)
    plot(recall).savefig(Path(config.output) / "robustness.png")
    rows = []
    for edit in EDITS:
        cells = [(recall[edit][direction], report["drop_points"][edit][direction]) for direction in DIRECTIONS]
        rows.append([edit, *(number for cell in cells for number in cell)])
    print(table(["R@1 in percent", "text to image", "drop", "image to text", "drop"], rows))
    kept = report["kept_without_summary_percent"]
    print(table(["kept without summary, percent", "text to image", "image to text"], [["", *kept.values()]]))
    return report
