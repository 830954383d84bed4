"""A toy SDXL whose UNet has learned from long prompts, to see whether sharper attention still helps it.

    python -m research.studies.long_unet [--output runs/long-sdxl] [--pairs 8000] [--steps 1000]
    python -m research reproduce sharpening-unet --papers research/studies --world toy-test --root runs --seeds 16 17 18

The shipped UNet is trained further, by turns on whole captions of 152 and of 227 positions, read by the checkpoint's
encoders in overlapping chunks. A second a step on one core; it continues where it was killed.
"""

import itertools
from pathlib import Path

from debias_diffusion.encoders.spec import ORIGINAL, EncoderSpec
from debias_diffusion.pipelines.rendering.options import Sampling
from debias_diffusion.pipelines.rendering.renderer import Renderer
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.scenes import scene
from research.toymodels.unet import Pairs, encode_pairs, train_unet

from .harness import CPU, read_options

SPLIT, POSITIONS = "train-long", (152, 227)


def encode_whole(pipe, positions: int, count: int) -> Pairs:
    """`count` pairs whose captions take so many positions."""
    pairs = ((scene(SPLIT, at), caption(SPLIT, at)) for at in itertools.count())
    fitting = (pair for pair in pairs if pipe.prompt_layout(clean(pair[1].text)).positions == positions)
    return encode_pairs(pipe, count, draw=lambda _: next(fitting))


if __name__ == "__main__":
    options = read_options(__doc__, output="runs/long-sdxl", pairs=8000, steps=1000)
    pipe = Renderer("toy/sdxl", Sampling(), CPU).pipeline(EncoderSpec.parse(ORIGINAL))
    by_turns = [encode_whole(pipe, positions, options.pairs // 2) for positions in POSITIONS]
    settings = {"steps": options.steps, "seed": 3, "peak": 3e-4, "warmup": 200, "compiled": False}
    train_unet(Path(f"{options.output}-stage"), pipe, by_turns, **settings)
    pipe.save_pretrained(options.output)
