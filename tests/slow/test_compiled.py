"""Compiled towers, which take seconds to trace."""

import torch
from helpers.fix_clip_steps import N, pixels, prompted

from debias_diffusion.methods.fix_clip import MaskedView
from debias_diffusion.models.image_tower import MaskedPatches


def test_an_image_tower_with_prompts_gives_the_same():
    backbone, images = prompted(), pixels()
    masked = MaskedPatches(torch.stack([MaskedView(0.5).draw(N, 0, 0, str(at)) for at in range(3)]), None)
    expected = backbone.image.encode_with_masked(images, [0, 3], masked)
    torch.compiler.reset()
    backbone.compile(backend="aot_eager")
    for ours, plain in zip(backbone.image.encode_with_masked(images, [0, 3], masked), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)
