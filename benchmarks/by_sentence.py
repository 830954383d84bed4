"""What reading the whole prompt is worth without any training: objects right, by the sentence that mentions them first.

    python benchmarks/by_sentence.py [--seeds 10 11 12] [--prompts 100] [--output runs/by-sentence]

toy/sdxl draws the same long prompts twice, from the same noise: cut at 77 tokens, as stock SDXL reads them, and in
overlapping chunks, as `with_long_prompts` has it read them. Everything finished is kept. Prints a table and writes
benchmarks/results/by_sentence.{json,md} and docs/by-sentence.png.
"""

from pathlib import Path

import numpy as np
from harness import publish, read_options
from matplotlib.figure import Figure

from debias_diffusion.eval.images.generation import GenerationConfig, evaluate_generation
from debias_diffusion.eval.images.objects import BY_SENTENCE
from debias_diffusion.eval.report import Table, cell

PICTURE = Path(__file__).parent.parent / "docs" / "by-sentence.png"
WAYS = {"cut:original": "cut at 77 tokens", "original": "read whole, in overlapping chunks"}
COLOURS = ("#b8b8b8", "#2a6f97")
FEW = 20  # objects that a bar needs


def draw(seed: int, prompts: int, output: Path) -> dict:
    """The report of a seed's prompts, scenes that no model has learned from."""
    settings = GenerationConfig(
        [*WAYS], str(output / f"seed-{seed}"), base="toy/sdxl", data=f"toy/test-{seed}", limit=prompts
    )
    return evaluate_generation(settings)


def by_sentence(reports: dict[int, dict]) -> dict[str, list[dict]]:
    """{way: for each sentence "sentence", "objects" first mentioned there and how many percent are "right"}"""
    rows = {}
    for way, title in zip(next(iter(reports.values()))["encoders"], WAYS.values(), strict=True):
        lists = [report["encoders"][way]["scores"][BY_SENTENCE] for report in reports.values()]
        sentences = {}
        for part in (part for parts in lists for part in parts):
            objects, right = sentences.get(part["sentence"], (0, 0.0))
            sentences[part["sentence"]] = objects + part["objects"], right + part["objects"] * part["value"]
        rows[title] = [
            {"sentence": number, "objects": objects, "right": right / objects}
            for number, (objects, right) in sorted(sentences.items())
            if objects >= FEW
        ]
    return rows


def figure(rows: dict[str, list[dict]]) -> Figure:
    drawing = Figure(figsize=(7, 2.6), layout="constrained")
    axes = drawing.add_subplot()
    for place, ((title, parts), colour) in enumerate(zip(rows.items(), COLOURS, strict=True)):
        at = np.array([part["sentence"] for part in parts]) + 0.4 * place - 0.2
        axes.bar(at, [part["right"] for part in parts], width=0.4, label=title, color=colour)
    axes.set_xticks([part["sentence"] for part in parts])
    axes.set(xlabel="sentence of the prompt that mentions an object first", ylabel="objects right, %", ylim=(0, 100))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    return drawing


def table(rows: dict[str, list[dict]]) -> Table:
    columns = [part["sentence"] for part in next(iter(rows.values()))]
    counts = ["objects", *(part["objects"] for part in next(iter(rows.values())))]
    return Table(
        ["right, %, by sentence", *map(str, columns)],
        [counts, *([title, *(f"{part['right']:.1f}" for part in parts)] for title, parts in rows.items())],
    )


def compared(report: dict) -> dict:
    """Objects right, in percent, read whole less cut."""
    [line] = [line for line in report["compared"] if line["score"] == "objects_right"]
    sign = -1 if line["a"] == "original" else 1
    low, high = sorted((sign * line["low"], sign * line["high"]))
    return {"difference": sign * line["difference"], "low": low, "high": high}


def main() -> None:
    arguments = read_options(__doc__, seeds=[10, 11, 12], prompts=100, output=Path("runs/by-sentence"))
    reports = {seed: draw(seed, arguments.prompts, arguments.output) for seed in arguments.seeds}
    rows = by_sentence(reports)
    values = {
        seed: {
            title: entry["scores"]["objects_right"]["value"]
            for title, entry in zip(WAYS.values(), report["encoders"].values(), strict=True)
        }
        | {"compared": compared(report)}
        for seed, report in reports.items()
    }
    lines = [
        [seed, *(f"{of_seed[title]:.1f}" for title in WAYS.values()), cell(*of_seed["compared"].values(), "+.1f")]
        for seed, of_seed in values.items()
    ]
    overall = Table(["objects right, %: seed", *WAYS.values(), "difference"], lines)
    measured = {"prompts": arguments.prompts, "by_sentence": rows, "seeds": values}
    publish("by_sentence", measured, overall, table(rows))
    figure(rows).savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()
