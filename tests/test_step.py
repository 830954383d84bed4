import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from open_clip.transformer import PatchDropout
from safetensors.torch import load_file
from test_objectives import literal_info_nce, literal_sigmoid
from tiny_clip import everyday, tiny_clip, tiny_siglip
from tiny_data import caption
from torch import nn

from debias_diffusion.data.dataset import Collate, Sample
from debias_diffusion.methods.dual_caption import RECIPES, DualCaption
from debias_diffusion.methods.keep_states import KeepStates
from debias_diffusion.training.step import Optimizer, backward

COMPONENTS = 3
CPU = Accelerator(cpu=True)

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
    "average-pre-sot": ("clip", "debias-clip", {"pooling": "average", "padding": "pre-sot"}),
    "siglip": ("siglip", "debias-clip", {}),
    "siglip-average": ("siglip", "long-clip", {"pooling": "average"}),
}


@dataclass(frozen=True)
class Rich(DualCaption):
    """Everything a method may have: modules, a frozen one, views, features of several shapes, a global loss."""

    def modules(self, backbone):
        modules = nn.ModuleDict({"head": nn.Linear(24, 6), "frozen": nn.Linear(24, 24).requires_grad_(False)})
        modules.weight = nn.Parameter(torch.tensor(0.5))
        return modules

    def views(self, image, caption, tokenizer, seed, epoch, sample_id):
        rng = random.Random(f"{seed}/{epoch}/{sample_id}")
        return {"mask": torch.tensor([rng.random() for _ in range(3)], dtype=torch.float64)}

    def encode(self, backbone, batch, modules=None):
        features = super().encode(backbone, batch)
        short = features["short_text"]
        return features | {
            "masked": modules["head"](short).unflatten(1, (2, 3)) * batch.views["mask"][:, None],
            "distance": (modules["frozen"](short) - features["long_text"]).square().mean(dim=1),
            "weight": modules.weight.expand(len(batch)),
        }

    def losses(self, features, scale, bias=None):
        losses, report = super().losses(features, scale, bias)
        spread = (features["masked"] - features["masked"].mean(dim=0)).square().sum()
        return losses | {"spread": features["weight"].mean() * spread, "distance": features["distance"].mean()}, report


def rich_setup(kept=False, **where):
    """`step_setup` of a method that uses the whole seam, and its modules; `kept`: with the term that keeps states."""
    torch.manual_seed(0)
    method = Rich("random", "random", 0.1, COMPONENTS, keep_states=0.7 * kept)
    backbone, method, batch = step_setup(method=KeepStates(method) if kept else method, **where)
    modules = method.modules(backbone).double()
    if kept:  # else every state is where the teacher has it, up to the positions
        everyday(backbone.model)
    return backbone, method, batch, modules


def step_setup(case="debias-clip", size=6, first=0, method=None):
    """(float64 backbone of a stretched window, method, batch of samples `first` to `first + size`)"""
    family, name, changes = CASES[case]
    backbone = (tiny_clip() if family == "clip" else tiny_siglip()).double()
    backbone.stretch()
    components = min(RECIPES[name].components, COMPONENTS)
    recipe = method or replace(RECIPES[name], **{"components": components} | changes)
    recipe.prepare(backbone)
    samples = []
    for index in range(first, first + size):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, 32, 32, generator=generator, dtype=torch.float64)
        captions = recipe.captions(caption(index), backbone.tokenizer, 0, 0, str(index))
        views = recipe.views(image, caption(index), backbone.tokenizer, 0, 0, str(index))
        samples.append(Sample((0, index, index), str(index), image, captions, views=views))
    return backbone, recipe, Collate(backbone.tokenizer, recipe)(samples)


def gradients(*models):
    named = (pair for model in models for pair in getattr(model, "model", model).named_parameters())
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


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


def assert_same_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


def assert_split_exactly(backbone, method, batch, modules, loss, expected):
    """Loss, gradients and their norm of the whole batch come out of chunks of any size."""
    models = [backbone] if modules is None else [backbone, modules]
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for chunk in (None, 1, 3, 4):
        for model in models:
            model.zero_grad()
        report = backward(backbone, method, batch, CPU, chunk=chunk, modules=modules)
        assert report["loss"] == pytest.approx(loss.item(), abs=1e-9)
        assert report["gradient_norm"] == pytest.approx(norm.item(), rel=1e-9)
        assert_same_gradients(gradients(*models), expected)


def run_in_processes(count, *command):
    """What `count` processes of a Python program print, as torch's launcher starts them."""
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={count}", "--master_port=0", "--standalone"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def shared_gradients(tmp_path_factory):
    """What two processes ended with, for all cases: {(case, chunk, rank): gradients}"""
    folder = tmp_path_factory.mktemp("shared")
    run_in_processes(2, str(Path(__file__).parent / "two_processes.py"), str(folder))
    return {path.stem: load_file(path) for path in folder.iterdir()}


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
    for chunk in (None, 2):
        for rank in range(2):
            assert_same_gradients(shared_gradients[f"{case}-{chunk}-{rank}"], expected)


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
    for chunk in (None, 2):
        for rank in range(2):
            assert_same_gradients(shared_gradients[f"rich-{chunk}-{rank}"], expected)


def test_the_term_that_keeps_states_is_split_exactly_beside_any_method(shared_gradients):
    backbone, method, batch, modules = rich_setup(kept=True)
    drawn = batch.views["state_tokens"][:, 0, 0] >= 0
    assert drawn.tolist() == [False, True, False, False, True, True]  # so a chunk may have none
    features = method.encode(backbone, batch, modules)
    own = method.method.encode(backbone, batch, modules.method)
    losses, report = method.losses(features, backbone.logit_scale.exp())
    assert losses["state_loss"].item() == pytest.approx(0.7 * features["state_error"][drawn].mean().item())
    assert report["state_error"] > 0 and not features["state_error"][~drawn].any()
    assert sum(losses.values()) == losses["state_loss"] + sum(
        method.method.losses(own, backbone.logit_scale.exp())[0].values()
    )
    loss = sum(losses.values())
    loss.backward()
    expected = gradients(backbone, modules)
    assert "method.head.weight" in expected and not any(name.startswith("teacher") for name in expected)
    assert_split_exactly(backbone, method, batch, modules, loss, expected)
    for chunk in (None, 2):
        for rank in range(2):
            assert_same_gradients(shared_gradients[f"kept-{chunk}-{rank}"], expected)


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
    state = {name: value.clone() for name, value in optimizer.state().items()}
    again = Optimizer(backbone, 0.1, (0.9, 0.999), 1e-8, precision="fp16")
    again.load_state(state)
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
