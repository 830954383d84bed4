"""What the losses of test_step need beside their formulas: blocks and components."""

import pytest
import torch
from helpers.literal import literal_rebuilt

from debias_diffusion.methods import objectives
from debias_diffusion.methods.objectives import contrastive_loss, rebuild_from_components, sigmoid_loss


def features(batch=9, dim=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, dim, generator=generator, dtype=torch.float64)


def test_large_batches_are_taken_in_blocks_with_the_same_loss_and_gradient(monkeypatch):
    scale, bias = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (5.0, -3.0))
    image, text = features(11, seed=1).requires_grad_(), features(11, seed=2).requires_grad_()

    def both():
        terms = contrastive_loss(image, text, scale, 0.1), sigmoid_loss(image, text, scale, bias)
        return [(term, *torch.autograd.grad(term, (image, text, scale))) for term in terms]

    at_once = both()
    monkeypatch.setattr(objectives, "_BLOCK", 4)
    for plain, in_blocks in zip(at_once, both(), strict=True):
        torch.testing.assert_close(in_blocks, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("batch", "dim"), [(9, 6), (6, 30), (7, 7)])
def test_rebuilding_equals_the_svd_and_its_gradient_leaves_the_basis_out(batch, dim):
    x = features(batch, dim).requires_grad_()
    rebuilt = rebuild_from_components(x, 3)
    expected = literal_rebuilt(x, 3)
    torch.testing.assert_close(rebuilt, expected, rtol=0, atol=1e-12)
    direction = features(batch, dim, seed=5)
    ours, theirs = (torch.autograd.grad((y * direction).sum(), x)[0] for y in (rebuilt, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_repeated_images_do_not_break_the_decomposition():
    # An SVD of this fails to converge or has NaN gradients in trainers that differentiate it.
    x = features(1, 16).expand(8, 16).float().clone().requires_grad_()
    rebuilt = rebuild_from_components(x, 4)
    rebuilt.square().sum().backward()
    torch.testing.assert_close(rebuilt, x, rtol=0, atol=1e-5)
    assert x.grad.isfinite().all() and x.grad.abs().sum() > 0
