"""One step against the paper's formulas: whole, in chunks, in two processes, in half precision; and the optimizer.

Methods with modules, views and features of their own: test_fix_clip and research/test_smart_clip.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.literal import literal_info_nce, literal_rebuilt, literal_sigmoid, literal_text
from helpers.steps import CPU, assert_same_gradients, assert_split_exactly, gradients, in_two_processes, prepared
from helpers.tiny_clip import tiny_clip, tiny_siglip

from debias_diffusion.methods import METHODS as RECIPES
from debias_diffusion.methods.dual_caption import DualCaption
from debias_diffusion.training.optimizer import Optimizer
from debias_diffusion.training.step import backward

COMPONENTS = 3
ADAMW = 0.1, (0.9, 0.999), 1e-8
# (family of the backbone, recipe, what is changed in it)
CASES = {
    "debias-clip": ("clip", "debias-clip", {}),
    "long-clip": ("clip", "long-clip", {}),
    "smart-clip-sampling": ("clip", "smart-clip-sampling", {}),
    "no-short": ("clip", "debias-clip", {"short_weight": 0.0}),
    "ordered-pad-20": ("clip", "debias-clip", {"sampling": "ordered", "padding": "pad-20", "short_weight": 0.7}),
    "pre-sot-whole-images": ("clip", "debias-clip", {"padding": "pre-sot", "components": 0}),
    "parts": ("clip", "long-clip", {"components": 1, "component_parts": 2}),
    "average": ("clip", "debias-clip", {"pooling": "average"}),
    "siglip": ("siglip", "debias-clip", {}),
    "siglip-average": ("siglip", "long-clip", {"pooling": "average"}),
}


def setup(case="debias-clip", *samples):
    """See `prepared`."""
    family, name, changes = CASES[case]
    components = min(RECIPES[name].components, COMPONENTS)
    method = replace(RECIPES[name], **{"components": components} | changes)
    return prepared(tiny_clip() if family == "clip" else tiny_siglip(), method, *samples)


def literal_loss(backbone, recipe, batch):
    """The paper's formulas on padded rows and open_clip's own forward passes, nothing shared, nothing skipped."""
    model = backbone.model
    v = F.normalize(model.encode_image(batch.images), dim=-1)
    texts = [F.normalize(part, dim=-1) for part in literal_text(backbone, batch.tokens).split(len(batch))]
    rebuilt = literal_rebuilt(v, recipe.components, recipe.component_parts) if recipe.components else v
    scale, smoothing, w = model.logit_scale.exp(), recipe.label_smoothing, recipe.short_weight

    def loss(image, text):
        if backbone.loss == "sigmoid":
            return literal_sigmoid(image, text, scale, model.logit_bias)
        return literal_info_nce(image, text, scale, smoothing)

    short = w * loss(rebuilt, texts[-1]) if w > 0 else 0
    return short + ((1 - w) * loss(v, texts[0]) if w < 1 else 0)


@pytest.fixture(scope="module")
def of_processes():
    return in_two_processes(setup, CASES)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_the_papers_however_the_batch_is_split(case, of_processes):
    backbone, recipe, _, batch = setup(case)
    assert len(batch.tokens) == len(batch) * (recipe.has_long + recipe.has_short)
    loss = literal_loss(backbone, recipe, batch)
    assert_split_exactly((backbone, recipe, None, batch), loss, case, of_processes)


def test_chunks_draw_the_same_at_random_both_times(monkeypatch):
    drawn, encode = [], DualCaption.encode
    monkeypatch.setattr(DualCaption, "encode", lambda *step: drawn.append(torch.rand(1).item()) or encode(*step))
    backbone, recipe, _, batch = setup()
    backward(backbone, recipe, batch, CPU, chunk=2)
    assert drawn[:3] == drawn[3:] and len(set(drawn)) == 3


def test_features_instead_of_images_leave_the_image_tower_alone():
    backbone, recipe, _, batch = setup()
    backward(backbone, recipe, batch, CPU)
    expected = {name: g for name, g in gradients(backbone).items() if not name.startswith("visual")}
    with torch.no_grad():
        features = backbone.encode_image(batch.images)
    for chunk in (None, 4):
        backbone.zero_grad()
        backward(backbone, recipe, replace(batch, images=features, cached_features=True), CPU, chunk=chunk)
        assert_same_gradients(gradients(backbone), expected)


@pytest.mark.parametrize("wrong", ["loss", "gradient_norm"])
def test_a_step_that_is_not_finite_leaves_weights_averages_and_counts_as_they_were(wrong):
    def states(is_skipped):
        backbone, recipe, _, batch = setup()
        optimizer = Optimizer(backbone, *ADAMW)
        for step in range(4):
            if step not in (0, 2):
                assert optimizer.step(1e-3, backward(backbone, recipe, batch, CPU))
            elif is_skipped:
                report = backward(backbone, recipe, batch, CPU)
                backbone.model.token_embedding.weight.grad[3] = torch.nan
                assert not optimizer.step(1e-3, report | {wrong: torch.tensor(torch.inf)})
            assert all(parameter.grad is None for parameter in backbone.parameters())
        return backbone.state_dict() | {
            (number, name): value
            for number, averages in optimizer.state_dict()["adamw"]["state"].items()
            for name, value in averages.items()
        }

    skipped, expected = states(True), states(False)
    assert len(skipped) > 100 and skipped[0, "step"] == 2
    torch.testing.assert_close(skipped, expected, rtol=0, atol=0)


def test_fp16_scales_gradients_and_leaves_overflowing_steps_out():
    backbone, recipe, _, batch = setup()
    backbone.float()
    weight, batch = backbone.model.token_embedding.weight, replace(batch, images=batch.images.float())
    plain = backward(backbone, recipe, batch, CPU)["gradient_norm"].item()
    backbone.zero_grad()
    optimizer, before, scales, norm = Optimizer(backbone, *ADAMW, precision="fp16"), weight.clone(), [], math.inf
    while not math.isfinite(norm):
        assert torch.equal(weight, before) and len(scales) < 40
        scales.append(optimizer.scaler.get_scale())
        report = backward(backbone, recipe, batch, CPU, "fp16", scaler=optimizer.scaler)
        norm = report["gradient_norm"].item()
        optimizer.step(1e-3, report)
    # Half of the scale after each overflow, until a step is applied.
    assert scales == [65536 / 2**n for n in range(len(scales))] and norm == pytest.approx(plain, rel=0.05)
    after = weight.clone()
    assert not torch.equal(after, before)
    assert not optimizer.step(1e-3, report | {"loss": torch.tensor(torch.nan)})  # nor is the scale then another
    assert optimizer.scaler.get_scale() == scales[-1] and torch.equal(weight, after)


def test_kept_rows_stay_bit_identical_and_nothing_else_does():
    backbone, recipe, _, batch = setup()
    optimizer = Optimizer(backbone, 0.5, *ADAMW[1:])
    before = {name: p.detach().clone() for name, p in backbone.model.named_parameters()}
    for _ in range(3):
        optimizer.step(1e-2, backward(backbone, recipe, batch, CPU))
    after = dict(backbone.model.named_parameters())
    moved = (after["positional_embedding"] != before["positional_embedding"]).any(dim=1)
    assert not moved[:20].any() and moved[20:].all()
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_weight_decay_is_on_matrices_only_or_on_all_in_one_group():
    backbone = setup()[0]
    for decay_of, of_vectors in (("matrices", 0.0), ("all", 0.1)):
        groups = Optimizer(backbone, *ADAMW, decay=decay_of).adamw.param_groups
        decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
        for name, parameter in backbone.model.named_parameters():
            assert decay[id(parameter)] == (0.1 if parameter.ndim >= 2 else of_vectors), name
        assert len(groups) == (1 if of_vectors else 2)


def test_the_scale_is_trained_and_stays_at_most_100():
    backbone, recipe, _, batch = setup()
    backbone.logit_scale.data.fill_(4.605)
    report = backward(backbone, recipe, batch, CPU)
    backbone.logit_scale.grad.fill_(-1.0)
    Optimizer(backbone, *ADAMW).step(0.5, report)
    assert backbone.logit_scale.exp().item() == pytest.approx(100)
