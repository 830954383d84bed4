import math

import pytest
import torch
import torch.nn.functional as F
from helpers.literal import literal_info_nce, literal_rebuilt, literal_sigmoid

from debias_diffusion.errors import UserError
from debias_diffusion.methods import objectives
from debias_diffusion.methods.objectives import (
    contrastive_loss,
    dual_caption_objective,
    rebuild_from_components,
    sigmoid_loss,
)


def features(batch=9, dim=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, dim, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_contrastive_loss_is_the_written_out_one(smoothing):
    image, text = features(seed=1).requires_grad_(), features(seed=2)
    ours = contrastive_loss(image, text, torch.tensor(3.0), smoothing)
    theirs = literal_info_nce(image, text, 3.0, smoothing)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(x, image)[0] for x in (ours, theirs)), rtol=0, atol=1e-12)


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


def test_sigmoid_loss_is_the_written_out_one():
    image, text = features(seed=1), features(seed=2)
    ours = sigmoid_loss(image, text, torch.tensor(3.0), torch.tensor(-2.0))
    assert ours.item() == pytest.approx(literal_sigmoid(image, text, 3.0, -2.0).item(), rel=1e-12)


def test_losses_of_closed_forms():
    eye, zeros = torch.eye(4, dtype=torch.float64), torch.zeros(4, 3)
    expected = math.log(1 + 3 * math.exp(-7))
    assert contrastive_loss(eye, eye, torch.tensor(7.0)).item() == pytest.approx(expected, rel=1e-12)
    # Without any similarity every pair is a coin toss at bias 0.
    assert sigmoid_loss(zeros, zeros, torch.tensor(1.0), torch.tensor(0.0)).item() == pytest.approx(4 * math.log(2))


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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_features_that_are_not_finite_make_the_loss_so(bad):
    x = features(9, 6)
    x[3, 2] = bad
    assert rebuild_from_components(x, 3).isnan().any()


def test_half_precision_is_computed_in_float32():
    x = features(9, 6).bfloat16()
    assert rebuild_from_components(x, 3).dtype == torch.float32


@pytest.mark.parametrize(("batch", "dim", "components"), [(8, 100, 7), (100, 8, 8), (8, 8, 0), (256, 512, 255)])
def test_components_that_change_nothing_are_refused(batch, dim, components):
    limit = min(batch - 1, dim)
    with pytest.raises(UserError, match=rf"components is {components}.*less than {limit}.*\({batch - 1}\).*\({dim}\)"):
        rebuild_from_components(torch.zeros(batch, dim), components)


def test_the_two_losses_are_weighted_and_the_short_one_sees_rebuilt_images():
    names, scale = ("image", "long_text", "short_text"), torch.tensor(4.0, dtype=torch.float64)
    compared = {name: features(seed=i) for i, name in enumerate(names)}
    losses, report = dual_caption_objective(compared, scale, None, 0.1, 3, 0.1)
    image, long_text, short_text = (F.normalize(x, dim=-1) for x in compared.values())
    long = literal_info_nce(image, long_text, scale, 0.1)
    short = literal_info_nce(rebuild_from_components(image, 3), short_text, scale, 0.1)
    torch.testing.assert_close(sum(losses.values()), 0.1 * short + 0.9 * long, rtol=0, atol=1e-12)
    torch.testing.assert_close((report["short"], report["long"]), (short, long), rtol=0, atol=1e-12)
    assert not report["short"].requires_grad
