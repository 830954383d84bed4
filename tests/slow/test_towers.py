"""What torch.compile makes of tiny towers."""

import os
import shutil

import pytest
import torch
from diffusers import StableDiffusionPipeline
from helpers import tiny_sdxl
from helpers.draw import LONG
from helpers.fix_clip_steps import N, pixels, prompted
from helpers.same_steps import TINY, assert_same_steps
from helpers.tiny_sdxl import assemble

from debias_diffusion.clip.image_tower import MaskedPatches
from debias_diffusion.methods.fix_clip import draw_mask
from debias_diffusion.pipelines import with_long_prompts

BACKEND = "inductor" if shutil.which("c++") else "aot_eager"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", TINY)
def test_compiled_towers_give_the_same(family, checkpointing):
    assert BACKEND == "inductor" or "CI" not in os.environ, "no C++ compiler: what torch.compile builds goes UNTESTED"
    plain, other = TINY[family](), TINY[family]()
    if checkpointing:
        other.checkpoint_activations()
    torch.compiler.reset()
    other.compile(backend="aot_eager" if checkpointing else BACKEND)
    graphs = torch._dynamo.utils.counters["stats"]
    assert_same_steps(plain, other, [2], rtol=1e-4, atol=1e-4)
    assert (before := graphs["unique_graphs"]) > 0
    assert_same_steps(plain, other, [3, 5, 9], rtol=1e-4, atol=1e-4)
    assert graphs["unique_graphs"] == before  # no length is compiled anew


def test_a_compiled_image_tower_with_prompts_gives_the_same():
    backbone, images = prompted(), pixels()
    masked = MaskedPatches(torch.stack([draw_mask(0.5, N, 0, 0, str(at)) for at in range(3)]), None)
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
