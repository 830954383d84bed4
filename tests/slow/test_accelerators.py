"""Pipelines on an accelerator, and offloaded from it; the CPU stands in where it can."""

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.hooks import apply_group_offloading
from helpers import tiny_sdxl
from helpers.draw import LONG, draw, embed, models
from helpers.tiny_sdxl import assemble_copy

from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline

ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def pipe():
    return assemble_copy(StableDiffusionXLLongPromptPipeline, tiny_sdxl.sdxl_parts())


@pytest.mark.needs("accelerator")
def test_on_an_accelerator(pipe):
    stock, on_cpu = assemble_copy(StableDiffusionXLPipeline, pipe.components), draw(pipe, LONG)
    stock.to(ACCELERATOR)
    images = draw(pipe.to(ACCELERATOR), LONG)
    assert np.array_equal(images, draw(stock, **embed(pipe, LONG))) and np.abs(images - on_cpu).max() < 1e-2


@pytest.mark.needs("accelerator")
@pytest.mark.parametrize(("kind", "place"), [("sequential", "meta"), ("model", "cpu")])
def test_cpu_offload(pipe, kind, place):
    expected = draw(pipe.to(ACCELERATOR), LONG)
    getattr(pipe.to("cpu"), f"enable_{kind}_cpu_offload")(device=ACCELERATOR)
    assert np.abs(draw(pipe, LONG) - expected).max() < 1e-3
    assert {part.device.type for part in models(pipe).values()} == {place}


@pytest.mark.parametrize("device", ["cpu", pytest.param(str(ACCELERATOR), marks=pytest.mark.needs("accelerator"))])
@pytest.mark.parametrize("options", [{}, {"sharpen": 1.5}])
def test_group_offload_of_each_model(pipe, device, options):
    expected = draw(pipe.to(device).set_long_prompt(**options), LONG)
    pipe.to("cpu")
    for part in (pipe.text_encoder, pipe.text_encoder_2, pipe.unet):
        places = {"onload_device": torch.device(device), "offload_device": torch.device("cpu")}
        apply_group_offloading(part, **places, offload_type="leaf_level")
    pipe.vae.to(device)
    assert np.abs(draw(pipe, LONG) - expected).max() < 1e-3
