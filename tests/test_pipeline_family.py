"""Our own classes as diffusers checks its pipelines: signatures, encoding alone, other calls, number formats.

What all classes do with short and long prompts is in tests/helpers/matrix.py.
"""

import json
from inspect import Parameter

import numpy as np
import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler, LCMScheduler, StableDiffusionXLPipeline
from diffusers.hooks import apply_layerwise_casting
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from debias_diffusion import pipelines
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline

Stock, Ours = StableDiffusionXLPipeline, StableDiffusionXLLongPromptPipeline
ENCODERS = ("text_encoder", "text_encoder_2")
CLASSES = [getattr(pipelines, name) for name in pipelines.__all__ if name.endswith("Pipeline")]


pytestmark = pytest.mark.usefixtures("no_grad")
each_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)


def pair(cls):
    """diffusers' pipeline and ours of the same models, arguments of the call, and settings for making another."""
    both = Pipelines(cls.__name__)
    older = "safety_checker" in parameters(cls.__init__)  # these warn without one, unless told that it is meant so
    settings = {"requires_safety_checker": False} if older else {}
    return both.stock, assemble(cls, both.stock.components, **settings), both.call, settings


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
    for name in ("encode_prompt", "__init__"):
        assert arguments(getattr(cls, name)) == arguments(getattr(type(stock), name))
    own = [("long_prompt", Parameter.KEYWORD_ONLY, None), ("words", Parameter.KEYWORD_ONLY, None)]
    called = arguments(cls.__call__)
    assert [each for each in called if each not in own] == arguments(type(stock).__call__) and all(
        each in called for each in own
    )
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
    with pytest.raises(ValueError, match="is None: give `prompt_embeds`"):
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
    "prompt_2": (dict, {"prompt_2": OTHER, "negative_prompt": "blurry", "negative_prompt_2": "d"}, {}),
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


@pytest.mark.parametrize("names", [ENCODERS[:1], ENCODERS])
def test_encoders_stored_in_float8(ours, own, names):
    """diffusers' layerwise casting keeps weights in float8 and computes in float32."""
    for name in names:
        apply_layerwise_casting(getattr(own, name), torch.float8_e4m3fn, torch.float32)
    assert own.text_encoder.dtype == torch.float8_e4m3fn
    outputs = [pipe.encode_prompt(LONG, negative_prompt="grey") for pipe in (own, ours)]
    for got, expected in zip(*outputs, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=0, atol=1)
    assert not torch.equal(outputs[0][0], outputs[1][0])


class NoFloat64(TorchDispatchMode):
    """MPS has none."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        assert torch.float64 not in {tensor.dtype for tensor in tensors}, function
        return result


def test_no_float64(own):
    with NoFloat64():
        own.set_long_prompt(emphasis="comfyui").encode_prompt([f"(red:1.3) {LONG}", SHORT], negative_prompt="grey")
    with pytest.raises(AssertionError), NoFloat64():
        torch.ones(1, dtype=torch.float64)


def test_everything_at_once_is_what_it_is_one_by_one(ours):
    """Prompts and negatives of unequal lengths, clip_skip and two images each: every row is its own call's."""
    prompts, negatives = [SHORT, LONG], [LONG + " grey", "blurry"]
    batch = ours.encode_prompt(prompts, negative_prompt=negatives, num_images_per_prompt=2, clip_skip=1)
    for row in range(4):
        alone = ours.encode_prompt(prompts[row // 2], negative_prompt=negatives[row // 2], clip_skip=1)
        for together, single in zip(batch, alone, strict=True):
            torch.testing.assert_close(together[row : row + 1], single, rtol=1e-5, atol=1e-5)
