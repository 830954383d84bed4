import math
from copy import deepcopy
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from helpers.literal import literal_info_nce, literal_sigmoid
from helpers.ranks import ranks
from helpers.steps import CASES, assert_same_gradients, gradients, rich_setup, step_setup
from open_clip.transformer import PatchDropout

from debias_diffusion.training.optimizer import Optimizer
from debias_diffusion.training.step import backward

CPU = Accelerator(cpu=True)


def literal_text(backbone, tokens):
    """open_clip's own forward on literal rows; for average pooling its parts, written out."""
    model, rows = backbone.model, tokens.padded()
    if backbone.pooling == "eot":
        return model.encode_text(rows)
    tower = getattr(model, "text", model)
    states = tower.token_embedding(rows) + tower.positional_embedding
    states = tower.ln_final(tower.transformer(states, attn_mask=tower.attn_mask))
    real = torch.zeros(rows.shape, dtype=states.dtype)
    for row, n_prefix, length in zip(real, tokens.n_prefix, tokens.lengths, strict=True):
        row[n_prefix : n_prefix + length] = 1
        row[0] = max(row[0], float(tokens.shared_sot))
    pooled = torch.einsum("bl,blw->bw", real / real.sum(1, keepdim=True), states)
    projection = tower.text_projection
    return projection(pooled) if callable(projection) else pooled @ projection


def literal_loss(backbone, recipe, batch):
    """The paper's formulas on padded rows and open_clip's own forward passes, nothing shared, nothing skipped."""
    model = backbone.model
    v = F.normalize(model.encode_image(batch.images), dim=-1)
    texts = [F.normalize(part, dim=-1) for part in literal_text(backbone, batch.tokens).split(len(batch))]
    rebuilt = v
    if recipe.components:
        rebuilt = []
        for part in v.chunk(recipe.component_parts):  # what each of two processes has, where there are two
            mean = part.mean(0)
            basis = torch.linalg.svd((part - mean).detach(), full_matrices=False).Vh[: recipe.components].T
            rebuilt.append(mean + (part - mean) @ basis @ basis.T)
        rebuilt = torch.cat(rebuilt)
    scale, smoothing, w = model.logit_scale.exp(), recipe.label_smoothing, recipe.short_weight

    def loss(image, text):
        if backbone.loss == "sigmoid":
            return literal_sigmoid(image, text, scale, model.logit_bias)
        return literal_info_nce(image, text, scale, smoothing)

    short = w * loss(rebuilt, texts[-1]) if w > 0 else 0
    return short + ((1 - w) * loss(v, texts[0]) if w < 1 else 0)


def assert_split_exactly(backbone, method, batch, modules, loss, expected):
    """Loss, gradients and their norm of the whole batch come out of chunks of any size."""
    models = [backbone] if modules is None else [backbone, modules]
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for chunk in (None, 1, 4):
        for model in models:
            model.zero_grad()
        report = backward(backbone, method, batch, CPU, chunk=chunk, modules=modules)
        assert report["loss"] == pytest.approx(loss.item(), abs=1e-9)
        assert report["gradient_norm"] == pytest.approx(norm.item(), rel=1e-9)
        assert_same_gradients(gradients(*models), expected)


@pytest.fixture(scope="module")
def shared_gradients():
    """What each of two processes, with half of the samples, ends with: [{(case, chunk): gradients}]"""

    def steps(accelerator):
        assert accelerator.num_processes == 2
        found, half = {}, dict(size=3, first=3 * accelerator.process_index)
        for case, chunk in product(CASES, (None, 2)):
            backbone, recipe, batch = step_setup(case, **half)
            backward(backbone, recipe, batch, accelerator, chunk=chunk)
            found[case, chunk] = gradients(backbone)
        for case, chunk in product(("rich", "kept"), (None, 2)):
            backbone, method, batch, modules = rich_setup(kept=case == "kept", **half)
            backward(backbone, method, batch, accelerator, chunk=chunk, modules=modules)
            found[case, chunk] = gradients(backbone, modules)
        return found

    return ranks(2, steps)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_the_papers_however_the_batch_is_split(case, shared_gradients):
    backbone, recipe, batch = step_setup(case)
    assert len(batch.tokens) == len(batch) * (recipe.has_long + recipe.has_short)
    loss = literal_loss(backbone, recipe, batch)
    loss.backward()
    expected = gradients(backbone)
    assert expected.keys() == dict(backbone.model.named_parameters()).keys()
    assert all(gradient.abs().sum() > 0 for gradient in expected.values())
    assert_split_exactly(backbone, recipe, batch, None, loss, expected)
    for of_one_process, chunk in product(shared_gradients, (None, 2)):
        assert_same_gradients(of_one_process[case, chunk], expected)


