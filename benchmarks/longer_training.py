"""Does longer training bring an encoder that reads in one piece level with the original in chunks?

    python benchmarks/longer_training.py [--recipes long-clip debias-clip-sdxl] [--times 1 2] [--seeds 7 8 9]
                                         [--prompts 200] [--output runs/longer-training]

Long-CLIP's recipe and DeBias-CLIP's for SDXL, trained as in the quickstart, but with so many times its steps and its
pairs: R@1 text to image among 1,000 scenes, and toy/sdxl's images of long prompts, the second encoder being the
checkpoint's own in overlapping chunks. Without seeds: seed 0 on development scenes, with 100 prompts. Everything
finished is kept. Prints tables and writes benchmarks/results/longer_training-7-8-9.{json,md}.
"""

from pathlib import Path

from harness import EDITS, publish, read_options

from debias_diffusion.app.quickstart import IMAGES_AT_ONCE, Setup
from debias_diffusion.eval.images.generation import GenerationConfig, evaluate_generation
from debias_diffusion.eval.report import Table, cell
from debias_diffusion.eval.robustness import RobustnessConfig, evaluate_robustness
from debias_diffusion.toymodels.fine_tuning import VALIDATION, toy_training
from debias_diffusion.toyworld.pairs import write_pairs
from debias_diffusion.training.loop import train

RECIPES = ("long-clip", "debias-clip-sdxl")
STEPS = 150  # of the quickstart's trainings
ORIGINALS = {"original in chunks": "separate:toy/clip", "original in overlapping chunks": "toy/clip"}
SHOWN_EDITS = ("keep", "move4", "remove")
SCORES = {"objects_right": "objects right, %", "empty_filled": "empty places filled, %", "fid_own": "FID"}


def trained(recipe: str, times: int, seed: int, output: Path) -> str:
    """The run with so many times the quickstart's budget."""
    pairs = write_pairs(output / f"data-{times}", VALIDATION, times * Setup.pairs)
    run = output / f"{recipe}-{times}"
    if train(toy_training(recipe, "toy/clip", *pairs, run, steps=times * STEPS, seed=seed)) is None:
        raise KeyboardInterrupt  # asked to stop, it has left a checkpoint to go on from
    return str(run)


def run_seed(seed: int, split: str, recipes: list[str], times: list[int], prompts: int, output: Path) -> dict:
    """By row its R@1 by edit (none of the originals) and the scores of its images; and rows compared with originals."""
    runs = {f"{recipe}, {n} x": trained(recipe, n, seed, output) for n in times for recipe in recipes}
    data = f"toy/{split}"
    robustness = evaluate_robustness(RobustnessConfig([*runs.values()], str(output / "robustness"), data, limit=1000))
    recalls = dict(zip(runs, robustness["encoders"].values(), strict=True))
    rows = ORIGINALS | runs
    settings = GenerationConfig(
        [*rows.values()],
        str(output / f"images-{prompts}"),
        base="toy/sdxl",
        data=data,
        limit=prompts,
        seed=seed,
        images_at_once=IMAGES_AT_ONCE,
        own_features="toy/features",
    )
    report = evaluate_generation(settings)
    names = dict(zip(report["encoders"], rows, strict=True))
    result = {
        names[label]: {"scores": {score: entry["scores"][score] for score in SCORES}}
        for label, entry in report["encoders"].items()
    }
    for row, entry in recalls.items():
        recall = entry["recall_at_1_percent"]
        result[row]["recall"] = {edit: recall[edit]["text_to_image"] for edit in SHOWN_EDITS}
    for line in report["compared"]:
        if line["score"] in SCORES and names[line["b"]] in ORIGINALS:
            numbers = {name: line[name] for name in ("difference", "low", "high")}
            result[names[line["a"]]].setdefault(f"minus {names[line['b']]}", {})[line["score"]] = numbers
    return result


def tables(seeds: dict[str, dict]) -> list[Table]:
    """A table of the scores of all seeds, and one of the objects right compared with the originals."""
    rows = next(iter(seeds.values()))
    scores, differences = [], []
    for row in rows:
        of_seeds = [result[row] for result in seeds.values()]
        recalls = [
            ", ".join(f"{of['recall'][edit]:.1f}" for of in of_seeds) if "recall" in of_seeds[0] else ""
            for edit in SHOWN_EDITS
        ]
        scores.append(
            [row, *recalls, *(", ".join(f"{of['scores'][name]['value']:.1f}" for of in of_seeds) for name in SCORES)]
        )
        for original in ORIGINALS:
            lines = [of[f"minus {original}"]["objects_right"] for of in of_seeds if f"minus {original}" in of]
            if lines:
                cells = (cell(line["difference"], line["low"], line["high"], "+.1f") for line in lines)
                differences.append([row, original, "; ".join(cells)])
    header = ["encoder", *(f"R@1 {EDITS[edit]}" for edit in SHOWN_EDITS), *SCORES.values()]
    return [Table(header, scores), Table(["encoder", "minus", "objects right, points"], differences)]


def main() -> None:
    arguments = read_options(
        __doc__, recipes=[*RECIPES], times=[1, 2], seeds=[], prompts=100, output=Path("runs/longer-training")
    )
    splits = {seed: f"test-{seed}" for seed in arguments.seeds} or {0: "development"}
    seeds = {
        split: run_seed(*(seed, split, arguments.recipes, arguments.times, arguments.prompts), arguments.output / split)
        for seed, split in splits.items()
    }
    settings = {"times": arguments.times, "prompts": arguments.prompts}
    names = "-".join(map(str, arguments.seeds or ["development"]))
    publish(f"longer_training-{names}", {"settings": settings, "seeds": seeds}, *tables(seeds))


if __name__ == "__main__":
    main()
