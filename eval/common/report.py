"""What every evaluation leaves behind: one JSON of settings, versions, digests and numbers, and a small table."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

from matplotlib.figure import Figure
from matplotlib.text import Text

from debias_diffusion.data import BadRecord
from debias_diffusion.files import path_digest as digest  # noqa: F401 (as earlier releases name it)
from debias_diffusion.files import whole_file, write_json
from debias_diffusion.models.weights import weights_digest  # noqa: F401

PACKAGES = ("debias-diffusion", "torch", "torchvision", "transformers", "diffusers", "open_clip_torch", "timm")
PACKAGES += ("pillow", "torchmetrics", "torch-fidelity")  # of pictures


def versions() -> dict[str, str]:
    """The versions of this package and of the libraries that decide the numbers."""
    return {package: version(package) for package in PACKAGES}


def write_report(
    evaluation: str, config, *, digests: dict, left_out: Iterable[BadRecord], seconds: float, **numbers
) -> dict:
    """Writes what an evaluation found to `config.output`/`evaluation`.json, and returns it.

    Args:
        evaluation: its name.
        config: its settings, a dataclass.
        digests: of data and weights: "data" and, by label, "encoders".
        left_out: the records that could not be used.
        seconds: how long it took.
        numbers: what was found: by label "encoders"; between encoders "compared", as `encoders.compare` has it;
            "notes", for whoever reads the numbers.
    """
    report = {
        "evaluation": evaluation,
        "settings": asdict(config),
        "versions": versions(),
        "digests": digests,
        **numbers,
        "left_out": [asdict(record) for record in left_out],
        "seconds": round(seconds, 1),
    }
    write_json(Path(config.output) / f"{evaluation}.json", report)
    return report


@dataclass(frozen=True)
class Table:
    """Numbers to read, on a console or a page.

    Attributes:
        header: of the columns; the first says what the table is of.
        rows: the first of each says whose numbers follow; None is a missing one.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]

    def __str__(self) -> str:
        return table(self.header, self.rows)

    def markdown(self) -> str:
        """As Markdown in which no cell can end its table or hold HTML."""
        lines = [[escaped(cell) for cell in row] for row in (self.header, *self.cells())]
        lines.insert(1, ["---", *["--:"] * (len(self.header) - 1)])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def cells(self) -> list[list[str]]:
        """The rows as text."""
        return [[_cell(value) for value in row] for row in self.rows]


def escaped(text: str) -> str:
    """Text in one line that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))


def compared_tables(compared: Sequence[dict]) -> list[Table]:
    """`encoders.compare`'s differences as a table, of points where the scores are percentages; none where none are."""
    rows = []
    for line in compared:
        p = None if line["p"] is None else f"{line['p']:.4f}"
        rows.append([f"{line['a']} - {line['b']}, {line['score']}", line["difference"], line["low"], line["high"], p])
    return [Table(["difference", "found", "95% from", "to", "p"], rows)] if rows else []


def interval(ends: Sequence[float], digits: int = 1) -> str:
    """The ends of an interval as a cell."""
    return " to ".join(f"{end:.{digits}f}" for end in ends)


def show(report: dict, tables: Iterable[Table], figures: Mapping[str, Figure]) -> None:
    """Prints tables and notes, and saves figures in the evaluation's output folder, by their files' names."""
    for its in tables:
        print(f"\n{its}")
    for note in report["notes"]:
        print(f"Note: {note}")
    for name, figure in figures.items():
        with whole_file(Path(report["settings"]["output"]) / name) as unfinished:
            save_picture(figure, unfinished)


def save_picture(figure: Figure, file: str | os.PathLike | BinaryIO) -> None:
    """Saves a figure as PNG. A dollar sign is itself, not the beginning of a formula: names hold any."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    figure.savefig(file, format="png")


def table(header: Sequence[str], rows: Iterable[Sequence[str | float | None]]) -> str:
    """A plain text table: fractions with two decimals, right-aligned; a missing number is a dash."""
    cells = [list(header)] + [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *numbers in cells:
        aligned = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *aligned]))
    return "\n".join(lines)


def _cell(value: str | float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
