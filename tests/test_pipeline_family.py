"""What diffusers checks on all its pipelines, on ours: how they encode, batch, save, and work in parts.

As in tests/test_pipeline_suite.py, which has what all classes share, values are compared bit for bit with diffusers'
class; for a long prompt that class is given our embeddings. Not every class makes every call: `CALLS` are dealt out.
"""

import functools
import json
from typing import NamedTuple

import diffusers
import numpy as np
import pytest
import torch
from helpers import tiny_sdxl
from helpers.draw import (
    EMBEDDINGS,
    LONG,
    OTHER,
    POSITIONS,
    SHORT,
    TEXT_PARTS,
    arguments,
    draw,
    draw_as_diffusers,
    embed,
    generators,
    models,
    only_in_forward,
    parameters,
    save_both,
    watched,
)
from helpers.tiny_sdxl import assemble, assemble_copy

from debias_diffusion import pipelines
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline

pytestmark = pytest.mark.usefixtures("no_grad")


class Kind(NamedTuple):
    """A class of ours, what it stands for, the function that makes its parts, and what it draws from besides a prompt.

    `images` by the name of the argument, and further arguments.
    """

    ours: type
    stock: type
    parts: object
    images: dict
    others: dict

    @property
    def inputs(self):
        return {**self.images, **self.others}

    @property
    def settings(self):
        """Without a safety checker the older pipelines warn, unless told that it is meant so."""
        return {"requires_safety_checker": False} if "safety_checker" in parameters(self.stock.__init__) else {}


# made once, and shared by pipelines
sdxl, sd15 = functools.cache(tiny_sdxl.sdxl_parts), functools.cache(tiny_sdxl.sd15_parts)


@functools.cache
def with_controlnet():
    return {**sdxl(), "controlnet": tiny_sdxl.controlnet(sdxl()["unet"])}


@functools.cache
def with_nine_channels():
    """The UNet of inpainting models reads latents, mask and masked latents."""
    return {**sdxl(), "unet": tiny_sdxl.unet(in_channels=9)}


PICTURE, CONTROL = tiny_sdxl.picture(0), tiny_sdxl.picture(1)
IMAGE, MASKED = {"image": PICTURE}, {"image": PICTURE, "mask_image": tiny_sdxl.mask()}
STRENGTH = {"strength": 0.7, "num_inference_steps": 3}  # of which two are done


def kind_of(family, task, parts, images=None, others=None):
    """diffusers' class has the name of ours without the words in its middle."""
    ours = getattr(pipelines, f"StableDiffusion{family}LongPrompt{task}Pipeline")
    stock = getattr(diffusers, ours.__name__.replace("LongPrompt", ""))
    return Kind(ours, stock, parts, images or {}, others or {})


KINDS = {
    "xl": kind_of("XL", "", sdxl),
    "xl-img2img": kind_of("XL", "Img2Img", sdxl, IMAGE, STRENGTH),
    "xl-inpaint": kind_of("XL", "Inpaint", sdxl, MASKED, STRENGTH),
    "xl-inpaint-9": kind_of("XL", "Inpaint", with_nine_channels, MASKED, STRENGTH),
    "xl-control": kind_of("XL", "ControlNet", with_controlnet, {"image": CONTROL}),
    "xl-control-img2img": kind_of(
        "XL", "ControlNetImg2Img", with_controlnet, {"image": PICTURE, "control_image": CONTROL}, STRENGTH
    ),
    "sd15": kind_of("", "", sd15),
    "sd15-img2img": kind_of("", "Img2Img", sd15, IMAGE, STRENGTH),
}
XL, CONTROLLED = [name for name in KINDS if name[:2] == "xl"], ["xl-control", "xl-control-img2img"]


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def parts(kind):
    return kind.parts()


@pytest.fixture(scope="module")
def stock(kind, parts):
    """Not to be changed by a test, like `ours`."""
    return assemble(kind.stock, parts, **kind.settings)


@pytest.fixture(scope="module")
def ours(kind, parts):
    return assemble(kind.ours, parts, **kind.settings)


def is_sdxl(kind):
    return "prompt_2" in parameters(kind.stock.__call__)


def only(kinds):
    return pytest.mark.parametrize("kind", [KINDS[name] for name in kinds], ids=kinds, indirect=True, scope="module")


def test_signatures_and_components_are_those_of_diffusers(kind, stock, ours):
    for name in ("__call__", "encode_prompt", "__init__"):
        assert arguments(getattr(kind.ours, name)) == arguments(getattr(kind.stock, name))
    needed = {"prompt", "negative_prompt", "guidance_scale", "prompt_embeds", "ip_adapter_image", *kind.inputs}
    assert needed <= set(parameters(kind.ours.__call__)) and kind.ours.__mro__.index(kind.stock) > 1
    assert kind.ours._callback_tensor_inputs == kind.stock._callback_tensor_inputs
    types = [{name: type(part) for name, part in pipe.components.items()} for pipe in (ours, stock)]
    assert types[0] == types[1]
    assert ours.model_cpu_offload_seq == stock.model_cpu_offload_seq
    assert ours._optional_components == stock._optional_components
    again = kind.ours(**ours.components, **kind.settings)
    assert all(again.components[name] is part for name, part in ours.components.items())
    assert json.loads(ours.to_json_string())["_class_name"] == kind.stock.__name__


