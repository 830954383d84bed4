"""What the benchmarks that run several seeds write, and how they show differences."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from machine import machine

from debias_diffusion.eval.report import versions
from debias_diffusion.files import write_json, write_text

RESULTS = Path(__file__).parent / "results"
# Edits of captions in the tables.
EDITS = {"keep": "Whole caption", "move2": "1 and 2 swapped", "move4": "1 and 4 swapped", "remove": "1 removed"}


def write_results(name: str, seeds: Collection[int | str], settings: dict, results: Mapping, text: str) -> None:
    """Prints `text` and writes it to benchmarks/results/ as NAME-SEED-SEED.md, with the numbers as JSON."""
    print("\n" + text)
    measured = {"machine": machine(torch.device("cpu")), "versions": versions(), "settings": settings}
    file = "-".join([name, *map(str, seeds)])
    write_json(RESULTS / f"{file}.json", measured | {"seeds": results})
    write_text(RESULTS / f"{file}.md", text)


def difference_cell(line: Mapping[str, float | None], digits: int = 1) -> str:
    """A difference with its 95% interval, if there were enough images for one."""
    if line["low"] is None:
        return f"{line['difference']:+.{digits}f}"
    return "{0:+.{3}f} ({1:+.{3}f} to {2:+.{3}f})".format(line["difference"], line["low"], line["high"], digits)
