"""The toy world over several seeds: what each encoder retrieves and draws, with both UNets and both caption styles.

    python benchmarks/toy_world.py --seeds 7 8 9 [--prepared runs/toyworld/prepared-sdxl] [--output runs/toy-world]

A seed is a run of the quickstart on scenes of its own (split test-SEED), then further encoders, and images of all of
them under further conditions. The encoders: the original read in chunks, overlapping or not, and DeBias-CLIP for SDXL
beside a second encoder that is read so; with overlap, both of them aligned with the UNet that draws, in as many steps;
DeBias-CLIP for SDXL aligned together with the second encoder, so that nothing is read in chunks; and Long-CLIP's recipe
with DeBias-CLIP's w. The conditions: captions that refer back, and the UNet that `toymodels/prepared_unet.py` prepared
for joined chunks and shifted states, with fewer of the encoders. Everything finished is kept, so a stopped run
continues, and seeds may run side by side.

Prints tables and writes them to benchmarks/results/ as toy_world-7-8-9.md, with the numbers as toy_world-7-8-9.json.
"""

import shutil
from dataclasses import asdict, replace
from pathlib import Path

from harness import EDITS, publish, read_options

from debias_diffusion.app.align.command import align
from debias_diffusion.app.options import AlignConfig
from debias_diffusion.app.quickstart import RESULTS_FOLDER, QuickstartConfig, Setup, quickstart
from debias_diffusion.eval.images.generation import GenerationConfig, evaluate_generation
from debias_diffusion.eval.images.objects import BY_KIND, KIND_SCORES, KIND_TITLES
from debias_diffusion.eval.images.references import ALL, READERS
from debias_diffusion.eval.images.rendered import FOLDER
from debias_diffusion.eval.report import Table, cell
from debias_diffusion.eval.robustness import RobustnessConfig, evaluate_robustness
from debias_diffusion.eval.story import SHORT_FOLDER, SHORT_PROMPTS
from debias_diffusion.files import read_json_object
from debias_diffusion.toymodels.fine_tuning import RECIPES, VALIDATION, toy_training
from debias_diffusion.toyworld.grammar import STYLES
from debias_diffusion.toyworld.pairs import write_pairs
from debias_diffusion.training.loop import train

