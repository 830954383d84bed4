"""Figures of an evaluation of generated images: its scores, and the first images side by side."""

import os
import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from debias_diffusion.data.bad_records import printable

from .networks import load_image
from .objects import BY_SENTENCE

_COLUMNS = 4
_SENTENCES = "clip_score_"  # scores of one sentence each, by its number
_SHOWN = 300  # pixels of an example's longer side
_WORDS = 520  # characters of a prompt beside its images


def plot(encoders: Mapping[str, dict], titles: Mapping[str, str]) -> Figure:
    """Every score with its 95% interval, a panel for each score, a row for each encoder; below, scores by sentence."""
    scores = {label: numbers["scores"] for label, numbers in encoders.items()}
    every = [score for numbers in scores.values() for score in numbers.items()]
    names = dict.fromkeys(name for name, number in every if isinstance(number, dict))  # one number, not a list
    single = [name for name in names if not name.startswith(_SENTENCES)]
    series = _series(scores, titles)
    rows = -(-len(single) // _COLUMNS)
    # Without pyplot, which would keep the figure and may open a window.
    height = rows * (0.9 + 0.28 * len(encoders)) + 3.0 * bool(series)
    figure = Figure(figsize=(12, height), layout="constrained", dpi=150)
    heights = [0.9 + 0.28 * len(encoders)] * rows + [3.0] * bool(series)
    grid = figure.add_gridspec(len(heights), 2 * _COLUMNS, height_ratios=heights)
    for place, name in enumerate(single):
        row, column = divmod(place, _COLUMNS)
        axes = figure.add_subplot(grid[row, 2 * column : 2 * column + 2])
        of_score = {label: numbers[name] for label, numbers in scores.items() if name in numbers}
        _dots(axes, of_score, list(scores), not column)
        axes.set_title(titles.get(name, name), fontsize="medium")
    width = 2 * _COLUMNS // max(len(series), 1)
    for place, (title, lines) in enumerate(series.items()):
        _lines(figure.add_subplot(grid[rows, place * width : (place + 1) * width]), title, lines, list(scores))
    return figure


def _dots(axes: Axes, numbers: Mapping[str, dict], labels: Sequence[str], named: bool) -> None:
    for row, label in enumerate(labels):
        if label in numbers:
            value, ends = numbers[label]["value"], [numbers[label][end] for end in ("low", "high")]
            if None not in ends:
                axes.plot(ends, [row, row], color=f"C{row}", linewidth=2)
            axes.plot([value], [row], "o", color=f"C{row}")
            axes.annotate(f"{value:.3g}", (value, row), (0, 5), textcoords="offset points", ha="center", fontsize=8)
    axes.set_yticks(range(len(labels)), labels if named else [""] * len(labels))
    axes.set_ylim(len(labels) - 0.5, -0.75)
    axes.margins(x=0.15)
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="x", alpha=0.3)


def _series(scores: Mapping[str, dict], titles: Mapping[str, str]) -> dict[str, dict[str, list[dict]]]:
    """{title: {label: numbers with "sentence"}} of the scores by sentence."""
    objects = {label: numbers[BY_SENTENCE] for label, numbers in scores.items() if BY_SENTENCE in numbers}
    precision = {
        label: [line["precision"] | {"sentence": line["sentence"]} for line in lines if line.get("precision")]
        for label, lines in objects.items()
    }
    sentences = {
        label: [
            number | {"sentence": int(name.removeprefix(_SENTENCES))}
            for name, number in numbers.items()
            if name.startswith(_SENTENCES)
        ]
        for label, numbers in scores.items()
    }
    series = {
        "objects right, %, by the sentence that first mentions them": objects,
        "precision of objects, %, in the places of each sentence": precision,
        f"{titles.get('clip_score')}, by sentence": sentences,
    }
    return {title: lines for title, lines in series.items() if any(lines.values())}


def _lines(axes: Axes, title: str, lines: Mapping[str, list[dict]], labels: Sequence[str]) -> None:
    for row, label in enumerate(labels):
        numbers = lines.get(label, [])
        # Shifted a little, so that intervals do not overlap.
        places = [number["sentence"] + 0.12 * (row - (len(labels) - 1) / 2) for number in numbers]
        values = [number["value"] for number in numbers]
        axes.plot(places, values, "o-", color=f"C{row}", label=label, markersize=4)
        for place, number in zip(places, numbers, strict=True):
            axes.plot([place, place], [number["low"], number["high"]], color=f"C{row}", linewidth=1, alpha=0.6)
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("sentence")
    axes.set_xticks(sorted({number["sentence"] for numbers in lines.values() for number in numbers}))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def plot_examples(
    captions: Sequence[str],
    references: Sequence[Image.Image],
    generated: Mapping[str, Sequence[str | os.PathLike]],
) -> Figure:
    """A row for each prompt: the prompt, its reference image, and the image of each encoder; small ones as pixels."""
    columns = {"reference image": references}
    columns |= {label: [load_image(file) for file in files] for label, files in generated.items()}
    figure = Figure(figsize=(3.4 + 2.2 * len(columns), 2.35 * len(captions)), layout="constrained", dpi=110)
    grid = figure.add_gridspec(len(captions), 1 + len(columns), width_ratios=[1.5, *[1] * len(columns)])
    for row, caption in enumerate(captions):
        words = figure.add_subplot(grid[row, 0])
        words.axis("off")
        text = textwrap.shorten(printable(" ".join(caption.split())), _WORDS, placeholder=" …")
        wrapped = textwrap.fill(text, 48)
        # parse_math: a $ is a $
        words.text(0, 0.98, wrapped, va="top", fontsize=8, parse_math=False, transform=words.transAxes)
        for column, (label, images) in enumerate(columns.items(), 1):
            axes = figure.add_subplot(grid[row, column])
            axes.axis("off")
            image = images[row].copy()
            image.thumbnail((_SHOWN, _SHOWN))  # never enlarges
            axes.imshow(image, interpolation="nearest" if max(image.size) < _SHOWN else None)
            if not row:
                axes.set_title(textwrap.fill(label, 20), fontsize="medium")
    return figure
