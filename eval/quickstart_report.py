"""The quickstart's page: what three encoders made of the same long prompts, for someone who never heard of CLIP."""

import base64
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from PIL import Image

from .common.pages import write_page
from .quickstart import ENCODERS

NAMES = {"clip": "Original CLIP (cut at 77 tokens)", "long-clip": "Long-CLIP", "debias-clip": "DeBias-CLIP"}
EDITS = {"keep": "Keep", "move2": "Move 2", "move4": "Move 4", "remove": "Remove"}
DIRECTIONS = {"t2i_r1": "Text to image", "i2t_r1": "Image to text"}
SPARSE = 20  # objects; a share of fewer says little
TEMPLATE = "quickstart_report.html.j2"
DASH = "–"

# Stand-ins that are replaced by the page's CSS variables, so that plots follow light and dark mode.
_INK = "#010203"
_COLOURS = {"clip": "#010204", "long-clip": "#010205", "debias-clip": "#010206"}
_MARKERS = {"clip": "o", "long-clip": "s", "debias-clip": "^"}
_STYLE = {
    "font.size": 11,
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
} | dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK)


@dataclass(frozen=True)
class ExampleThing:
    """One object of an example.

    Attributes:
        text: what should be seen where, such as "large red circle, top left".
        sentence: the number of the sentence that first tells its place, from 0.
        right: by encoder, whether it was drawn right.
    """

    text: str
    sentence: int
    right: dict[str, bool]


@dataclass(frozen=True)
class Example:
    """One prompt, its original picture, and the pictures drawn from it, by encoder."""

    sentences: list[str]
    original: Image.Image
    generations: dict[str, Image.Image]
    things: list[ExampleThing]


def write_report(folder: Path, report: dict, examples: Sequence[Example]) -> Path:
    """Writes `report.html` into a folder: one file with everything in it, whole or not there.

    Args:
        folder: made if it is missing.
        report: what was measured, by encoder where it says E, of which "E1 - E2" is a comparison. Any number may be
            None, and any key may be missing; the page shows a dash instead.
            retrieval: {E: {keep | move2 | move4 | remove: {t2i_r1, i2t_r1}}}, in percent.
            generation: {E: {fid, dino, objects_correct, objects_correct_by_sentence, objects_by_sentence, n}}, in
            shares of 1, counts of objects, and n prompts.
            short_prompts: {E: share of objects drawn right}.
            bootstrap: {"E1 - E2": {difference, low, high}}, in shares of the objects of the long prompts.
            expectations: [{expectation, found, met}], where met None is open.
            seconds: {stage: seconds}. digests: {name: sha256}. versions, settings: {name: value}.
        examples: prompts to show, in this order.

    Returns:
        The path of the page.
    """
    path = Path(folder) / "report.html"
    write_page(path, TEMPLATE, **_view(report, examples))
    return path


def _view(report: dict, examples: Sequence[Example]) -> dict:
    """Everything the template names, as text."""
    positions = by_sentence(report.get("generation") or {})
    seconds = report.get("seconds") or {}
    return {
        "names": NAMES,
        "edits": EDITS,
        "dash": DASH,
        "sparse": SPARSE,
        "prompts": _first(_at(report, "generation", encoder, "n") for encoder in ENCODERS),
        "examples": [_example(example) for example in examples],
        "retrieval": {title: _retrieval_rows(report, direction) for direction, title in DIRECTIONS.items()},
        "robustness_plot": _svg(
            plot_robustness(report.get("retrieval") or {}),
            "Bars of R@1 in percent for the three encoders under the four edits; the table above has the numbers.",
        ),
        "positions": [_position_row(position) for position in positions],
        "positions_plot": _svg(
            plot_by_sentence(positions),
            "Lines of the percentage of objects drawn right by the sentence that tells them, one line an encoder; the "
            "table below has the numbers.",
        ),
        "generation": _generation_rows(report),
        "differences": [_difference(pair, found or {}) for pair, found in (report.get("bootstrap") or {}).items()],
        "short_prompts": _cells([_column(report, lambda e: ("short_prompts", e), 1, scale=100)]),
        "expectations": [_expectation(line) for line in report.get("expectations") or []],
        "seconds": {stage: _duration(took) for stage, took in seconds.items()},
        "total": _duration(sum(filter(_is_number, seconds.values()))) if seconds else DASH,
        **{key: _plain(report.get(key) or {}) for key in ("digests", "versions", "settings")},
    }


# Numbers as text


