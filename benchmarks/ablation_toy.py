"""Attention ablation in the toy world: what each search finds, and what it changes on scenes it has not seen.

    python benchmarks/ablation_toy.py [--pairs 1000] [--scenes 1000] [--output runs/ablation-toy]

Searches use scenes of the split validation, scores those of development. Tables:

searches   {toy/clip, toy/long-clip, toy/debias-clip} x {naive, ga, bp, all} x {margin, robust}, heads of the image
           tower; bp has no robust one. All tries every set of heads, so it is what ga can reach at best.
beta       toy/clip, the set that maximises the margin for each beta
way        heads of the image tower replaced by their mean, which ordinary weights hold, beside suppressed ones
pairs      toy/clip, ga on fewer pairs, with three seeds
text       heads of the text tower, beta 0 and 0.1, the best of all sets by the robust fitness
sdxl       heads of the text tower but of its last block, which SDXL does not read, beta 0, the best of all sets by the
           robust fitness; written into the weights, the encoder then draws in the toy SDXL

Each score stands beside its difference from the model as it is, with a 95% interval over queries. Everything finished
is kept. Prints the tables and writes them to benchmarks/results/ as ablation_toy.md, with the numbers as .json.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from harness import publish, read_options

from debias_diffusion.ablation.heads import ABLATED, Ablation
from debias_diffusion.ablation.saved import FILE, is_ablation, read_ablation, write_ablation
from debias_diffusion.app.ablate import AblateConfig, ablate
from debias_diffusion.data.sources import open_data
from debias_diffusion.encoders import load_two_tower
from debias_diffusion.eval.images.generation import GenerationConfig, evaluate_generation
from debias_diffusion.eval.intervals import paired_difference
from debias_diffusion.eval.report import Table, cell
from debias_diffusion.eval.retrieval import hits
from debias_diffusion.eval.robustness import edit_caption
from debias_diffusion.head_search.population import TextPopulation
from debias_diffusion.head_search.problems import KS, TextProblem, every_mask
from debias_diffusion.retrieval import encode_images, encode_texts, recall_ranks

SEARCHED, SCORED = "toy/validation", "toy/development"
MODELS = ("toy/clip", "toy/long-clip", "toy/debias-clip")
EDITS = {"keep": "whole", "move4": "1 and 4 swapped", "remove": "1 removed"}
BETAS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.0)
PAIRS, SEEDS = (50, 100, 200, 500), (0, 1, 2)
TEXT_PAIRS = 100  # three texts for each, of up to 248 tokens
BATCH = 50
DRAWN = {
    "objects_right": "objects right, %",
    "objects_right_late": "first mentioned in sentence 5 or later, %",
    "empty_filled": "empty places filled, %",
    "fid_own": "FID",
}


@dataclass(frozen=True)
class Row:
    """A search, and its place in the tables."""

    table: str
    config: AblateConfig


def rows(output: Path, pairs: int) -> Iterator[Row]:
    """All searches; a search of several tables has a row in each and runs once."""

    def of(table: str, model: str, search: str, **settings) -> Row:
        settings = {"limit": pairs} | settings
        folder = "-".join([model.rpartition("/")[2], search, *(str(settings[name]) for name in sorted(settings))])
        return Row(table, AblateConfig(model, str(output / folder), data=SEARCHED, search=search, **settings))

    for model in MODELS:
        yield of("searches", model, "naive")
        yield of("searches", model, "bp")
        for search in ("ga", "all"):
            yield of("searches", model, search)
            yield of("searches", model, search, fitness="robust")
    for beta in BETAS:
        yield of("beta", MODELS[0], "all", beta=beta)
    for model in MODELS:
        yield of("way", model, "all")
        yield of("way", model, "all", beta=0.0)
        yield of("way", model, "all", way="mean")
    for limit in PAIRS:
        for seed in SEEDS:
            yield of("pairs", MODELS[0], "ga", limit=limit, seed=seed)
    for model in MODELS:
        for beta in (0.0, 0.1):
            yield of("text", model, "all", tower="text", beta=beta, fitness="robust", limit=TEXT_PAIRS)


class Scores:
    """Hits of each query by edit, in percent: R@1 text to image, and of whole captions mean-R of both directions."""

    def __init__(self, scenes: int):
        captions, self.images = open_data(SCORED, None)
        self.records = captions.records[:scenes]
        self.texts = {edit: [edit_caption(record.caption, edit) for record in self.records] for edit in EDITS}

    @torch.inference_mode()
    def of(self, model: str) -> dict[str, np.ndarray]:
        backbone = load_two_tower(model).eval()
        images, _, _ = encode_images(backbone, self.records, self.images, 100, "cpu", f"images, {model}")
        scores = {}
        for edit, texts in self.texts.items():
            ranks = recall_ranks(images, encode_texts(backbone, texts, 100, "cpu", progress=False))
            scores[EDITS[edit]] = hits(ranks["text_to_image"], 1)
            if edit == "keep":
                scores["mean-R"] = np.mean([hits(of_way, k) for of_way in ranks.values() for k in KS], axis=0)
        return scores


def measure(output: Path, pairs: int, scenes: int) -> list[dict]:
    """Every row: its settings, the heads that it ablates, and its scores beside those of the untouched model."""
    scores, measured = Scores(scenes), []
    untouched = {model: scores.of(model) for model in MODELS}
    for row in rows(output, pairs):
        config = row.config
        done = Path(config.output) / "done"  # a search that finds no head leaves no ablation
        if not done.exists():
            ablate(config)
            done.touch()
        heads, after, before = [], untouched[config.model], untouched[config.model]
        if is_ablation(config.output):
            ablation = read_ablation(config.output)[2]
            heads = ablation.names_below(ABLATED) if config.search == "bp" else ablation.names
            after = scores.of(config.output)
        names = ("model", "search", "tower", "way", "fitness", "beta", "limit", "seed")
        measured.append(
            {
                "table": row.table,
                **{name: getattr(config, name) for name in names},
                "heads": heads,
                "scores": {
                    name: {
                        "untouched": float(before[name].mean()),
                        "value": float(after[name].mean()),
                        **paired_difference(after[name], before[name]),
                    }
                    for name in before
                },
            }
        )
    return measured


# ---- in the toy SDXL


@torch.inference_mode()
def best_read_heads(model: str, folder: Path) -> str:
    """The model with the best set of suppressed text heads, of all blocks but the last; the model itself if none is."""
    if not is_ablation(folder):
        backbone = load_two_tower(model).eval()
        captions, images = open_data(SEARCHED, None)
        records = captions.records[:TEXT_PAIRS]
        features, _, _ = encode_images(backbone, records, images, 100, "cpu", f"images, {model}")
        texts = {edit: [edit_caption(record.caption, edit) for record in records] for edit in EDITS}
        batches = {edit: [backbone.tokenize(part) for part in _split(of_edit)] for edit, of_edit in texts.items()}
        problem = TextProblem(TextPopulation(backbone.text, 0.0), features, batches)
        problem.make_margins()
        blocks, heads = problem.shape
        read = every_mask(blocks - 1, heads)
        masks = torch.cat([read, torch.zeros(len(read), heads, dtype=torch.bool)], dim=1)
        best = masks[problem.fitness(problem.encode(masks), None).argmax()].view(blocks, heads)
        if not best.any():
            return model
        folder.mkdir(parents=True, exist_ok=True)
        write_ablation(folder / FILE, model, backbone, Ablation.of_mask("text", best, 0.0))
    return str(folder)


def _split(texts: list[str]) -> Iterator[list[str]]:
    return (texts[start : start + BATCH] for start in range(0, len(texts), BATCH))


def draw(output: Path, prompts: int) -> list[dict]:
    """Of each model: the suppressed heads, and what its images show beside those of the untouched one."""
    encoders = {model: best_read_heads(model, output / f"sdxl-{model.rpartition('/')[2]}") for model in MODELS}
    names = list(dict.fromkeys([*encoders, *encoders.values()]))
    settings = dict(output=str(output / "sdxl"), data=SCORED, limit=prompts, images_at_once=20)
    report = evaluate_generation(GenerationConfig(names, base="toy/sdxl", own_features="toy/features", **settings))
    scores = dict(zip(names, (entry["scores"] for entry in report["encoders"].values()), strict=True))
    labels = dict(zip(names, report["encoders"], strict=True))
    lines = {(line["a"], line["b"], line["score"]): line for line in report["compared"]}
    return [
        {
            "model": model,
            "heads": read_ablation(ablated)[2].names if ablated != model else [],
            "scores": {
                name: {
                    "untouched": scores[model][name]["value"],
                    "value": scores[ablated][name]["value"],
                    **_difference(lines.get((labels[ablated], labels[model], name))),
                }
                for name in DRAWN
            },
        }
        for model, ablated in encoders.items()
    ]


def _difference(line: dict | None) -> dict:
    """Of an encoder with itself, which is not compared, 0."""
    return {name: line[name] if line else 0.0 for name in ("difference", "low", "high")}


# ---- tables


def tables(measured: list[dict], drawn: list[dict]) -> list[Table | str]:
    columns = {
        "searches": ("model", "search", "fitness"),
        "beta": ("model", "beta"),
        "way": ("model", "way", "beta"),
        "pairs": ("model", "limit", "seed"),
        "text": ("model", "beta"),
    }
    parts = []
    for table, names in columns.items():
        lines = [line for line in measured if line["table"] == table]
        scores = list(lines[0]["scores"])
        cells = [
            [
                *(line[name] for name in names),
                ", ".join(line["heads"]) or "none",
                *(_cell(line["scores"][score]) for score in scores),
            ]
            for line in lines
        ]
        header = ["pairs" if name == "limit" else name for name in names]
        parts += [f"## {table.capitalize()}", Table([*header, "ablated", *scores], cells)]
    cells = [
        [line["model"], ", ".join(line["heads"]) or "none", *map(_cell, line["scores"].values())] for line in drawn
    ]
    return [*parts, "## SDXL", Table(["model", "ablated", *DRAWN.values()], cells)]


def _cell(score: dict) -> str:
    return f"{score['value']:.1f}: {cell(score['difference'], score['low'], score['high'], '+.1f')}"


def main() -> None:
    arguments = read_options(__doc__, pairs=1000, scenes=1000, prompts=100, output=Path("runs/ablation-toy"))
    measured = measure(arguments.output, arguments.pairs, arguments.scenes)
    drawn = draw(arguments.output, arguments.prompts)
    settings = {name: value for name, value in vars(arguments).items() if name != "output"}
    publish("ablation_toy", {"settings": settings, "rows": measured, "drawn": drawn}, *tables(measured, drawn))


if __name__ == "__main__":
    main()