def test_a_methods_own_modules_features_and_views_are_split_exactly_too(shared_gradients):
    backbone, method, batch, modules = rich_setup()
    features = method.encode(backbone, batch, modules)
    losses, _ = method.losses(features, backbone.logit_scale.exp())
    assert [features[name].ndim for name in ("long_text", "masked", "distance", "weight")] == [2, 3, 1, 1]
    loss = sum(losses.values())
    loss.backward()
    expected = gradients(backbone, modules)
    assert {"head.weight", "head.bias", "weight"} < expected.keys() and "frozen.weight" not in expected
    assert all(gradient.abs().sum() > 0 for gradient in expected.values())
    assert_split_exactly(backbone, method, batch, modules, loss, expected)
    for of_one_process, chunk in product(shared_gradients, (None, 2)):
        assert_same_gradients(of_one_process["rich", chunk], expected)


def test_the_term_that_keeps_states_is_split_exactly_beside_any_method(shared_gradients):
    backbone, method, batch, modules = rich_setup(kept=True)
    drawn = batch.views["state_tokens"][:, 0, 0] >= 0
    assert drawn.tolist() == [False, True, False, False, True, True]  # so a chunk may have none
    features = method.all_features(backbone, batch, modules)
    own = method.encode(backbone, batch, modules.method)
    losses, report = method.all_losses(features, backbone.logit_scale.exp())
    assert losses["state_loss"].item() == pytest.approx(0.7 * features["state_error"][drawn].mean().item())
    assert report["state_error"] > 0 and not features["state_error"][~drawn].any()
    assert sum(losses.values()) == losses["state_loss"] + sum(
        method.losses(own, backbone.logit_scale.exp())[0].values()
    )
    loss = sum(losses.values())
    loss.backward()
    expected = gradients(backbone, modules)
    assert "method.head.weight" in expected and not any(name.startswith("terms") for name in expected)
    assert_split_exactly(backbone, method, batch, modules, loss, expected)
    for of_one_process, chunk in product(shared_gradients, (None, 2)):
        assert_same_gradients(of_one_process["kept", chunk], expected)


def test_chunks_draw_the_same_at_random_both_times():
    # With patches dropped at random, a second pass that drew others would have the gradient of another loss. (Without
    # components, whose basis is held fixed in the gradient but moves in the differences.)
    backbone, recipe, batch = step_setup("pre-sot-whole-images")
    backbone.model.visual.patch_dropout = PatchDropout(0.5)
    backbone.train()

    def step(chunk):
        backbone.zero_grad()
        torch.manual_seed(3)
        return backward(backbone, recipe, batch, CPU, chunk=chunk)["loss"], gradients(backbone)

    (loss, gradient), (again, same) = step(2), step(2)
    assert loss == again != step(3)[0]
    assert_same_gradients(gradient, same)
    table, epsilon = backbone.model.visual.positional_embedding, 1e-6
    direction = torch.randn(table.shape, generator=torch.Generator().manual_seed(0), dtype=table.dtype)
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            table.add_(sign * epsilon * direction)
        ends.append(step(2)[0])
        with torch.no_grad():
            table.sub_(sign * epsilon * direction)
    slope = (gradient["visual.positional_embedding"] * direction).sum().item()
    assert (ends[0] - ends[1]) / (2 * epsilon) == pytest.approx(slope, rel=1e-6)


