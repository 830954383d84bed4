"""Suppressed heads: against their definition, in the keys of caches, and loaded with a folder."""

from functools import partial

import pytest
import torch
from helpers.suppression import literally
from helpers.tiny_clip import tiny_clip
from torch import Tensor

from debias_diffusion.ablation.heads import Ablation
from debias_diffusion.ablation.suppression import Suppressed
from debias_diffusion.clip.blocks import causal_attention, full_attention
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.encoders.spec import load_two_tower

CAPTIONS = ["A red cat.", "Two dogs sit on a very long green bench beside the river.", ""]
close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)


def drawn(first: float) -> list[Tensor]:
    """Query, key and value in float64; `first` makes token 0 draw more attention, or less."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 7, 3, 4, generator=generator, dtype=torch.float64)
    key[:, 0] = first * query.mean(dim=1)
    query[..., 0] += abs(first)
    return [part.clone().requires_grad_() for part in (query, key, value)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("first", [0.0, 30.0, -30.0])
def test_suppression_is_the_papers_in_value_and_gradient(causal, first):
    parts, beta = drawn(first), torch.tensor([0.1, 0.7, 1.0], dtype=torch.float64, requires_grad=True)
    suppressed = Suppressed(beta, causal_attention if causal else full_attention)
    results = []
    for result in (literally(*parts, beta, causal), suppressed(*parts)):
        results.append((result, *torch.autograd.grad(result.square().sum(), [*parts, beta])))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-11)


@torch.no_grad()
def test_suppressed_heads_are_in_the_key_of_caches_and_loaded_with_a_folder(tmp_path):
    backbone, images = tiny_clip().eval(), torch.rand(2, 3, 32, 32)
    before, tokens = backbone.image_digest(), backbone.tokenize(CAPTIONS)
    Ablation("image", ((1.0, 1.0), (1.0, 0.0))).apply(backbone)
    assert backbone.image_digest() != before
    Ablation("text", ((1.0,) * 4, (0.5,) * 4, (1.0,) * 4)).apply(backbone)
    backbone.save(tmp_path)
    for load in (load_backbone, load_two_tower):
        loaded = load(str(tmp_path)).eval()
        close(loaded.encode_image(images), backbone.encode_image(images))
        close(loaded.encode_text(tokens), backbone.encode_text(tokens))
