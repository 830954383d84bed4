"""What the weight of the state term costs in retrieval and brings in images: the curve that the default lies on.

    python benchmarks/trade_off.py [--weights 0 0.3 1 3 10 30] [--output runs/trade-off]

DeBias-CLIP's recipe with `--keep-states W` in the toy world, trained as in the quickstart, on development scenes:
R@1 text to image among 1,000, and images of 100 long prompts and 60 short ones. Everything finished is kept.
Prints a table and writes benchmarks/results/trade_off.{json,md} and docs/trade-off.png.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from machine import machine
from matplotlib.figure import Figure
from seeds import EDITS, RESULTS

from debias_diffusion.app.quickstart import IMAGES_AT_ONCE
from debias_diffusion.eval.images.generation import GenerationConfig, evaluate_generation
from debias_diffusion.eval.report import Table, versions
from debias_diffusion.eval.robustness import RobustnessConfig, evaluate_robustness
from debias_diffusion.files import write_json, write_text
from debias_diffusion.toymodels.fine_tuning import VALIDATION, toy_training
from debias_diffusion.toyworld.pairs import write_pairs
from debias_diffusion.training.loop import train

PICTURE = Path(__file__).parents[1] / "docs" / "trade-off.png"
SPLITS = {"long": ("toy/development", 100), "short": ("toy/short-development", 60)}
SHOWN = {"objects_right": "objects right, %", "empty_filled": "empty places filled, %", "fid_own": "FID"}
TRAINED_ON = 4000  # pairs, as in the quickstart


def trained(weight: float, output: Path) -> str:
    """The run with this weight."""
    pairs, run = write_pairs(output / "data", VALIDATION, TRAINED_ON), output / f"keep-{weight:g}"
    train(replace(toy_training("debias-clip", "toy/clip", *pairs, run), keep_states=weight))
    return str(run)


def scores(runs: dict[float, str], output: Path) -> dict:
    """By weight, R@1 text to image by edit of the captions, and the images' scores; and those of chunks."""
    encoders = list(runs.values())
    robustness = evaluate_robustness(
        RobustnessConfig(encoders, output=str(output / "robustness"), data="toy/development", limit=1000)
    )
    drawn = {}
    for kind, (data, limit) in SPLITS.items():
        settings = dict(output=str(output / kind), data=data, limit=limit, images_at_once=IMAGES_AT_ONCE)
        report = evaluate_generation(
            GenerationConfig(["toy/clip", *encoders], base="toy/sdxl", own_features="toy/features", **settings)
        )
        drawn[kind] = [entry["scores"] for entry in report["encoders"].values()]
    rows = {"chunks": {kind: _shown(columns[0]) for kind, columns in drawn.items()}}
    for number, (weight, entry) in enumerate(zip(runs, robustness["encoders"].values(), strict=True), 1):
        recall = {edit: entry["recall_at_1_percent"][edit]["text_to_image"] for edit in EDITS}
        rows[f"{weight:g}"] = {"recall": recall} | {kind: _shown(columns[number]) for kind, columns in drawn.items()}
    return rows


def _shown(numbers: dict) -> dict:
    return {name: numbers[name] for name in SHOWN}


def table(rows: dict) -> Table:
    edits = ("keep", "move4", "remove")
    header = ["W", *(f"R@1 {EDITS[edit]}" for edit in edits), *SHOWN.values(), "short prompts: objects right, %"]
    cells = [
        [
            weight,
            *(f"{row['recall'][edit]:.1f}" if "recall" in row else "" for edit in edits),
            *(f"{row['long'][name]['value']:.1f}" for name in SHOWN),
            f"{row['short']['objects_right']['value']:.1f}",
        ]
        for weight, row in rows.items()
    ]
    return Table(header, cells)


def figure(rows: dict) -> Figure:
    """Objects right against R@1 without the first sentence, a point for each weight, with 95% intervals."""
    drawing = Figure(figsize=(7, 4.5), layout="constrained", dpi=150)
    axes = drawing.subplots()
    chunks = rows["chunks"]["long"]["objects_right"]["value"]
    axes.axhline(chunks, color="C7", linestyle=":", label="the original in overlapping chunks")
    weights = [weight for weight in rows if weight != "chunks"]
    points = [(rows[weight]["recall"]["remove"], rows[weight]["long"]["objects_right"]) for weight in weights]
    xs, ys = [x for x, _ in points], [y["value"] for _, y in points]
    bars = [[y["value"] - y["low"] for _, y in points], [y["high"] - y["value"] for _, y in points]]
    axes.errorbar(xs, ys, yerr=bars, marker="o", capsize=3, label="DeBias-CLIP, states kept with weight W")
    for number, (weight, x, y) in enumerate(zip(weights, xs, ys, strict=True)):
        place = (6, -12) if number % 2 else (6, 6)  # by turns, or neighbours would cover each other
        axes.annotate(f"W = {weight}", (x, y), xytext=place, textcoords="offset points", fontsize="small")
    axes.margins(x=0.1)
    axes.set_xlabel("R@1 text to image without the first sentence, %")
    axes.set_ylabel("objects right in images of long prompts, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return drawing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=float, nargs="+", default=[0, 0.3, 1, 3, 10, 30])
    parser.add_argument("--output", type=Path, default=Path("runs/trade-off"))
    arguments = parser.parse_args()
    runs = {weight: trained(weight, arguments.output) for weight in arguments.weights}
    rows = scores(runs, arguments.output)
    print("\n" + table(rows).markdown())
    measured = {"machine": machine(torch.device("cpu")), "versions": versions()}
    write_json(RESULTS / "trade_off.json", measured | {"weights": rows})
    write_text(RESULTS / "trade_off.md", table(rows).markdown() + "\n")
    figure(rows).savefig(PICTURE)


if __name__ == "__main__":
    main()
