"""Our own classes as diffusers checks its pipelines: signatures, encoding alone, other calls, number formats.

What all classes do with short and long prompts is in tests/helpers/matrix.py.
"""

import copy
import json

import numpy as np
import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler, LCMScheduler, StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.draw import (
    LONG,
    OTHER,
    PROMPTS,
    SHORT,
    TEXT_PARTS,
    arguments,
    draw,
    embed,
    models,
    only_in_forward,
    parameters,
    watched,
)
from helpers.matrix import CASES, Pipelines
from helpers.tiny_sdxl import assemble, assemble_copy

from debias_diffusion import pipelines
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline

Stock, Ours = StableDiffusionXLPipeline, StableDiffusionXLLongPromptPipeline
CLASSES = [getattr(pipelines, name) for name in pipelines.__all__ if name.endswith("Pipeline")]

ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None

pytestmark = pytest.mark.usefixtures("no_grad")
each_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)


def pair(cls):
    """diffusers' pipeline and ours of the same models, arguments of the call, and settings for making another."""
    both = Pipelines(cls.__name__)
    older = "safety_checker" in parameters(cls.__init__)  # these warn without one, unless told that it is meant so
    settings = {"requires_safety_checker": False} if older else {}
    return both.stock, assemble(cls, both.stock.components, **settings), both.call, settings


@pytest.fixture(scope="module")
def parts():
    return tiny_sdxl.sdxl_parts()


@pytest.fixture(scope="module")
def ours(parts):
    """Not to be changed by a test."""
    return assemble(Ours, parts)


@pytest.fixture
def own_stock(parts):
    """With copies of the models, to be changed."""
    return assemble_copy(Stock, parts)


@pytest.fixture
def own(parts):
    return assemble_copy(Ours, parts)


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


@each_class
def test_signatures_and_components_are_those_of_diffusers(cls):
    stock, ours, _, settings = pair(cls)
    for name in ("__call__", "encode_prompt", "__init__"):
        assert arguments(getattr(cls, name)) == arguments(getattr(type(stock), name))
    assert cls.__mro__.index(type(stock)) > 1 and cls.__name__ == type(stock).__name__ in CASES
    types = [{name: type(part) for name, part in pipe.components.items()} for pipe in (ours, stock)]
    assert types[0] == types[1]
    again = cls(**ours.components, **settings)
    assert all(again.components[name] is part for name, part in ours.components.items())
    assert json.loads(ours.to_json_string())["_class_name"] == cls.__name__


@each_class
def test_encoders_alone_and_the_rest_alone(cls):
    """And encoders are used through `forward`, which is where all ways of offloading bring the weights back."""
    _, ours, inputs, settings = pair(cls)
    parts = ours.components
    texts = assemble_copy(cls, {k: parts[k] if k in TEXT_PARTS else None for k in parts}, **settings)
    rest = assemble(cls, {k: None if k in TEXT_PARTS else parts[k] for k in parts}, **settings)
    for name, part in models(texts).items():
        only_in_forward(part)
        assert texts.components[name].get_input_embeddings().weight.isnan().all()
    for prompt, call in ((LONG, {"clip_skip": 1}), (SHORT, {"negative_prompt": OTHER})):
        embeds = embed(texts, prompt, **call)
        assert np.array_equal(draw(rest, **embeds, **inputs), draw(ours, prompt, **call, **inputs))
    with pytest.raises(ValueError, match="is None, so no prompt can be encoded"):
        draw(rest, LONG, **inputs)


@each_class
def test_from_pipe_to_diffusers_and_back(cls):
    """All models are shared; what else a class needs goes in by name."""
    stock, ours, inputs, settings = pair(cls)
    there = quiet(cls.from_pipe(stock, **settings))
    back = quiet(type(stock).from_pipe(there, **settings))
    assert all(pipe.components[name] is part for pipe in (there, back) for name, part in models(stock).items())
    assert np.array_equal(draw(there, LONG, **inputs), draw(ours, LONG, **inputs))
    assert np.array_equal(draw(back, SHORT, **inputs), draw(stock, SHORT, **inputs))
    if "XL" in cls.__name__:
        base = assemble(Ours, {name: part for name, part in ours.components.items() if name != "controlnet"})
        extra = {name: ours.components[name] for name in set(ours.components) - set(base.components)}
        assert np.array_equal(draw(quiet(cls.from_pipe(base, **extra)), LONG, **inputs), draw(ours, LONG, **inputs))