def _at(tree, *keys):
    """The value under nested keys, None where one is missing."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _first(values: Iterable):
    return next((value for value in values if value is not None), None)


def _is_number(value) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: float | None, digits: int, sign: str = "") -> str:
    return f"{value:{sign}.{digits}f}" if _is_number(value) else DASH


def _percent(share: float | None, sign: str = "") -> str:
    return _number(100 * share, 1, sign) if _is_number(share) else DASH


def _duration(seconds: float | None) -> str:
    if not _is_number(seconds):
        return DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _plain(values: dict) -> dict[str, str]:
    return {str(name): _text(value) for name, value in values.items()}


def _text(value) -> str:
    if value is None:
        return DASH
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# Rows of tables


@dataclass(frozen=True)
class _Column:
    """Numbers by encoder, in one column: how many digits to show, and whether the lowest is the best."""

    values: dict[str, float | None]
    digits: int
    lowest: bool = False


def _column(report: dict, keys, digits: int, *, lowest: bool = False, scale: float = 1.0) -> _Column:
    found = {encoder: _at(report, *keys(encoder)) for encoder in ENCODERS}
    scaled = {encoder: scale * value if _is_number(value) else None for encoder, value in found.items()}
    return _Column(scaled, digits, lowest)


def _cells(columns: Sequence[_Column]) -> dict[str, list[tuple[str, bool]]]:
    """By encoder, the text of its cells, and whether each is the best of its column as shown."""
    rows = {encoder: [] for encoder in ENCODERS}
    for column in columns:
        texts = {encoder: _number(value, column.digits) for encoder, value in column.values.items()}
        numbers = [float(text) for text in texts.values() if text != DASH]
        # One number alone, or numbers that look alike, are not the best of anything.
        best = (min if column.lowest else max)(numbers) if len(set(numbers)) > 1 else None
        for encoder, text in texts.items():
            rows[encoder].append((text, text != DASH and float(text) == best))
    return rows


def _retrieval_rows(report: dict, direction: str) -> dict[str, list[tuple[str, bool]]]:
    return _cells([_column(report, lambda e, edit=edit: ("retrieval", e, edit, direction), 1) for edit in EDITS])


def _generation_rows(report: dict) -> dict[str, list[tuple[str, bool]]]:
    return _cells(
        [
            _column(report, lambda e: ("generation", e, "objects_correct"), 1, scale=100),
            _column(report, lambda e: ("generation", e, "fid"), 2, lowest=True),
            _column(report, lambda e: ("generation", e, "dino"), 3),
        ]
    )


def _difference(pair: str, found: dict) -> dict[str, str]:
    """A comparison in words. Without both ends of the interval nothing is said of chance."""
    low, high = found.get("low"), found.get("high")
    verdict = DASH
    if _is_number(low) and _is_number(high):
        verdict = "the first is ahead" if low > 0 else "the second is ahead" if high < 0 else "could be chance"
    return {
        "pair": " minus ".join(NAMES.get(name, name) for name in pair.split(" - ")),
        "difference": _percent(found.get("difference"), "+"),
        "low": _percent(low, "+"),
        "high": _percent(high, "+"),
        "verdict": verdict,
    }


def _expectation(line: dict) -> dict[str, str]:
    met = line.get("met")
    verdict = "open" if met is None else "met" if met else "not met"
    mark = {"met": "✓", "not met": "✗", "open": "?"}[verdict]
    return {
        "expectation": _text(line.get("expectation")),
        "found": _text(line.get("found")),
        "verdict": verdict,
        "mark": mark,
        "style": {"met": "right", "not met": "wrong", "open": "open"}[verdict],
    }


# By the sentence that tells an object


@dataclass(frozen=True)
class Position:
    """What was drawn of the objects that one sentence tells, or several of the last.

    Attributes:
        first, last: numbers of the sentences, from 1.
        objects: how many objects they are the first to tell.
        shares: by encoder, the share of these drawn right.
    """

    first: int
    last: int
    objects: int
    shares: dict[str, float | None]

    @property
    def label(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


def by_sentence(generation: dict) -> list[Position]:
    """The positions in order, where the last are joined until they hold `SPARSE` objects, or all there are."""
    counts = _first(_at(generation, encoder, "objects_by_sentence") for encoder in ENCODERS) or []
    shares = {encoder: _at(generation, encoder, "objects_correct_by_sentence") or [] for encoder in ENCODERS}
    positions = [
        Position(
            number, number, count or 0, {e: s[number - 1] if number <= len(s) else None for e, s in shares.items()}
        )
        for number, count in enumerate(counts, 1)
    ]
    while len(positions) > 1 and positions[-1].objects < SPARSE and any(p.objects for p in positions[:-1]):
        positions[-2:] = [_joined(*positions[-2:])]
    return positions


def _joined(a: Position, b: Position) -> Position:
    """Two neighbours as one. An encoder whose share is missing where there are objects has none for both."""
    shares = {}
    for encoder in ENCODERS:
        parts = [(p.objects, p.shares[encoder]) for p in (a, b) if p.objects]
        known = parts and all(_is_number(share) for _, share in parts)
        shares[encoder] = sum(n * share for n, share in parts) / sum(n for n, _ in parts) if known else None
    return Position(a.first, b.last, a.objects + b.objects, shares)


def _position_row(position: Position) -> dict:
    return {
        "label": position.label,
        "objects": position.objects,
        "cells": [_percent(position.shares[encoder]) for encoder in ENCODERS],
        "sparse": position.objects < SPARSE,
    }


# Plots


def plot_robustness(retrieval: dict) -> Figure:
    """Bars of R@1 by edit for every encoder, one panel a direction. Panels stand in a column, to be read on a phone."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 6.4), layout="constrained")
        for axes, (direction, title) in zip(figure.subplots(2, 1), DIRECTIONS.items(), strict=True):
            for shift, encoder in enumerate(ENCODERS, -1):
                values = [_at(retrieval, encoder, edit, direction) for edit in EDITS]
                places = [place + 0.28 * shift for place in range(len(EDITS))]
                bars = axes.bar(places, _heights(values), 0.26, color=_COLOURS[encoder], label=NAMES[encoder])
                labels = [_number(value, 0) if _is_number(value) else "" for value in values]
                axes.bar_label(bars, labels=labels, fontsize=9)
            axes.set_xticks(range(len(EDITS)), EDITS.values())
            axes.set(title=title, ylabel="R@1 (%)", ylim=(0, 110), yticks=range(0, 101, 25))
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=9)
    return figure


