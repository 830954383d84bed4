"""Suppressed heads against their definition; folders of ablated models: test_ablation_export."""

import pytest
import torch
from helpers.suppression import literally
from torch import Tensor

from debias_diffusion.ablation.suppression import Suppressed
from debias_diffusion.clip.blocks import causal_attention, full_attention


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