# ---- what it draws

SIZES = {"original_size": (512, 300), "target_size": (900, 1024), "crops_coords_top_left": (4, 200)}
RANGE = {"num_inference_steps": 4, "denoising_start": 0.3, "denoising_end": 0.8}
UNGUIDED = {"guidance_scale": 1.0, "negative_prompt": LONG + LONG}  # which is not read
# by name: the classes that make the call, the prompt, the call
CALLS = {
    "short": (list(KINDS), SHORT, {}),
    "long": (list(KINDS), LONG, {}),
    "no guidance": (["xl", *CONTROLLED, "sd15-img2img"], LONG, UNGUIDED),
    "prompt_2": (XL, LONG, {"prompt_2": OTHER, "negative_prompt": "blurry", "negative_prompt_2": "d", "clip_skip": 1}),
    "sizes": (XL[1:], LONG, SIZES | {"negative_original_size": (512, 512), "negative_target_size": (1024, 1024)}),
    "range of steps": (["xl-img2img", "xl-inpaint"], LONG, RANGE),
    "guess mode": (CONTROLLED, LONG, {"guess_mode": True}),
    "control of a part of the steps": (CONTROLLED, LONG, {"control_guidance_end": 0.5}),
}
CASES = [(KINDS[name], call) for call, (names, *_) in CALLS.items() for name in names]


@pytest.mark.parametrize(
    ("kind", "name"), CASES, ids=[f"{name}: {call}" for call in CALLS for name in CALLS[call][0]], indirect=["kind"]
)
def test_calls(kind, stock, ours, name):
    _, prompt, call = CALLS[name]
    call = {"prompt": prompt, **kind.inputs, **call}
    with watched(ours) as seen:
        images = draw(ours, **call)
    assert images.shape == (1, 64, 64, 3) and images.std() > 0.01 and seen[0][1] == POSITIONS[prompt]
    assert np.array_equal(images, draw_as_diffusers(stock, ours, **call))
    assert name in ("short", "long") or not np.array_equal(images, draw(ours, prompt, **kind.inputs))


def test_batches_of_unequal_prompts(kind, stock, ours):
    prompts = [SHORT, SHORT[:25], 100 * "red cat "]
    inputs = [{**kind.inputs, **{name: [image] * n for name, image in kind.images.items()}} for n in (2, 3)]
    with watched(ours) as seen:
        images = draw(ours, prompts, generator=generators(3), negative_prompt=["grey", "", OTHER], **inputs[1])
    assert seen == [(6, 227), (6, 227)]
    assert images.shape == (3, 64, 64, 3) and len({image.tobytes() for image in images}) == 3
    prompts = [LONG, LONG.replace("red", "green")]
    images = draw(ours, prompts, generator=generators(2), **inputs[0])
    assert np.array_equal(images, draw_as_diffusers(stock, ours, prompts, generator=generators(2), **inputs[0]))
    for seed, text in enumerate(prompts):
        assert np.abs(images[seed] - draw(ours, text, seed=seed, **kind.inputs)[0]).max() < 1e-4
    assert np.abs(images[0] - images[1]).max() > 1e-4


@only(["xl-img2img", "xl-inpaint"])
def test_a_refiner(kind, parts):
    """It has the second encoder alone, and scores in place of a target size."""
    width = {"cross_attention_dim": tiny_sdxl.WIDTH_2}
    unet = tiny_sdxl.unet(projection_class_embeddings_input_dim=5 * 8 + tiny_sdxl.POOLED_WIDTH, **width)
    changes = {"unet": unet, "text_encoder": None, "tokenizer": None, "requires_aesthetics_score": True}
    pipes = [assemble(cls, parts, **changes) for cls in (kind.stock, kind.ours)]
    call = {**kind.inputs, "aesthetic_score": 7.0, "negative_prompt": "blurry"}
    images = draw(pipes[1], LONG, **call)
    assert np.array_equal(images, draw_as_diffusers(*pipes, LONG, **call))
    assert not np.array_equal(images, draw(pipes[1], LONG, **call | {"aesthetic_score": 2.0}))


# ---- callbacks, parts, adapters


