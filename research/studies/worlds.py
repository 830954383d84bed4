"""Toy SDXLs that differ from the shipped one in what may turn advice round: makes them, for studies to draw with.

    python -m research.studies.worlds [--output runs/worlds] [--worlds unet-1 unet-2 sink-75 sink-84 ...]

`unet-1` and `unet-2` are trained from scratch like the shipped UNet, from other weights and in another order, for 5,000
steps instead of 16,000. All others are the shipped UNet, trained further:

- `sink-75`, `sink-84`, `sink-92`: with a loss on the attention that BOS gets in the mean. The last goes on from the one
  before. Users report 90 to 99% for Stable Diffusion 1.4.
- `kohya`, `tags`: as a community trains its checkpoints, on captions of all lengths, or on lists of tags, in kohya's
  reading at 225 tokens.
- `long`: on whole captions in overlapping chunks, of 152 and of 227 positions by turns.

Leaves for each a folder `sdxl`, and `made.json`: how it was made, the digest of its UNet, objects right on short
prompts of development scenes, and where its attention goes at 77, 152 and 227 positions. What was killed goes on from
its last checkpoint.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.models.attention_processor import Attention, AttnProcessor

from debias_diffusion.files import sha256, write_json
from debias_diffusion.pipelines import with_long_prompts
from debias_diffusion.pipelines.attention_shares import PARTS, attention_shares
from debias_diffusion.pipelines.sharpening import attention_logits
from debias_diffusion.text.chunks import TRAINED_POSITIONS
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.grammar import caption, short_prompt
from debias_diffusion.toyworld.scenes import scene
from debias_diffusion.toyworld.shipped import GUIDANCE_SCALE, STEPS, shipped
from research.toymodels import sdxl
from research.toymodels.scores import score_sdxl
from research.toymodels.stage import run_stage
from research.toymodels.unet import Pairs, denoising_loss, encode_pairs, in_training, saved_pairs, train_unet

from .harness import read_options
from .tags import tagged

FIRST = 600_000  # captions from here on, which no other toy model has learned from
FEW, MANY = 8000, 60_000  # pairs; the shipped UNet had as many as the second
LENGTHS = (TRAINED_POSITIONS, 152, 227)


def scenes_of(pipe, positions: int, split: str) -> Iterator[tuple]:
    """Scenes and their captions that take so many positions."""
    short = positions == TRAINED_POSITIONS
    pairs = (short_prompt(split, at) if short else (scene(split, at), caption(split, at)) for at in itertools.count())
    return (pair for pair in pairs if pipe.prompt_layout(clean(pair[1].text)).positions == positions)


def cut_pairs(pipe, folder: Path, count: int, start: int) -> list[Pairs]:
    """Captions cut at 77 tokens, as SDXL learned; the same for every world."""
    pipe.set_long_prompt(reading="cut")
    return [saved_pairs(folder.parent / f"pairs-{start}.safetensors", lambda: encode_pairs(pipe, count, start=start))]


def kohya_pairs(pipe, folder: Path, **drawn) -> list[Pairs]:
    pipe.set_long_prompt(reading="kohya", positions=227)
    return [encode_pairs(pipe, FEW, start=FIRST, **drawn)]


def tag_pairs(pipe, folder: Path) -> list[Pairs]:
    return kohya_pairs(pipe, folder, draw=partial(tagged, "train-tags"))


def long_pairs(pipe, folder: Path) -> list[Pairs]:
    drawn = (scenes_of(pipe, positions, "train-long") for positions in LENGTHS[1:])
    return [encode_pairs(pipe, FEW // 2, draw=lambda _, pairs=pairs: next(pairs)) for pairs in drawn]


class World(NamedTuple):
    """How a UNet is made.

    Attributes:
        pairs: that it learns from, by turns.
        settings: of `train_unet`.
        weights: the seed of new weights. None: the shipped ones.
        bos: the share of attention that the loss pulls BOS to. None: no loss on it.
        start: the world whose UNet is trained further. None: the shipped one.
    """

    pairs: Callable[[StableDiffusionXLPipeline, Path], list[Pairs]]
    settings: dict
    weights: int | None = None
    bos: float | None = None
    start: str | None = None


_SCRATCH = partial(cut_pairs, count=MANY, start=0)
_SINK, _FURTHER = partial(cut_pairs, count=FEW, start=FIRST), {"peak": 3e-4, "warmup": 200, "compiled": False}
WORLDS = {
    "unet-1": World(_SCRATCH, {"steps": 5000, "seed": 11}, weights=12),
    "unet-2": World(_SCRATCH, {"steps": 5000, "seed": 21}, weights=22),
    "sink-75": World(_SINK, {"steps": 3000, "seed": 4, **_FURTHER}, bos=0.75),
    "sink-84": World(_SINK, {"steps": 1500, "seed": 5, **_FURTHER}, bos=0.92),
    "sink-92": World(_SINK, {"steps": 1000, "seed": 8, **_FURTHER}, bos=0.97, start="sink-84"),
    "kohya": World(kohya_pairs, {"steps": 1000, "seed": 6, **_FURTHER}),
    "tags": World(tag_pairs, {"steps": 1000, "seed": 7, **_FURTHER}),
    "long": World(long_pairs, {"steps": 1000, "seed": 3, **_FURTHER}),
}


class BosShares(AttnProcessor):
    """diffusers' plain processor, which notes the share of BOS in each call, of the rows that have a text."""

    def __init__(self, shares: list[torch.Tensor]):
        self.shares = shares

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *args, **kwargs):
        rows = encoder_hidden_states.flatten(1).any(1)
        weights = attention_logits(attn, hidden_states[rows], encoder_hidden_states[rows]).softmax(-1)
        self.shares.append(weights[..., 0].mean())
        return super().__call__(attn, hidden_states, encoder_hidden_states, *args, **kwargs)


