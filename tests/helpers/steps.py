"""One training step in float64: what a method and a batch are."""

import random
from dataclasses import dataclass, replace

import torch
from helpers.tiny_clip import everyday, tiny_clip, tiny_siglip
from helpers.tiny_data import caption
from torch import nn

from debias_diffusion.data.dataset import Collate, Sample
from debias_diffusion.methods.dual_caption import RECIPES, DualCaption
from debias_diffusion.methods.keep_states import KeepStates

COMPONENTS = 3


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
    method = Rich("random", "random", 0.1, COMPONENTS, terms=(KeepStates(0.7),) if kept else ())
    backbone, method, batch = step_setup(method=method, **where)
    modules = method.all_modules(backbone).double()
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
        views = recipe.all_views(image, caption(index), backbone.tokenizer, 0, 0, str(index))
        samples.append(Sample((0, index, index), str(index), image, captions, views=views))
    return backbone, recipe, Collate(backbone.tokenizer, recipe)(samples)


def gradients(*models):
    named = (pair for model in models for pair in getattr(model, "model", model).named_parameters())
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_same_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-9, msg=name)