REPORT = "generation.json"
FULL = {"scenes": 1000, "prompts": 200, "train": "all"}  # settings of each quickstart
DIRECTIONS = {"t2i_r1": "text_to_image", "i2t_r1": "image_to_text"}
LEARNING_RATE, PRECISION = 3e-4, "bf16"  # of alignments
DATA = {  # by kind of prompt, the data of a split
    "long prompts": "toy/{}",
    "short prompts": SHORT_PROMPTS + "{}",
    "long prompts that refer back": "toy/referring-{}",
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
COMPARED = ("objects_right", "objects_f1", "empty_filled", "fid_own", "dino_score", *KIND_SCORES.values())
LONG, DEBIAS, SDXL = RECIPES
ORIGINAL, IN_CHUNKS, OVERLAPPING = "clip", "clip in chunks", "clip in overlapping chunks"
LIGHT, SDXL_OVERLAPPING = "long-clip, w = 0.1", f"{SDXL}, the second in overlapping chunks"
ALIGNED_ORIGINAL, ALIGNED = (f"{name}, aligned" for name in (OVERLAPPING, SDXL_OVERLAPPING))
ALIGNED_BOTH = f"{SDXL} and the second, aligned"
# With further UNets than the first.
FEWER = (IN_CHUNKS, OVERLAPPING, LONG, DEBIAS, SDXL, ALIGNED_ORIGINAL, ALIGNED_BOTH)
PAIRS = (  # the encoders whose difference is shown
    (OVERLAPPING, IN_CHUNKS),
    *((DEBIAS, other) for other in (LONG, LIGHT, IN_CHUNKS)),
    *((SDXL, other) for other in (LONG, LIGHT, DEBIAS, IN_CHUNKS, OVERLAPPING)),
    *((SDXL_OVERLAPPING, other) for other in (IN_CHUNKS, OVERLAPPING, SDXL)),
    *((ALIGNED_ORIGINAL, other) for other in (IN_CHUNKS, OVERLAPPING)),
    *((ALIGNED, other) for other in (IN_CHUNKS, OVERLAPPING, SDXL_OVERLAPPING, ALIGNED_ORIGINAL)),
    *((ALIGNED_BOTH, other) for other in (IN_CHUNKS, OVERLAPPING, ALIGNED_ORIGINAL, ALIGNED)),
)


def run_seed(config: QuickstartConfig, bases: dict[str, str], setup: Setup | None = None, steps: int = 150) -> dict:
    """What the encoders of one seed retrieve, and by condition what their images show.

    Args:
        bases: by name of a UNet, the SDXL checkpoint that has it; the first is the quickstart's.
        setup: of the quickstart.
        steps: of each alignment.
    """
    quickstart(config, setup)
    setup = setup or Setup()
    folder, results = Path(config.output).parent, Path(config.output) / RESULTS_FOLDER
    light = _train_light(config, setup, folder)
    trained = {recipe: str(Path(config.output) / "training" / recipe) for recipe in RECIPES}
    # A difference is that of a later row minus an earlier one.
    encoders = {ORIGINAL: "cut:original", IN_CHUNKS: "separate:original", OVERLAPPING: "original"}
    of_rows = {LONG: trained[LONG], LIGHT: light, DEBIAS: trained[DEBIAS], SDXL: trained[SDXL]}
    # The second encoder's chunks do not overlap: the pipelines' did not when these rows were frozen.
    encoders |= {row: f"separate:{encoder}" for row, encoder in of_rows.items()}
    encoders[SDXL_OVERLAPPING] = trained[SDXL]
    drawn = {}
    for number, (unet, base) in enumerate(bases.items()):
        wanted = FEWER if number else (*encoders, ALIGNED_ORIGINAL, ALIGNED, ALIGNED_BOTH)
        alignments = _alignments(config, setup, trained[SDXL], base, folder / "aligned" / unet.replace(" ", "-"), steps)
        rows = {row: encoders.get(row) or _aligned(alignments[row]) for row in wanted}
        for kind, data in DATA.items():
            short = data.startswith(SHORT_PROMPTS)
            condition, before = f"{unet}, {kind}", results / (SHORT_FOLDER if short else "")
            settings = read_json_object(before / REPORT)["settings"]
            output = folder / condition.replace(", ", "-").replace(" ", "-")
            settings |= {"base": base, "data": data.format(config.split), "output": str(output)}
            report = _with_finished_images(before, GenerationConfig(**settings | {"encoders": list(rows.values())}))
            drawn[condition] = _drawn(report, list(rows))
    return {"retrieval": _retrieval(config, results, folder, light), "drawn": drawn}


def _train_light(config: QuickstartConfig, setup: Setup, folder: Path) -> str:
    """Long-CLIP's recipe with the w of DeBias-CLIP's, in all else as the quickstart trains it."""
    pairs = write_pairs(Path(config.output) / "data", VALIDATION, setup.pairs)
    settings = setup.training | {"short_weight": 0.1, "seed": config.seed}
    train(toy_training(LONG, setup.clip, *pairs, folder / "long-clip-light", **settings))
    return str(folder / "long-clip-light")


def _alignments(
    config: QuickstartConfig, setup: Setup, encoder: str, base: str, folder: Path, steps: int
) -> dict[str, AlignConfig]:
    """By row, the alignment with the UNet of `base`, on captions of both styles."""
    data, images = write_pairs(folder.parent / "pairs", VALIDATION, setup.pairs, styles=STYLES)
    settings = AlignConfig(
        base=base,
        data=str(data),
        output=str(folder),
        images=str(images),
        encoder=encoder,
        batch=min(48, setup.training.get("batch", 128)),
        epochs=steps,  # more than enough; max_steps ends the run
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        warmup=steps // 10,
        precision=PRECISION,
        seed=config.seed,
        validation=VALIDATION,
        max_bad=0,
        workers=1,
        eval_every=steps,
        checkpoint_every=50,
        latent_cache=str(folder.parent / "latents"),
    )
    return {
        ALIGNED_ORIGINAL: replace(settings, encoder="original", output=str(folder / "original")),
        ALIGNED: replace(settings, output=str(folder / "sdxl")),
        ALIGNED_BOTH: replace(settings, encoder_2="stretch", output=str(folder / "both")),
    }


def _aligned(run: AlignConfig) -> str:
    """The name of the encoder that an alignment makes."""
    folder = align(run)
    if folder is None:
        raise KeyboardInterrupt  # asked to stop, it has left a checkpoint to go on from
    return str(folder)


def _with_finished_images(before: Path, config: GenerationConfig) -> dict:
    """The report; images that the quickstart has rendered with the same settings are not rendered again."""
    own = read_json_object(before / REPORT)["settings"]
    images = Path(config.output) / FOLDER
    if (own["base"], own["data"]) == (config.base, config.data) and not images.exists():
        shutil.copytree(before / FOLDER, images)
    return evaluate_generation(config)


def _retrieval(config: QuickstartConfig, results: Path, folder: Path, light: str) -> dict:
    """By encoder and edit of the captions, R@1 in percent, of all two-towers of the seed."""
    more = {LIGHT: light} | {
        f"{row}, {unet.name}": str(unet / name)
        for unet in sorted((folder / "aligned").iterdir())
        for row, name in ((ALIGNED, "sdxl"), (ALIGNED_BOTH, "both"))
        if (unet / name).is_dir()
    }
    of_quickstart = read_json_object(results / "robustness.json")
    retrieval = {label.rpartition("/")[2]: _recall(entry) for label, entry in of_quickstart["encoders"].items()}
    settings = of_quickstart["settings"] | {"encoders": list(more.values()), "output": str(folder / "robustness")}
    report = evaluate_robustness(RobustnessConfig(**settings))
    for row, entry in zip(more, report["encoders"].values(), strict=True):
        retrieval[row] = _recall(entry)
    return retrieval


def _recall(entry: dict) -> dict:
    recall = entry["recall_at_1_percent"]
    return {edit: {name: recall[edit][way] for name, way in DIRECTIONS.items()} for edit in EDITS}


def _drawn(report: dict, rows: list[str]) -> dict:
    """By encoder its scores, the encoders compared, and what a symbolic reader can know at most."""
    names = dict(zip(report["encoders"], rows, strict=True))
    compared = [line | {"a": names[line["a"]], "b": names[line["b"]]} for line in report["compared"]]
    return {
        "encoders": {
            names[label]: {score: value for score, value in entry["scores"].items() if score in (*COLUMNS, BY_KIND)}
            for label, entry in report["encoders"].items()
        },
        "compared": [line for line in compared if line["score"] in COMPARED and (line["a"], line["b"]) in PAIRS],
        "ceilings": report["ceilings"],
    }


# ---- tables


def tables(seeds: dict[int, dict]) -> list[Table | str]:
    """Titles and the tables of all seeds."""
    parts = [f"## Retrieval: R@1 in %, {' / '.join(DIRECTIONS.values())}".replace("_", " "), _retrieval_table(seeds)]
    for condition in next(iter(seeds.values()))["drawn"]:
        drawn = {seed: result["drawn"][condition] for seed, result in seeds.items()}
        parts += [f"## {condition[0].upper()}{condition[1:]}", _score_table(drawn), *_telling_table(drawn)]
        parts += [_difference_table(drawn)]
    return parts


def _retrieval_table(seeds: dict[int, dict]) -> Table:
    rows = [
        [seed, key, *(" / ".join(f"{of_key[edit][name]:.1f}" for name in DIRECTIONS) for edit in EDITS)]
        for seed, result in seeds.items()
        for key, of_key in result["retrieval"].items()
    ]
    return Table(["seed", "encoder", *EDITS.values()], rows)


def _score_table(drawn: dict[int, dict]) -> Table:
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
    return Table(["seed", "encoder", *(title for title, _ in columns.values())], rows)


def _number(score: dict | None, digits: int) -> str:
    return "" if score is None else f"{score['value']:.{digits}f}"


def _telling_table(drawn: dict[int, dict]) -> list[Table]:
    """Objects right by how they are told; none where every sentence stands alone."""
    rows = [
        [seed, line["told"], line["objects"], *(f"{line[reader]:.1f}" for reader in READERS), *cells]
        for seed, result in drawn.items()
        for line in result["ceilings"]
        if line["told"] != ALL
        for cells in [[_of_way(scores, line["told"]) for scores in result["encoders"].values()]]
    ]
    readers, keys = (f"reader, {title}" for title in READERS.values()), next(iter(drawn.values()))["encoders"]
    return [Table(["seed", "told", "objects", *readers, *keys], rows)] if rows else []


def _of_way(scores: dict, way: str) -> str:
    return next(f"{line['value']:.1f}" for line in scores[BY_KIND] if line["told"] == way)


def _difference_table(drawn: dict[int, dict]) -> Table:
    """The differences of `PAIRS`, with 95% intervals over images."""
    lines = {
        (seed, f"{line['a']} minus {line['b']}", line["score"]): line
        for seed, result in drawn.items()
        for line in result["compared"]
    }
    scores = [score for score in COMPARED if any(score == key[-1] for key in lines)]
    rows = [
        [seed, pair, *(_interval(score, lines.get((seed, pair, score))) for score in scores)]
        for seed in drawn
        for pair in (f"{a} minus {b}" for a, b in PAIRS)
        if any((seed, pair, score) in lines for score in scores)
    ]
    titles = (COLUMNS[score][0] if score in COLUMNS else KIND_TITLES[score] for score in scores)
    return Table(["seed", "difference", *titles], rows)


def _interval(score: str, line: dict | None) -> str:
    digits = COLUMNS.get(score, (score, 1))[1]
    return "" if line is None else cell(line["difference"], line["low"], line["high"], f"+.{digits}f")


def main() -> None:
    arguments = read_options(__doc__, seeds=[7, 8, 9], prepared=None, output=Path("runs/toy-world"))
    bases = {"plain UNet": "toy/sdxl"} | ({"prepared UNet": arguments.prepared} if arguments.prepared else {})
    seeds = {}
    for seed in arguments.seeds:
        output = str(arguments.output / f"seed-{seed}" / "quickstart")
        seeds[seed] = run_seed(QuickstartConfig(output, seed=seed, split=f"test-{seed}", **FULL), bases)
    measured = {"settings": asdict(QuickstartConfig(**FULL)), "seeds": seeds}
    publish("-".join(map(str, ["toy_world", *seeds])), measured, *tables(seeds))


if __name__ == "__main__":
    main()