def train_sink(folder: Path, pipe, pairs: Pairs, bos: float, *, steps, seed, peak, warmup, compiled=False, batch=64):
    """As `train_unet`, with the squared error of BOS's share in each cross-attention added to the loss."""
    shares, denoise = [], denoising_loss(pipe, batch, seed, compiled)

    def loss(step: int) -> torch.Tensor:
        shares.clear()
        denoising = denoise(pairs, step)
        return denoising + sum((share - bos) ** 2 for share in shares) / len(shares)

    with in_training(pipe.unet):
        for module in pipe.unet.modules():
            if isinstance(module, Attention) and module.is_cross_attention:
                module.set_processor(BosShares(shares))
        run_stage(folder, pipe.unet, loss, steps=steps, peak=peak, warmup=warmup)


def where_attention_goes(pipe, captions: int = 10) -> dict[int, dict[str, float]]:
    """By positions: each part's share, a mean over captions of development scenes and three steps."""
    found = {}
    for positions in LENGTHS:
        texts = [clean(text.text) for _, text in itertools.islice(scenes_of(pipe, positions, "development"), captions)]
        call = {"guidance_scale": GUIDANCE_SCALE, "generator": torch.Generator().manual_seed(0)}
        rows = [row for text in texts for row in attention_shares(pipe, text, STEPS, **call)]
        found[positions] = {part: round(fmean(row[part] for row in rows), 4) for part in PARTS}
    return found


def make(name: str, folder: Path) -> dict:
    """Makes the world in the folder unless it is there, and says what it is."""
    world = WORLDS[name]
    base = folder.parent / world.start / "sdxl" if world.start else shipped("toy/sdxl")
    pipe = with_long_prompts(StableDiffusionXLPipeline.from_pretrained(base))
    pipe.set_progress_bar_config(disable=True)
    pairs = world.pairs(pipe, folder)
    pipe.set_long_prompt()
    if world.weights is not None:
        width = pipe.text_encoder.config.hidden_size + pipe.text_encoder_2.config.hidden_size
        pipe.unet = sdxl.new_unet(width, pipe.text_encoder_2.config.projection_dim, world.weights)
    if world.bos is None:
        train_unet(folder / "stage", pipe, pairs, **world.settings)
    else:
        train_sink(folder / "stage", pipe, *pairs, world.bos, **world.settings)
    right = score_sdxl(pipe, "development", 200)[0]["objects"]
    made = {"settings": world.settings, "bos": world.bos, "short prompts, objects right": right}
    made["attention"] = where_attention_goes(pipe)
    sdxl.save(pipe, folder / "sdxl")
    made["sha256"] = sha256(folder / "sdxl" / "unet" / "diffusion_pytorch_model.safetensors")
    write_json(folder / "made.json", made)
    return made


if __name__ == "__main__":
    options = read_options(__doc__, output="runs/worlds", worlds=[*WORLDS])
    for name in options.worlds:
        print(f"{name}: {make(name, Path(options.output, name))}", flush=True)
