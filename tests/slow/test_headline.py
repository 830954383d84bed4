"""What the package is for: with all of a long prompt read, more of it is in the image."""

import torch
from diffusers import StableDiffusionXLPipeline

from debias_diffusion.pipelines import with_long_prompts
from debias_diffusion.toyworld.checker import compare, read_image
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.scenes import scene
from debias_diffusion.toyworld.shipped import GUIDANCE_SCALE, STEPS, shipped

NUMBERS = range(20)


def right_in_percent(pipe: StableDiffusionXLPipeline) -> float:
    """Of the objects of the scenes, those with their kind and colour in their place, found by the toy checker."""
    pipe.set_progress_bar_config(disable=True)
    prompts, noise = [caption("test", n).text for n in NUMBERS], [torch.Generator().manual_seed(n) for n in NUMBERS]
    images = pipe(prompts, generator=noise, num_inference_steps=STEPS, guidance_scale=GUIDANCE_SCALE).images
    pairs = zip(images, NUMBERS, strict=True)
    right = [there for image, n in pairs for there in compare(read_image(image), scene("test", n)).correct.values()]
    return 100 * sum(right) / len(right)


def test_twenty_long_prompts_read_whole_beat_the_same_cut_at_77_tokens_by_15_points():
    """Scenes are the truth and captions are composed from them: what reads or cuts prompts has no part in either."""
    pipe = StableDiffusionXLPipeline.from_pretrained(shipped("toy/sdxl"), add_watermarker=False)
    cut = right_in_percent(pipe)  # by diffusers itself
    whole = right_in_percent(with_long_prompts(pipe))
    assert whole > cut + 15 and whole > 70
