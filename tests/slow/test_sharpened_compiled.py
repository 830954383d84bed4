"""`sharpen` and compiled UNets."""

import numpy as np
import pytest
import torch
from helpers import tiny_sdxl
from helpers.draw import LONG, draw
from helpers.tiny_sdxl import assemble_copy

from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def pipe():
    yield assemble_copy(StableDiffusionXLLongPromptPipeline, tiny_sdxl.sdxl_parts())
    torch.compiler.reset()


def counting(graphs):
    """How to compile, without a graph break, so that each graph is listed."""
    return {"backend": lambda graph, _: graphs.append(graph) or graph.forward, "dynamic": False, "fullgraph": True}


@pytest.mark.parametrize(
    "compile_unet",
    [
        torch.compile,
        lambda unet, **how: unet.compile(**how) or unet,
        lambda unet, **how: unet.compile_repeated_blocks(**how) or unet,
    ],
)
def test_a_compiled_unet_notices(compile_unet, pipe):
    """In whatever order it is compiled, drawn with and sharpened, and without compiling anew for every image."""
    images, graphs = {value: draw(pipe.set_long_prompt(sharpen=value), LONG) for value in (1.0, 2.0)}, []
    pipe.unet = compile_unet(pipe.unet, **counting(graphs))
    counts = []
    for value in (1.0, 2.0, 1.0, 2.0):
        assert np.allclose(draw(pipe.set_long_prompt(sharpen=value), LONG), images[value], atol=1e-5)
        counts.append(len(graphs))
    assert counts[1] == counts[-1] > counts[0]
