"""Compiled towers, which take seconds to trace."""

import pytest
import torch
from diffusers import StableDiffusionPipeline
from helpers import tiny_sdxl
from helpers.draw import LONG
from helpers.fix_clip_steps import N, pixels, prompted
from helpers.tiny_sdxl import assemble

from debias_diffusion.methods.fix_clip import MaskedView
from debias_diffusion.models.image_tower import MaskedPatches
from debias_diffusion.pipelines import with_long_prompts


def test_an_image_tower_with_prompts_gives_the_same():
    backbone, images = prompted(), pixels()
    masked = MaskedPatches(torch.stack([MaskedView(0.5).draw(N, 0, 0, str(at)) for at in range(3)]), None)
    expected = backbone.image.encode_with_masked(images, [0, 3], masked)
    torch.compiler.reset()
    backbone.compile(backend="aot_eager")
    for ours, plain in zip(backbone.image.encode_with_masked(images, [0, 3], masked), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("first", [None, 1])
def test_a_compiled_text_encoder_skips_layers(first):
    """Whichever call compiles it."""
    stock = assemble(StableDiffusionPipeline, tiny_sdxl.sd15_parts())
    call = {"device": None, "num_images_per_prompt": 1, "do_classifier_free_guidance": False}
    expected = {skip: with_long_prompts(stock).encode_prompt(LONG, **call, clip_skip=skip)[0] for skip in (None, 1)}
    torch.compiler.reset()
    stock.text_encoder = torch.compile(stock.text_encoder, backend="eager")
    pipe = with_long_prompts(stock)
    for skip in (first, None, 1, None):
        torch.testing.assert_close(pipe.encode_prompt(LONG, **call, clip_skip=skip)[0], expected[skip])
    assert not torch.allclose(expected[None], expected[1])
