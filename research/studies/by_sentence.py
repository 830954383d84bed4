"""docs/by-sentence.png: objects right by the sentence that mentions them first, of the table that `reproduce` wrote.

python -m research reproduce by-sentence --papers research/studies --world toy-test --seeds 10 11 12
python -m research.studies.by_sentence [--table runs/papers/toy-test/by-sentence.json]
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from debias_diffusion.files import read_json_object

from .harness import RESULTS, read_options

PICTURE = Path(__file__).parents[2] / "docs" / "by-sentence.png"
COLOURS = ("#b8b8b8", "#2a6f97")


def shares(table: str) -> dict[str, dict[int, float]]:
    """{row: {sentence: objects right, %}}"""
    rows = read_json_object(Path(table))["rows"]
    sentences = {title: int(title.rpartition(" ")[2]) for title in next(iter(rows.values())) if title != "all"}
    return {row: {number: cells[title]["ours"] for title, number in sentences.items()} for row, cells in rows.items()}


def draw(rows: dict[str, dict[int, float]]) -> Figure:
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.add_subplot()
    for place, ((title, parts), colour) in enumerate(zip(rows.items(), COLOURS, strict=True)):
        axes.bar(np.array([*parts]) + 0.4 * place - 0.2, parts.values(), width=0.4, label=title, color=colour)
        axes.set_xticks([*parts])
    axes.set(xlabel="sentence of the prompt that mentions an object first", ylabel="objects right, %", ylim=(0, 100))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    return figure


if __name__ == "__main__":
    draw(shares(read_options(__doc__, table=str(RESULTS / "by_sentence.json")).table)).savefig(PICTURE, dpi=150)
