"""What people see of a result: tables, figures, and HTML pages from templates."""

import base64
import io
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from debias_diffusion.files import atomic_file, write_text

TEMPLATES = Path(__file__).parent
PACKAGES = ("debias-diffusion", "torch", "torchvision", "transformers", "diffusers", "open_clip_torch", "timm")
PACKAGES += ("pillow", "torchmetrics", "torch-fidelity")  # of generated images

# Positions that a smaller share of the captions reaches are dotted: their means are of few captions, the longest ones.
FEW = 0.1


@cache
def versions() -> dict[str, str]:
    """The versions of this package and of the libraries that affect the numbers."""
    return {package: version(package) for package in PACKAGES}


@dataclass(frozen=True)
class Table:
    """Numbers for people, on a console or a page.

    Attributes:
        header: of the columns; the first is the title of the table.
        rows: the first cell of each names it; None is a missing number.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]

    def __str__(self) -> str:
        """The table as plain text: numbers right-aligned with two decimals; a missing one is a dash."""
        lines = [list(self.header), *self.cells()]
        first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
        return "\n".join("  ".join([name.ljust(first), *map(str.rjust, cells, widths)]) for name, *cells in lines)

    def markdown(self) -> str:
        """The table in Markdown; no cell can end it or hold HTML."""
        lines = [[escaped(text) for text in row] for row in (self.header, *self.cells())]
        lines.insert(1, ["---", *["--:"] * (len(self.header) - 1)])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def cells(self) -> list[list[str]]:
        """The rows as text."""

        def text(value: str | float | None) -> str:
            return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

        return [list(map(text, row)) for row in self.rows]


def escaped(text: str) -> str:
    """Text in one line, escaped for Markdown."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))


def compared_tables(
    compared: Sequence[dict], titles: Mapping[str, str] | None = None, form: str = ".2f"
) -> list[Table]:
    """A table of what `session.compare_encoders` gives, in points if the scores are percentages; none without any.

    Args:
        titles: of scores, by name; others are shown by their name.
    """
    rows = []
    for line in compared:
        name = f"{line['a']} - {line['b']}, {(titles or {}).get(line['score'], line['score'])}"
        difference = cell(line["difference"], line["low"], line["high"], form)
        rows.append([name, difference, None if line["p"] is None else f"{line['p']:.4f}"])
    return [Table(["comparison", "difference (95% interval)", "p"], rows)] if rows else []


def cell(
    value: float | None, low: float | None = math.nan, high: float | None = math.nan, form: str = ".1f"
) -> str | None:
    """A number as a cell, with its 95% interval if it has one: `61.2 (58.0 to 64.3)`. None is a missing number.

    An interval of None is one that cannot be known, see `intervals`.
    """
    if value is None:
        return None
    if low is None:
        return f"{value:{form}} (no interval)"
    return f"{value:{form}}" if math.isnan(low) else f"{value:{form}} ({low:{form}} to {high:{form}})"


def draw_bars(
    axes: Axes,
    groups: Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]],
    names: Sequence[str],
    digits: int = 0,
) -> None:
    """Bars with 95% intervals, side by side for each name, a colour for each label.

    Args:
        groups: {label: (values [N], intervals [N, 2])}
        names: below the bars, [N].
        digits: of the numbers on the bars.
    """
    width = 0.8 / len(groups)
    for index, (label, (values, intervals)) in enumerate(groups.items()):
        places = np.arange(len(names)) + (index - (len(groups) - 1) / 2) * width
        errors = {"yerr": error_lengths(values, intervals), "capsize": 2, "error_kw": {"linewidth": 0.8}}
        bars = axes.bar(places, values, width, label=label, **errors)
        axes.bar_label(bars, fmt=f"%.{digits}f", fontsize=7, padding=2)
    axes.set_xticks(np.arange(len(names)), names)


def draw_curves(axes: Axes, lines: Mapping[str, Mapping[Hashable, dict | None]]) -> None:
    """Points with 95% intervals by place, joined, a colour for each label, shifted so that intervals do not overlap.

    Args:
        lines: {label: {place: "value", "low" and "high", or None}}, the same places for each label.
    """
    for index, (label, numbers) in enumerate(lines.items()):
        known = {at: number for at, number in enumerate(numbers.values()) if number}
        values = [number["value"] for number in known.values()]
        errors = error_lengths(values, [(number["low"], number["high"]) for number in known.values()])
        places = np.array([*known]) + 0.1 * (index - (len(lines) - 1) / 2)
        axes.errorbar(places, values, errors, fmt="o-", color=f"C{index}", markersize=4, elinewidth=1, label=label)
        axes.set_xticks(range(len(numbers)), numbers)
    axes.grid(alpha=0.3)


def draw_by_position(axes: Axes, heights: Sequence[float], counts: Sequence[int], label: str, colour: str) -> None:
    """A curve over the positions of text, from 1, dotted where less than `FEW` of the captions reach.

    Args:
        counts: captions at each position; they never increase, because every caption begins at position 1.
    """
    many = sum(count >= FEW * counts[0] for count in counts)
    positions = range(1, len(heights) + 1)
    axes.plot(positions[:many], heights[:many], color=colour, label=label)
    axes.plot(positions[max(many - 1, 0) :], heights[max(many - 1, 0) :], ":", color=colour, linewidth=1)


def error_lengths(values: Sequence[float], intervals: Sequence[Sequence[float]]) -> np.ndarray:
    """How far intervals reach below and above their values, [2, N], as matplotlib's error bars need it.

    At least 0, because rounding may put the mean of a skewed sample just outside its interval; nan, which is not drawn,
    where no interval is known.
    """
    values, (low, high) = np.asarray(values), np.asarray(intervals, dtype=float).reshape(-1, 2).T
    return np.maximum([values - low, high - values], 0)


def figure_png(figure: Figure) -> bytes:
    """The PNG file of a figure. A dollar sign in a name begins no formula."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def write_png(path: Path, png: Figure | bytes) -> None:
    """Writes a figure, whole or not at all, and through no link that lies in its place."""
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(png if isinstance(png, bytes) else figure_png(png))


def write_page(path: Path, template: str, folder: Path = TEMPLATES, **values) -> None:
    """Fills a template of `folder` and writes the page, whole or not at all. Text is escaped."""
    loader, options = FileSystemLoader(folder), {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **options)
    write_text(path, environment.get_template(template).render(values))


def image_url(image: bytes | Image.Image, kind: str = "png", **options) -> str:
    """An image as a data URL, so that a page needs no other file.

    Args:
        image: to encode, or the content of its file.
        kind: of file.
        options: of Pillow's `save`.
    """
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        image.save(file, format=kind, **options)
        image = file.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
