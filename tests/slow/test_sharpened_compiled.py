"""`sharpen`, `sharpen_sentences` and compiled UNets."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers import tiny_sdxl
from helpers.draw import LONG, draw
from helpers.tiny_sdxl import assemble, assemble_copy

from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.parametrize(
        "compile_unet",
        [
            torch.compile,
            lambda unet, **how: unet.compile(**how) or unet,
            lambda unet, **how: unet.compile_repeated_blocks(**how) or unet,
        ],
    ),
]


@pytest.fixture
def pipe():
    yield assemble_copy(StableDiffusionXLLongPromptPipeline, tiny_sdxl.sdxl_parts())
    torch.compiler.reset()


def counting(graphs):
    """How to compile, without a graph break, so that each graph is listed."""
    return {"backend": lambda graph, _: graphs.append(graph) or graph.forward, "dynamic": False, "fullgraph": True}


@pytest.mark.parametrize("option", ["sharpen", "sharpen_sentences"])
def test_a_compiled_unet_notices(compile_unet, pipe, option):
    """In whatever order it is compiled, drawn with and sharpened, and without compiling anew for every image."""
    images, graphs = {value: draw(pipe.set_long_prompt(**{option: value}), LONG) for value in (1.0, 2.0)}, []
    pipe.unet = compile_unet(pipe.unet, **counting(graphs))
    counts = []
    for value in (1.0, 2.0, 1.0, 2.0):
        assert np.allclose(draw(pipe.set_long_prompt(**{option: value}), LONG), images[value], atol=1e-5)
        counts.append(len(graphs))
    assert counts[1] == counts[-1] > counts[0]


def test_pipelines_that_share_a_compiled_unet(compile_unet, pipe):
    """One is sharpened; in its steps a plain one draws, and another sharpened one in another thread. Without compiling
    anew for every image."""
    images = {factor: draw(pipe.set_long_prompt(sharpen=factor), LONG) for factor in (1.0, 2.0, 3.0)}
    graphs, counts = [], []
    pipe.unet = compile_unet(pipe.unet, **counting(graphs))

    def check(factor, **call):
        shared = assemble(type(pipe), pipe.components, scheduler=copy.deepcopy(pipe.scheduler))
        image = draw(shared.set_long_prompt(sharpen=factor), LONG, **call)
        assert np.allclose(image, images[factor], atol=1e-5)

    def others(*_):
        check(1.0)
        pool.submit(check, 3.0).result()
        pool.submit(check, 1.0).result()
        return {}

    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            check(2.0, callback_on_step_end=others)
            counts.append(len(graphs))
    assert counts[0] == counts[-1]
