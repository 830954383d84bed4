"""Meet in the middle: a small LoRA of a UNet, trained for one encoder in one reading, whose states stay as they are.

    python -m research.studies.fit_unet [--unets toy/sdxl ...] [--rows ...] [--loras ...] [--pairs 4000] [--steps 800]
        [--split development] [--prompts 100] [--output runs/fit]

Every LoRA learns from the same scenes in the same order: three steps on whole captions at 227 positions, then one on
short ones at 77, as people's prompts have both. "none" is the UNet as it is. The scores are of prompts of a split that
nothing learns from: objects right, those first mentioned in sentence 5 or later, empty places filled; and of short
prompts with the LoRA and without it, because a LoRA can be left out up to 77 positions.

Rules, written before the scenes of new seeds are drawn. For a trained encoder: with its LoRA it draws at least as many
objects as the same encoder aligned with as many pairs and steps, and at most two points fewer than the best chunks with
a LoRA. For SDXL's own encoders: chunks with a LoRA gain at least three points on chunks without, and short prompts lose
at most one. What is not reached is published and not built.

A stopped run goes on from its last checkpoint. Writes a folder for each cell, with the LoRA in diffusers' format and
`scores.json`, and of what is there research/results/fit_unet-SPLIT.md and .json.
"""

import itertools
import json
from pathlib import Path

import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from debias_diffusion.encoders.spec import ORIGINAL
from debias_diffusion.eval.report import Table
from debias_diffusion.files import write_json
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.scenes import scene
from research.toymodels.scores import score_sdxl
from research.toymodels.stage import run_stage
from research.toymodels.unet import Pairs, denoising_loss, encode_pairs, in_training, saved_pairs

from .drawing import SCORES, LongPrompts, draw_texts, pipeline_of
from .harness import publish, read_options
from .worlds import scenes_of

POSITIONS, BATCH, SHORT_EVERY = 227, 64, 4
ROWS = {
    "original, overlap": (ORIGINAL, "overlap"),
    "original, separate": (ORIGINAL, "separate"),
    "original, kohya": (ORIGINAL, "kohya"),
    "Long-CLIP": ("toy/long-clip", "overlap"),
    "DeBias-CLIP": ("toy/debias-clip", "overlap"),
    "DeBias-CLIP for SDXL": ("toy/debias-clip-sdxl", "overlap"),
}
KEYS_VALUES = ("to_k", "to_v")
# By name: the layers of cross-attention, the rank, the peak of the learning rate.
LORAS = {"none": None} | {f"kv-{rank}": (KEYS_VALUES, rank, 2e-3) for rank in (4, 16, 64)}
LORAS |= {"all-64": ((*KEYS_VALUES, "to_q", "to_out.0"), 64, 1e-3)}


def pairs_of(pipe, reading: str, folder: Path, count: int) -> list[Pairs]:
    """Whole captions, three times, and short ones: what the steps learn from by turns."""

    def encoded(short: bool) -> Pairs:
        pipe.set_long_prompt(reading=reading, positions=77 if short else POSITIONS)
        drawn = scenes_of(pipe, 77, "train-long") if short else whole(pipe)
        return encode_pairs(pipe, count // (SHORT_EVERY - 1 if short else 1), draw=lambda _: next(drawn))

    parts = [
        saved_pairs(folder / f"pairs-{count}-{kind}.safetensors", lambda short=kind == "short": encoded(short))
        for kind in ("whole", "short")
    ]
    return [*[parts[0]] * (SHORT_EVERY - 1), parts[1]]


def whole(pipe):
    """Scenes and long captions that fit the positions."""
    pairs = ((scene("train-long", at), caption("train-long", at)) for at in itertools.count())
    return (pair for pair in pairs if pipe.prompt_layout(clean(pair[1].text)).tokens <= POSITIONS - 2)


def train_lora(folder: Path, pipe, by_turns: list[Pairs], lora: tuple, steps: int) -> None:
    """Adds a LoRA to the UNet, trains it, and saves it as diffusers does."""
    layers, rank, peak = lora
    torch.manual_seed(0)
    named = "|".join(layer.replace(".", r"\.") for layer in layers)
    pipe.unet.requires_grad_(False)
    pipe.unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=rf".*attn2\.({named})"))
    denoise = denoising_loss(pipe, BATCH, 3, compiled=False)
    with in_training(pipe.unet):
        run_stage(
            folder / "stage",
            pipe.unet,
            lambda step: denoise(by_turns[step % SHORT_EVERY], step),
            steps=steps,
            peak=peak,
        )
    pipe.save_lora_weights(folder, unet_lora_layers=get_peft_model_state_dict(pipe.unet))


def scores_of(pipe, split: str, count: int) -> dict:
    prompts = LongPrompts([split], count)
    scores = prompts.scores(prompts.read(draw_texts(pipe, prompts.texts)))
    return scores | {"short": score_sdxl(pipe, split, count)[0]["objects"]}


def cell(folder: Path, unet: str, row: str, lora: str, options) -> dict:
    """The scores of one UNet, encoder and LoRA, made unless they are there."""
    file = folder / f"scores-{options.split}-{options.prompts}.json"
    if not file.exists():
        encoder, reading = ROWS[row]
        pipe = pipeline_of(encoder, unet)
        if LORAS[lora]:
            by_turns = pairs_of(pipe, reading, folder.parent, options.pairs)
            train_lora(folder, pipe, by_turns, LORAS[lora], options.steps)
        pipe.set_long_prompt(reading=reading, zero_empty_negative=True)  # zeros are what the UNet learned
        write_json(file, scores_of(pipe, options.split, options.prompts))
    return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    options = read_options(
        __doc__, unets=["toy/sdxl"], rows=[*ROWS], loras=[*LORAS], pairs=4000, steps=800, split="development",
        prompts=100, output="runs/fit",
    )  # fmt: skip
    found = {}
    for unet, row, lora in itertools.product(options.unets, options.rows, options.loras):
        place = Path(
            options.output, Path(unet).parent.name if Path(unet).exists() else "shipped", row.replace(", ", "-")
        )
        found[unet, row, lora] = cell(place / f"{lora}-{options.pairs}-{options.steps}", unet, row, lora, options)
    cells = [
        [*names, *(f"{scores[name]['value']:.1f}" for name in SCORES), f"{100 * scores['short']:.1f}"]
        for names, scores in found.items()
    ]
    table = Table(["UNet", "encoder, reading", "LoRA", *SCORES.values(), "short prompts, objects right, %"], cells)
    rows = {", ".join(names): scores for names, scores in found.items()}
    publish(f"fit_unet-{options.split}", vars(options) | {"cells": rows}, table)
