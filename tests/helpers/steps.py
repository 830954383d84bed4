"""Training steps in float64, and that splitting a batch changes neither loss nor gradients."""

from collections.abc import Callable, Iterable
from itertools import product

import pytest
import torch
from accelerate import Accelerator
from helpers.ranks import ranks
from helpers.tiny_clip import everyday
from helpers.tiny_data import caption
from torch import nn

from debias_diffusion.training.batches import Sample, collate
from debias_diffusion.training.step import backward

CPU = Accelerator(cpu=True)


def make_batch(backbone, method, size, first):
    samples = []
    for index in range(first, first + size):
        image = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        sample = caption(index), backbone.tokenizer, 0, 0, str(index)
        captions, views = method.captions(*sample), method.views(image, *sample)
        samples.append(Sample(str(index), image, captions, views=views))
    return collate(samples, backbone.tokenizer, method)


def prepared(backbone, method, size=6, first=0):
    """(float64 backbone of a stretched window, bound method, its modules or None, batch), all weights of everyday size.

    `first`: the batch's first sample, of `size`.
    """
    backbone.stretch()
    torch.manual_seed(1)
    method = method.prepare(backbone)
    modules = method.modules(backbone)
    modules = nn.ModuleDict(modules) if modules else None
    backbone.double()
    everyday(backbone.model)
    if modules is not None:
        everyday(modules.double())
    return backbone, method, modules, make_batch(backbone, method, size, first)


def gradients(*models):
    """By name, of models and method's modules, each of which may be None."""
    models = [getattr(model, "model", model) for model in models if model is not None]
    named = (pair for model in models for pair in model.named_parameters())
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_same_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-8, atol=1e-9, msg=name)


def in_two_processes(setup: Callable, cases: Iterable[str]) -> list[dict]:
    """What each of two processes, with half of the samples, ends with: [{(case, chunk): gradients}]

    Args:
        setup: (case, number of samples, the first one) -> (backbone, method, modules or None, batch).
    """

    def steps(accelerator):
        assert accelerator.num_processes == 2
        found = {}
        for case, chunk in product(cases, (None, 2)):
            backbone, method, modules, batch = setup(case, 3, 3 * accelerator.process_index)
            backward(backbone, method, batch, accelerator, chunk=chunk, modules=modules)
            found[case, chunk] = gradients(backbone, modules)
        return found

    return ranks(2, steps)


def assert_split_exactly(step, loss: torch.Tensor, case: str, of_processes: list[dict]):
    """The loss and all its gradients come out of chunks of any size, of checkpointed blocks and of two processes."""
    backbone, method, modules, batch = step
    models = [model for model in (backbone, modules) if model is not None]
    loss.backward()
    expected = gradients(*models)
    named = dict(pair for model in models for pair in getattr(model, "model", model).named_parameters())
    assert expected.keys() == {name for name, parameter in named.items() if parameter.requires_grad}
    assert all(gradient.abs().sum() > 0 for gradient in expected.values())
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for chunk in (None, 1, 4, "checkpointed"):
        for model in models:
            model.zero_grad()
        if chunk == "checkpointed":
            backbone.checkpoint_activations()
            chunk = None
        report = backward(backbone, method, batch, CPU, chunk=chunk, modules=modules)
        assert report["loss"].item() == pytest.approx(loss.item(), abs=1e-9)
        assert report["gradient_norm"].item() == pytest.approx(norm.item(), rel=1e-9)
        assert_same_gradients(gradients(*models), expected)
    for of_one_process, chunk in product(of_processes, (None, 2)):
        assert_same_gradients(of_one_process[case, chunk], expected)
