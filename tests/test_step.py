import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors.torch import load_file
from test_objectives import literal_info_nce
from tiny_clip import tiny_clip
from tiny_data import caption

from debias_diffusion.data.dataset import Collate, Sample
from debias_diffusion.recipes import RECIPES, Recipe
from debias_diffusion.training.step import Optimizer, backward

COMPONENTS = 3


def step_setup(recipe="debias-clip", size=6, first=0):
    """(float64 backbone of a stretched window, recipe, batch of samples `first` to `first + size`)"""
    backbone = tiny_clip().double()
    backbone.stretch()
    its = RECIPES[recipe]
    recipe = Recipe(its.sampling, its.padding, its.short_weight, COMPONENTS, its.label_smoothing)
    samples = []
    for index in range(first, first + size):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, 32, 32, generator=generator, dtype=torch.float64)
        samples.append(Sample((0, index), image, recipe.captions(caption(index), backbone.tokenizer, 0, 0, str(index))))
    return backbone, recipe, Collate(backbone.tokenizer)(samples)


def gradients(backbone):
    return {name: p.grad.clone() for name, p in backbone.model.named_parameters() if p.grad is not None}


def literal_loss(backbone, recipe, batch):
    """The paper's formulas on padded rows and open_clip's own forward passes, nothing shared, nothing skipped."""
    model, size = backbone.model, len(batch.keys)
    rows = batch.tokens.padded()
    v = F.normalize(model.encode_image(batch.images), dim=-1)
    u_long = F.normalize(model.encode_text(rows[:size]), dim=-1)
    u_short = F.normalize(model.encode_text(rows[size:]), dim=-1)
    mean = v.mean(0)
    basis = torch.linalg.svd((v - mean).detach(), full_matrices=False).Vh[:COMPONENTS].T
    rebuilt = mean + (v - mean) @ basis @ basis.T
    scale, smoothing, w = model.logit_scale.exp(), recipe.label_smoothing, recipe.short_weight
    short = literal_info_nce(rebuilt, u_short, scale, smoothing)
    return w * short + (1 - w) * literal_info_nce(v, u_long, scale, smoothing)


@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_and_gradients_equal_the_papers_formulas_on_padded_rows(recipe):
    backbone, recipe, batch = step_setup(recipe)
    report = backward(backbone, recipe, batch, Accelerator(cpu=True))
    ours = gradients(backbone)
    backbone.zero_grad()
    loss = literal_loss(backbone, recipe, batch)
    loss.backward()
    theirs = gradients(backbone)
    assert report["loss"] == pytest.approx(loss.item(), abs=1e-9)
    assert ours.keys() == theirs.keys() == dict(backbone.model.named_parameters()).keys()
    for name, gradient in theirs.items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_make_the_same_step_as_one(tmp_path, recipe):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--standalone"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [*launch, str(Path(__file__).parent / "two_processes.py"), recipe, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    backbone, recipe, batch = step_setup(recipe)
    backward(backbone, recipe, batch, Accelerator(cpu=True))
    for rank in range(2):
        shared = load_file(tmp_path / f"{rank}.safetensors")
        alone = gradients(backbone)
        assert shared.keys() == alone.keys()
        for name, gradient in alone.items():
            torch.testing.assert_close(shared[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


def test_kept_rows_stay_bit_identical_and_nothing_else_does():
    backbone, recipe, batch = step_setup()
    optimizer = Optimizer(backbone, weight_decay=0.5, betas=(0.9, 0.999), eps=1e-8)
    before = {name: p.detach().clone() for name, p in backbone.model.named_parameters()}
    for _ in range(3):
        backward(backbone, recipe, batch, Accelerator(cpu=True))
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
    backward(backbone, recipe, batch, Accelerator(cpu=True))
    backbone.logit_scale.grad.fill_(-1.0)
    optimizer.step(0.5)
    assert backbone.logit_scale.exp().item() == pytest.approx(100)


def test_the_optimizers_state_survives_a_save():
    backbone, recipe, batch = step_setup()
    optimizer = Optimizer(backbone, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-8)
    backward(backbone, recipe, batch, Accelerator(cpu=True))
    optimizer.step(1e-3)
    again, _, _ = step_setup()
    again.model.load_state_dict(backbone.model.state_dict())
    resumed = Optimizer(again, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-8)
    resumed.load_state({name: value.clone() for name, value in optimizer.state().items()})
    for its_backbone, its_optimizer in ((backbone, optimizer), (again, resumed)):
        backward(its_backbone, recipe, batch, Accelerator(cpu=True))
        its_optimizer.step(1e-3)
    assert all(torch.equal(a, b) for a, b in zip(backbone.parameters(), again.parameters(), strict=True))
