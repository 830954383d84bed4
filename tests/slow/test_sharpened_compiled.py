"""`sharpen` and compiled UNets."""

import numpy as np
import pytest
import torch
from helpers import tiny_sdxl
from helpers.draw import LONG, draw
from helpers.tiny_sdxl import assemble_copy

from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline, sharpened

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize("compile_unet", [torch.compile, lambda unet, **how: unet.compile(**how) or unet])
def test_a_compiled_unet_notices(compile_unet):
    """In whatever order it is compiled, drawn with and sharpened, and without compiling anew for every image."""
    pipe = assemble_copy(StableDiffusionXLLongPromptPipeline, tiny_sdxl.sdxl_parts())
    images, graphs = {1.0: draw(pipe, LONG)}, []
    with sharpened(pipe.unet, 2.0):
        images[2.0] = draw(pipe, LONG)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    pipe.unet = compile_unet(pipe.unet, backend=backend, dynamic=False)
    counts = []
    for factor in (1.0, 2.0, 1.0, 2.0):
        assert np.allclose(draw(pipe.set_long_prompt(sharpen=factor), LONG), images[factor], atol=1e-5)
        counts.append(len(graphs))
    assert counts[1] == counts[-1] > counts[0]
    torch.compiler.reset()