# ---- calls in which something else is encoded


def scheduler(cls, **settings):
    return {"scheduler": cls.from_config(tiny_sdxl.sdxl_parts()["scheduler"].config, **settings)}


UNUSED = {"negative_prompt": LONG + LONG}  # where nothing is guided: it does not count for the length
TURBO = {"num_inference_steps": 1, "guidance_scale": 0.0}
# other parts; the call; what of it is not read
CALLS = {
    "no guidance": (dict, {"guidance_scale": 1.0}, UNUSED),
    "negative": (dict, {"negative_prompt": OTHER}, {}),
    "prompt_2": (dict, {"prompt_2": OTHER, "negative_prompt": "blurry", "negative_prompt_2": "d"}, {}),
    "clip_skip": (dict, {"clip_skip": 1}, {}),
    "turbo": (lambda: scheduler(EulerAncestralDiscreteScheduler, timestep_spacing="trailing"), TURBO, UNUSED),
    # its UNet reads the guidance scale instead of a negative prompt
    "LCM": (lambda: scheduler(LCMScheduler) | {"unet": tiny_sdxl.unet(time_cond_proj_dim=256)}, {}, UNUSED),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_draws_what_diffusers_draws(parts, ours, name):
    changed, call, unused = CALLS[name]
    stock, pipe = (assemble(cls, parts, **changed()) for cls in (Stock, Ours))
    with watched(pipe) as seen:
        images = draw(pipe, SHORT, **call, **unused)
    assert np.array_equal(images, draw(stock, SHORT, **call)) and seen[0][1] == 77
    assert not np.array_equal(images, draw(ours, SHORT))
    assert not np.array_equal(draw(pipe, LONG, **call), draw(pipe, LONG.replace("bicycle", "dragon"), **call))


# ---- number formats, and models that are not where they run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision(own_stock, own, dtype):
    unet = own.unet.config
    # In half precision some versions of PyTorch draw other numbers from the same seed.
    noise = torch.randn((1, unet.in_channels, 8, 8), generator=torch.Generator().manual_seed(0))
    plain = [draw(own, prompt, latents=noise) for prompt in PROMPTS.values()]
    for pipe in (own_stock, own):
        pipe.to(dtype=dtype)
    assert all(value.dtype == dtype for value in embed(own, LONG).values())
    short, long = (draw(own, prompt, latents=noise.to(dtype)) for prompt in PROMPTS.values())
    assert np.abs(short - plain[0]).max() < 0.1 and np.abs(long - plain[1]).max() < 0.1
    assert np.array_equal(short, draw(own_stock, SHORT, latents=noise.to(dtype)))


@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2"])
def test_each_encoder_can_have_its_own_dtype(own_stock, own, name):
    """The embeddings have the second one's."""
    for pipe in (own_stock, own):
        pipe.components[name].to(torch.bfloat16)
    for prompt in PROMPTS.values():
        embeds = own.encode_prompt(prompt, negative_prompt="grey")
        assert {value.dtype for value in embeds} == {own.text_encoder_2.dtype}
    embeds = own.encode_prompt(SHORT, negative_prompt="grey")
    assert all(map(torch.equal, embeds, own_stock.encode_prompt(SHORT, negative_prompt="grey")))


@pytest.mark.skipif(ACCELERATOR is None, reason="there is no accelerator on this machine")
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_on_an_accelerator_and_offloaded_to_the_cpu(own_stock, own, prompt):
    on_cpu, sequential = draw(own, prompt), copy.deepcopy(own)
    own_stock.to(ACCELERATOR), own.to(ACCELERATOR)
    images = draw(own, prompt)
    assert np.abs(images - on_cpu).max() < 1e-2
    assert prompt == LONG or np.array_equal(images, draw(own_stock, prompt))
    for pipe, kind, place in ((own, "model", "cpu"), (quiet(sequential), "sequential", "meta")):
        getattr(pipe, f"enable_{kind}_cpu_offload")(device=ACCELERATOR)
        assert np.abs(draw(pipe, prompt) - images).max() < 1e-3
        assert {part.device.type for part in models(pipe).values()} == {place}