def test_callbacks_read_and_change_the_embeddings(kind, stock, ours):
    names = kind.ours._callback_tensor_inputs

    def keep(pipe, step, timestep, tensors):
        assert pipe is ours and set(tensors) == set(names)
        assert tensors["prompt_embeds"].shape[:2] == (2, POSITIONS[LONG])
        return tensors

    def swap(pipe, step, timestep, tensors):
        return {**tensors, "prompt_embeds": tensors["prompt_embeds"].flip(0)}

    call = {"callback_on_step_end_tensor_inputs": names, "negative_prompt": "grey", **kind.inputs}
    images = draw(ours, LONG, callback_on_step_end=keep, **call)
    swapped = draw(ours, LONG, callback_on_step_end=swap, **call)
    assert np.array_equal(swapped, draw_as_diffusers(stock, ours, LONG, callback_on_step_end=swap, **call))
    assert not np.array_equal(swapped, images)


def test_encoders_alone_and_the_rest_alone(kind, parts, ours):
    """And encoders are used through `forward`, which is where all ways of offloading bring the weights back."""
    texts = assemble_copy(kind.ours, {k: parts[k] if k in TEXT_PARTS else None for k in parts}, **kind.settings)
    rest = assemble(kind.ours, {k: None if k in TEXT_PARTS else parts[k] for k in parts}, **kind.settings)
    for name, part in models(texts).items():
        only_in_forward(part)
        assert texts.components[name].get_input_embeddings().weight.isnan().all()
    calls = [(LONG, {"clip_skip": 1}), (SHORT, {"negative_prompt": OTHER})]
    calls += [(LONG, {"prompt_2": OTHER, "clip_skip": 1})] if is_sdxl(kind) else []
    for prompt, call in calls:
        embeds = embed(texts, prompt, **call)
        assert set(embeds) == set(EMBEDDINGS if is_sdxl(kind) else EMBEDDINGS[:2])
        assert np.array_equal(draw(rest, **embeds, **kind.inputs), draw(ours, prompt, **call, **kind.inputs))
    with pytest.raises(ValueError, match="is None, so no prompt can be encoded"):
        draw(rest, LONG, **kind.inputs)


def test_ip_adapter_and_bfloat16(kind, parts, ours):
    pipes = [assemble_copy(cls, parts, **kind.settings) for cls in (kind.stock, kind.ours)]
    for pipe in pipes:
        adapter = tiny_sdxl.ip_adapter(pipe.unet)
        pipe.load_ip_adapter(adapter, subfolder=None, weight_name=None, image_encoder_folder=None)
    embeds = torch.randn((2, 1, 24), generator=torch.Generator().manual_seed(0))
    call = {"ip_adapter_image_embeds": [embeds], **kind.inputs}
    images = draw(pipes[1], LONG, **call)
    assert np.array_equal(images, draw_as_diffusers(*pipes, LONG, **call))
    plain = draw(ours, LONG, **kind.inputs)
    assert np.abs(images - plain).max() > 1e-3
    pipes[1].set_ip_adapter_scale(0.0)
    assert np.abs(draw(pipes[1], LONG, **call) - plain).max() < 1e-4
    for pipe in pipes:
        pipe.unload_ip_adapter()
        pipe.to(dtype=torch.bfloat16)
    assert {value.dtype for value in embed(pipes[1], LONG).values()} == {torch.bfloat16}
    images = draw(pipes[1], LONG, **kind.inputs)
    assert np.isfinite(images).all() and np.array_equal(images, draw_as_diffusers(*pipes, LONG, **kind.inputs))


# ---- saving, from one class to another


@only(["xl-inpaint", "xl-control-img2img", "sd15-img2img"])
def test_saved_and_loaded(kind, stock, ours, tmp_path):
    folder = save_both(stock, ours, tmp_path)
    again = kind.ours.from_pretrained(folder, **kind.settings)
    again.set_progress_bar_config(disable=True)
    assert np.array_equal(draw(again, LONG, **kind.inputs), draw(ours, LONG, **kind.inputs))


def test_from_pipe(kind, parts, stock, ours):
    """From diffusers' class and back, and from ours that draws from text, sharing all models."""
    there = kind.ours.from_pipe(stock, **kind.settings)
    back = kind.stock.from_pipe(there, **kind.settings)
    pipes = [(there, LONG, ours), (back, SHORT, stock)]
    if is_sdxl(kind):
        base = assemble(StableDiffusionXLLongPromptPipeline, {k: v for k, v in parts.items() if k != "controlnet"})
        extra = {name: ours.components[name] for name in set(ours.components) - set(base.components)}
        pipes.append((kind.ours.from_pipe(base, **extra), LONG, ours))  # what else a class needs goes in by name
    for pipe, prompt, expected in pipes:
        assert all(pipe.components[name] is part for name, part in models(stock).items())
        pipe.set_progress_bar_config(disable=True)
        assert np.array_equal(draw(pipe, prompt, **kind.inputs), draw(expected, prompt, **kind.inputs))