def plot_by_sentence(positions: Sequence[Position]) -> Figure:
    """Lines of the percentage of objects drawn right by the sentence that tells them, where there are any."""
    told = [position for position in positions if position.objects]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        for encoder in ENCODERS:
            heights = [100 * height for height in _heights(position.shares[encoder] for position in told)]
            style = {"marker": _MARKERS[encoder], "color": _COLOURS[encoder], "label": NAMES[encoder]}
            axes.plot(range(len(told)), heights, linewidth=2, **style)
        axes.set_xticks(range(len(told)), [position.label for position in told])
        axes.set(xlabel="the sentence that first tells the object", ylabel="drawn right (%)", ylim=(0, 105))
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=9)
    return figure


def _heights(values: Iterable[float | None]) -> list[float]:
    return [value if _is_number(value) else math.nan for value in values]


def _svg(figure: Figure, description: str) -> Markup:
    """A figure as an inline SVG that takes its colours from the page."""
    file = io.BytesIO()
    # Ids of clip paths and markers are hashes: one salt a figure keeps them apart in the page, and the same every time.
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": description}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue().decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in every figure, and no one refers to them
    for colour, name in [(_INK, "ink"), *((colour, encoder) for encoder, colour in _COLOURS.items())]:
        svg = svg.replace(colour, f"var(--{name})")
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1))


# Examples


def _example(example: Example) -> dict:
    described = "; ".join(thing.text for thing in example.things)
    return {
        "sentences": example.sentences,
        "original": _picture(example.original, f"Original picture: {described}"),
        "drawn": [_drawn(example, encoder) for encoder in ENCODERS],
    }


def _drawn(example: Example, encoder: str) -> dict:
    """A generated picture, with a line for every object that should be in it."""
    right = [thing.right.get(encoder) for thing in example.things]
    score = f"{sum(map(bool, right))} of {len(right)} objects right" if None not in right else DASH
    picture = example.generations.get(encoder)
    return {
        "name": NAMES[encoder],
        "picture": picture and _picture(picture, f"Drawn with {NAMES[encoder]}: {score}"),
        "score": score,
        "things": [
            {"text": thing.text, "sentence": thing.sentence + 1, "right": thing.right.get(encoder)}
            for thing in example.things
        ],
    }


def _picture(image: Image.Image, alt: str) -> dict:
    file = io.BytesIO()
    image.convert("RGB").save(file, format="PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"source": f"data:image/png;base64,{data}", "alt": alt, "width": image.width, "height": image.height}
