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
from research.toymodels.stage import run_stage
from research.toymodels.unet import Pairs, denoising_loss, encode_pairs, in_training

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
    denoise = denoising_loss(pipe, 64, 3, compiled=False)
    with in_training(pipe.unet):
        stage = Path(f"{options.output}-stage")
        run_stage(stage, pipe.unet, lambda step: denoise(by_turns[step % 2], step), steps=options.steps, peak=3e-4)
    pipe.save_pretrained(options.output)