def test_features_instead_of_images_leave_the_image_tower_alone():
    backbone, recipe, batch = step_setup()
    backward(backbone, recipe, batch, CPU)
    expected = {name: g for name, g in gradients(backbone).items() if not name.startswith("visual")}
    backbone.zero_grad()
    with torch.no_grad():
        features = backbone.encode_image(batch.images)
    for chunk in (None, 4):
        backbone.zero_grad()
        backward(backbone, recipe, replace(batch, images=features, cached_features=True), CPU, chunk=chunk)
        assert_same_gradients(gradients(backbone), expected)


def test_a_loss_that_is_not_finite_leaves_no_gradients():
    backbone, recipe, batch = step_setup()
    batch.images[2] = torch.inf
    for chunk in (None, 2):
        assert not math.isfinite(backward(backbone, recipe, batch, CPU, chunk=chunk)["loss"])
        assert gradients(backbone) == {}


def test_fp16_scales_gradients_and_leaves_overflowing_steps_out():
    backbone, recipe, batch = step_setup()
    backbone.float()
    batch = replace(batch, images=batch.images.float())
    plain = backward(backbone, recipe, batch, CPU)["gradient_norm"]
    backbone.zero_grad()
    optimizer = Optimizer(backbone, 0.1, (0.9, 0.999), 1e-8, precision="fp16")
    before = backbone.model.token_embedding.weight.detach().clone()
    scales = []
    for _ in range(40):
        scales.append(optimizer.scaler.get_scale())
        norm = backward(backbone, recipe, batch, CPU, "fp16", scaler=optimizer.scaler)["gradient_norm"]
        optimizer.step(1e-3)
        if math.isfinite(norm):
            break
        assert torch.equal(backbone.model.token_embedding.weight, before)
    # Half of the scale after each overflow, until a step is applied.
    assert scales == [65536 / 2**n for n in range(len(scales))]
    assert norm == pytest.approx(plain, rel=0.05)
    assert not torch.equal(backbone.model.token_embedding.weight, before)
    state = deepcopy(optimizer.state_dict())
    again = Optimizer(backbone, 0.1, (0.9, 0.999), 1e-8, precision="fp16")
    again.load_state_dict(state)
    assert again.scaler.state_dict() == optimizer.scaler.state_dict()


def test_kept_rows_stay_bit_identical_and_nothing_else_does():
    backbone, recipe, batch = step_setup()
    optimizer = Optimizer(backbone, weight_decay=0.5, betas=(0.9, 0.999), eps=1e-8)
    before = {name: p.detach().clone() for name, p in backbone.model.named_parameters()}
    for _ in range(3):
        backward(backbone, recipe, batch, CPU)
        optimizer.step(1e-2)
    after = dict(backbone.model.named_parameters())
    assert torch.equal(after["positional_embedding"][:20], before["positional_embedding"][:20])
    moved = (after["positional_embedding"] != before["positional_embedding"]).any(dim=1)
    assert moved[20:].all()
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_weight_decay_is_on_matrices_only():
    backbone, _, _ = step_setup()
    optimizer = Optimizer(backbone, weight_decay=0.5, betas=(0.9, 0.999), eps=1e-8)
    decay = {id(p): group["weight_decay"] for group in optimizer.adamw.param_groups for p in group["params"]}
    for name, parameter in backbone.model.named_parameters():
        assert decay[id(parameter)] == (0.5 if parameter.ndim >= 2 else 0.0), name


def test_the_scale_is_trained_and_stays_at_most_100():
    backbone, recipe, batch = step_setup()
    with torch.no_grad():
        backbone.logit_scale.fill_(4.605)
    optimizer = Optimizer(backbone, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8)
    backward(backbone, recipe, batch, CPU)
    backbone.logit_scale.grad.fill_(-1.0)
    optimizer.step(0.5)
    assert backbone.logit_scale.exp().item() == pytest.approx(100)
