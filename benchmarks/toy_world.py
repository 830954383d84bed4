"""The toy world over several seeds: what each encoder retrieves and draws, with both UNets and both caption styles.

    python benchmarks/toy_world.py --prepared runs/toyworld/prepared-sdxl [--seeds 4 5 6] [--output runs/toy-world]

A seed is a run of the quickstart on scenes of its own (split test-SEED), then images of the same encoders under further
conditions: the UNet that `toymodels/prepared_unet.py` prepared for joined chunks and shifted states, and captions that
refer back. Everything finished is kept, so a stopped run continues, and seeds may run side by side.

Prints tables and writes them to benchmarks/results/ as toy_world-4-5-6.md, with the numbers as toy_world-4-5-6.json.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import torch
from machine import machine

from debias_diffusion.app.quickstart import RESULTS_FOLDER, Models, QuickstartConfig, quickstart
from debias_diffusion.eval.common.report import Table, versions
from debias_diffusion.eval.pictures.generation import GenerationConfig, evaluate_generation
from debias_diffusion.eval.pictures.reading import ALL, READERS
from debias_diffusion.eval.pictures.toy_objects import BY_TELLING
from debias_diffusion.eval.story import DIRECTIONS, EDITS, SHORT_FOLDER, SHORT_PROMPTS, keys_of
from debias_diffusion.files import read_json_object, write_json, write_text

RESULTS = Path(__file__).parent / "results"
REPORT = "generation.json"
DATA = {  # by kind of prompt, the data of a split
    "long prompts": "toy/{}",
    "short prompts": SHORT_PROMPTS + "{}",
    "long prompts that refer back": "toy/referring-{}",
    "short prompts that refer back": SHORT_PROMPTS + "referring-{}",
}
# Columns of a table: the score in a report, its title, and its digits.
COLUMNS = {
    "objects_right": ("objects right, %", 1),
    "objects_right_late": ("first mentioned later", 1),
    "objects_precision": ("precision, %", 1),
    "objects_f1": ("F1, %", 1),
    "empty_filled": ("empty places filled, %", 1),
    "background_right": ("background right, %", 1),
    "fid_own": ("FID", 1),
    "dino_score": ("DINO", 3),
}
COMPARED = ("objects_right", "objects_f1", "empty_filled", "fid_own", "dino_score")
TRAINED = ("debias-clip", "debias-clip-sdxl")  # compared with all others


def run_seed(config: QuickstartConfig, bases: dict[str, str], models: Models | None = None) -> dict:
    """What the encoders of one quickstart retrieve, and by condition what their images show.

    Args:
        bases: by name of a UNet, the SDXL checkpoint that has it; the first is the quickstart's.
        models: of the quickstart.
    """
    quickstart(config, models)
    results, drawn = Path(config.output) / RESULTS_FOLDER, {}
    for unet, base in bases.items():
        for kind, data in DATA.items():
            own = read_json_object(results / (SHORT_FOLDER if data.startswith(SHORT_PROMPTS) else "") / REPORT)
            condition = f"{unet}, {kind}"
            wanted = own["settings"] | {"base": base, "data": data.format(config.split)}
            folder = Path(config.output).parent / condition.replace(", ", "-").replace(" ", "-")
            is_own = wanted == own["settings"]
            report = own if is_own else evaluate_generation(GenerationConfig(**(wanted | {"output": str(folder)})))
            drawn[condition] = _drawn(report)
    return {"retrieval": read_json_object(Path(config.output) / "report.json")["retrieval"], "drawn": drawn}


def _drawn(report: dict) -> dict:
    """By encoder its scores, the encoders compared, and what a symbolic reader can know at most."""
    keys = keys_of(list(report["encoders"]))
    return {
        "encoders": {
            keys[label]: {score: value for score, value in entry["scores"].items() if score in (*COLUMNS, BY_TELLING)}
            for label, entry in report["encoders"].items()
        },
        "compared": [
            line | {"a": keys[line["a"]], "b": keys[line["b"]]}
            for line in report["compared"]
            if line["score"] in COMPARED
        ],
        "ceilings": report["ceilings"],
    }


# ---- tables


def as_markdown(seeds: dict[int, dict]) -> str:
    """The tables of all seeds."""
    parts = [f"## Retrieval: R@1 in %, {' / '.join(DIRECTIONS.values())}".replace("_", " "), _retrieval_table(seeds)]
    for condition in next(iter(seeds.values()))["drawn"]:
        drawn = {seed: result["drawn"][condition] for seed, result in seeds.items()}
        parts += [f"## {condition[0].upper()}{condition[1:]}", _score_table(drawn), _telling_table(drawn)]
        parts += [_difference_table(drawn)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _retrieval_table(seeds: dict[int, dict]) -> str:
    rows = [
        [seed, key, *(" / ".join(f"{of_key[edit][name]:.1f}" for name in DIRECTIONS) for edit in EDITS)]
        for seed, result in seeds.items()
        for key, of_key in result["retrieval"].items()
    ]
    return Table(["seed", "encoder", *EDITS.values()], rows).markdown()


def _score_table(drawn: dict[int, dict]) -> str:
    columns = {
        score: column
        for score, column in COLUMNS.items()
        if any(score in scores for scores in next(iter(drawn.values()))["encoders"].values())
    }
    rows = [
        [seed, key, *(_number(scores.get(score), digits) for score, (_, digits) in columns.items())]
        for seed, result in drawn.items()
        for key, scores in result["encoders"].items()
    ]
    return Table(["seed", "encoder", *(title for title, _ in columns.values())], rows).markdown()


def _number(score: dict | None, digits: int) -> str:
    return "" if score is None else f"{score['value']:.{digits}f}"


def _telling_table(drawn: dict[int, dict]) -> str:
    """Objects right by how they are told; empty where every sentence stands alone."""
    rows = [
        [seed, line["told"], line["objects"], *(f"{line[reader]:.1f}" for reader in READERS), *cells]
        for seed, result in drawn.items()
        for line in result["ceilings"]
        if line["told"] != ALL
        for cells in [[_of_way(scores, line["told"]) for scores in result["encoders"].values()]]
    ]
    readers, keys = (f"reader, {title}" for title in READERS.values()), next(iter(drawn.values()))["encoders"]
    return Table(["seed", "told", "objects", *readers, *keys], rows).markdown() if rows else ""


def _of_way(scores: dict, way: str) -> str:
    return next(f"{line['value']:.1f}" for line in scores[BY_TELLING] if line["told"] == way)


def _difference_table(drawn: dict[int, dict]) -> str:
    """What DeBias-CLIP gains on each of the others, as it is and for SDXL, with 95% intervals over images."""
    lines = {
        (seed, f"{line['a']} minus {line['b']}", line["score"]): line
        for seed, result in drawn.items()
        for line in result["compared"]
        if line["a"] in TRAINED
    }
    scores = [score for score in COMPARED if any(score == key[-1] for key in lines)]
    rows = [
        [seed, pair, *(_interval(score, lines.get((seed, pair, score))) for score in scores)]
        for seed, pair in dict.fromkeys(key[:2] for key in lines)
    ]
    return Table(["seed", "difference", *(COLUMNS[score][0] for score in scores)], rows).markdown()


def _interval(score: str, line: dict | None) -> str:
    if line is None:
        return ""
    digits = COLUMNS[score][1]
    if line["low"] is None:  # of too few images
        return f"{line['difference']:+.{digits}f}"
    return "{0:+.{3}f} ({1:+.{3}f} to {2:+.{3}f})".format(line["difference"], line["low"], line["high"], digits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", help="SDXL checkpoint with the prepared UNet; without it, the plain one alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[4, 5, 6])
    parser.add_argument("--output", type=Path, default=Path("runs/toy-world"))
    arguments = parser.parse_args()
    bases = {"plain UNet": "toy/sdxl"} | ({"prepared UNet": arguments.prepared} if arguments.prepared else {})
    seeds = {}
    for seed in arguments.seeds:
        output = str(arguments.output / f"seed-{seed}" / "quickstart")
        seeds[seed] = run_seed(QuickstartConfig(output, seed=seed, split=f"test-{seed}"), bases)
    measured = {"machine": machine(torch.device("cpu")), "versions": versions(), "settings": asdict(QuickstartConfig())}
    print("\n" + as_markdown(seeds))
    name = "-".join(["toy_world", *map(str, seeds)])
    write_json(RESULTS / f"{name}.json", measured | {"seeds": seeds})
    write_text(RESULTS / f"{name}.md", as_markdown(seeds))


if __name__ == "__main__":
    main()
