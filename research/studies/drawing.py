"""How studies draw and score prompts of the toy world with a pipeline of their own."""

from collections.abc import Sequence

from PIL import Image
from tqdm import trange

from debias_diffusion.encoders.spec import EncoderSpec
from debias_diffusion.eval.images.objects import compare_images, compare_objects, objects_numbers
from debias_diffusion.pipelines.rendering.images import encode_batch, render_batch
from debias_diffusion.pipelines.rendering.options import Sampling
from debias_diffusion.pipelines.rendering.prompts import ImagePrompt
from debias_diffusion.pipelines.rendering.renderer import Renderer
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.checker import Comparison
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.scenes import ARRANGEMENTS, scene
from debias_diffusion.toyworld.shipped import GUIDANCE_SCALE, STEPS

from .harness import CPU

SAMPLING = Sampling(steps=STEPS, guidance_scale=GUIDANCE_SCALE, height=48, width=48)
SCORES = {"objects_right": "objects right, %", "objects_right_late": "first mentioned in sentence 5 or later, %"}
SCORES |= {"objects_precision": "precision, %", "empty_filled": "empty places filled, %"}


class LongPrompts:
    """The captions of the first `count` scenes of each split, and the scores of their images, by family of scenes."""

    def __init__(self, splits: Sequence[str], count: int):
        self.numbers = [(split, at) for split in splits for at in range(count)]
        captions = [caption(*number) for number in self.numbers]
        self.texts = [each.text for each in captions]
        self.mentions = [each.first_mentions() for each in captions]
        self.families = [(split, at // ARRANGEMENTS) for split, at in self.numbers]

    def read(self, images: Sequence[Image.Image]) -> list[Comparison]:
        """What an image of each prompt shows of its scene."""
        return compare_images(images, [scene(*number) for number in self.numbers])

    def scores(self, shown: Sequence[Comparison]) -> dict:
        return objects_numbers(shown, self.mentions, self.families)

    def differences(self, a: Sequence[Comparison], b: Sequence[Comparison]) -> dict:
        """a less b, by score"""
        return compare_objects(a, b, self.mentions, self.families)


def pipeline_of(encoder: str, base: str = "toy/sdxl"):
    """A pipeline of the base with an encoder, as `evaluate` writes it."""
    pipe = Renderer(base, SAMPLING, CPU).pipeline(EncoderSpec.parse(encoder))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw_texts(
    pipe, texts: Sequence[str], numbers: Sequence[int] | None = None, at_once: int = 25
) -> list[Image.Image]:
    """An image of each text, from the noise of these numbers. Texts that are drawn together share their length."""
    numbers = range(len(texts)) if numbers is None else numbers
    prompts, images = [ImagePrompt(clean(text), at) for text, at in zip(texts, numbers, strict=True)], []
    for start in trange(0, len(prompts), at_once, desc="drawing", leave=False):
        batch = prompts[start : start + at_once]
        images += render_batch(pipe, encode_batch(pipe, batch, SAMPLING), [each.seed for each in batch], SAMPLING)
    return images
