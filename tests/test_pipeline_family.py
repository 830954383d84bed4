"""What diffusers checks on all its pipelines, on ours: how they encode, batch, save, and work in parts.

As in tests/test_pipeline_suite.py, which lists diffusers' checks, values are compared bit for bit with diffusers'
class; for a long prompt that class is given our embeddings.

Checks of parts that all classes share are left to that suite: settings of VAE and attention, schedulers, variants,
offloading on an accelerator. ControlNets add guess mode, a share of the steps, and several at once
(controlnet_sdxl_guess, control_guidance_switch, the suites of multi-ControlNets); inpainting adds the mask and the UNet
of nine channels; inpainting and image-to-image add a range of steps and the refiner (two_xl_mixture_of_denoiser,
xl_refiner, RefinerOnly).
"""

import functools
import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLControlNetImg2ImgPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
)
from helpers import tiny_sdxl
from helpers.drawing import (
    EMBEDDINGS,
    LONG,
    OTHER,
    POSITIONS,
    PROMPTS,
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
from torchvision.transforms.functional import to_tensor

from debias_diffusion.pipelines import (
    StableDiffusionLongPromptImg2ImgPipeline,
    StableDiffusionLongPromptPipeline,
    StableDiffusionXLLongPromptControlNetImg2ImgPipeline,
    StableDiffusionXLLongPromptControlNetPipeline,
    StableDiffusionXLLongPromptImg2ImgPipeline,
    StableDiffusionXLLongPromptInpaintPipeline,
    StableDiffusionXLLongPromptPipeline,
)

pytestmark = pytest.mark.usefixtures("no_grad")


class Kind(NamedTuple):
    """A class of ours, what it stands for, what it is made of, and what it draws from besides the prompt."""

    ours: type[DiffusionPipeline]
    stock: type[DiffusionPipeline]
    parts: Callable[[], dict]
    images: dict
    others: dict

    @property
    def inputs(self):
        return {**self.images, **self.others}


# made once, and shared by pipelines
sdxl, sd15 = functools.cache(tiny_sdxl.sdxl_parts), functools.cache(tiny_sdxl.sd15_parts)


@functools.cache
def with_controlnet():
    return {**sdxl(), "controlnet": tiny_sdxl.controlnet(sdxl()["unet"])}


@functools.cache
def with_nine_channels():
    """The UNet of inpainting models reads latents, mask and masked latents."""
    return {**sdxl(), "unet": tiny_sdxl.unet(in_channels=9)}


PICTURE, CONTROL, MASK = tiny_sdxl.picture(0), tiny_sdxl.picture(1), tiny_sdxl.mask()
# of which two are done
STRENGTH = {"strength": 0.7, "num_inference_steps": 3}
KINDS = {
    "SDXL": Kind(StableDiffusionXLLongPromptPipeline, StableDiffusionXLPipeline, sdxl, {}, {}),
    "SDXL image to image": Kind(
        StableDiffusionXLLongPromptImg2ImgPipeline,
        StableDiffusionXLImg2ImgPipeline,
        sdxl,
        {"image": PICTURE},
        STRENGTH,
    ),
    "SDXL inpainting": Kind(
        StableDiffusionXLLongPromptInpaintPipeline,
        StableDiffusionXLInpaintPipeline,
        sdxl,
        {"image": PICTURE, "mask_image": MASK},
        STRENGTH,
    ),
    "SDXL inpainting with nine channels": Kind(
        StableDiffusionXLLongPromptInpaintPipeline,
        StableDiffusionXLInpaintPipeline,
        with_nine_channels,
        {"image": PICTURE, "mask_image": MASK},
        STRENGTH,
    ),
    "SDXL ControlNet": Kind(
        StableDiffusionXLLongPromptControlNetPipeline,
        StableDiffusionXLControlNetPipeline,
        with_controlnet,
        {"image": CONTROL},
        {},
    ),
    "SDXL ControlNet image to image": Kind(
        StableDiffusionXLLongPromptControlNetImg2ImgPipeline,
        StableDiffusionXLControlNetImg2ImgPipeline,
        with_controlnet,
        {"image": PICTURE, "control_image": CONTROL},
        STRENGTH,
    ),
    "SD 1.5": Kind(StableDiffusionLongPromptPipeline, StableDiffusionPipeline, sd15, {}, {}),
    "SD 1.5 image to image": Kind(
        StableDiffusionLongPromptImg2ImgPipeline,
        StableDiffusionImg2ImgPipeline,
        sd15,
        {"image": PICTURE},
        STRENGTH,
    ),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def parts(kind):
    return kind.parts()


def settings(kind):
    # without a safety checker the older pipelines warn, unless told that it is meant so
    return {"requires_safety_checker": False} if "safety_checker" in parameters(kind.stock.__init__) else {}


@pytest.fixture(scope="module")
def stock(kind, parts):
    """Not to be changed by a test, like `ours`."""
    return assemble(kind.stock, parts, **settings(kind))


@pytest.fixture(scope="module")
def ours(kind, parts):
    return assemble(kind.ours, parts, **settings(kind))


@pytest.fixture(params=PROMPTS.values(), ids=PROMPTS)
def prompt(request):
    return request.param


def is_sdxl(kind):
    return "prompt_2" in parameters(kind.stock.__call__)


def only(kinds):
    return pytest.mark.parametrize("kind", [KINDS[name] for name in kinds], ids=kinds, indirect=True, scope="module")


CONTROLLED = ("SDXL ControlNet", "SDXL ControlNet image to image")


# ---- from outside


def test_signatures_are_those_of_diffusers(kind):
    for name in ("__call__", "encode_prompt", "__init__"):
        assert arguments(getattr(kind.ours, name)) == arguments(getattr(kind.stock, name))
    needed = {"prompt", "negative_prompt", "guidance_scale", "prompt_embeds", "negative_prompt_embeds", *kind.inputs}
    assert {"ip_adapter_image", "ip_adapter_image_embeds", "callback_on_step_end", *needed} <= set(
        parameters(kind.ours.__call__)
    )
    assert kind.ours._callback_tensor_inputs == kind.stock._callback_tensor_inputs
    assert kind.ours.__mro__.index(kind.stock) > 1


def test_components(kind, stock, ours):
    assert {name: type(part) for name, part in ours.components.items()} == {
        name: type(part) for name, part in stock.components.items()
    }
    assert ours.model_cpu_offload_seq == stock.model_cpu_offload_seq
    assert ours._optional_components == stock._optional_components
    again = kind.ours(**ours.components, **settings(kind))
    assert all(again.components[name] is part for name, part in ours.components.items())
    assert json.loads(ours.to_json_string())["_class_name"] == kind.stock.__name__


# ---- what it draws

CALLS = {
    "plain": {},
    "two images of a negative": {"num_images_per_prompt": 2, "negative_prompt": "blurry"},
    "long negative": {"negative_prompt": LONG.replace("bicycle", "tractor"), "prompt": LONG},
    "no guidance": {"guidance_scale": 1.0},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls(kind, stock, ours, prompt, call):
    call = {"prompt": prompt, **kind.inputs, **call}
    images = draw(ours, **call)
    assert images.shape == (call.get("num_images_per_prompt", 1), 64, 64, 3)
    assert np.array_equal(images, draw_as_diffusers(stock, ours, **call))
    assert not np.array_equal(images, draw(ours, **call | {"prompt": OTHER}))


SDXL_CALLS = {
    "prompt_2": {"prompt_2": OTHER, "negative_prompt": "blurry", "negative_prompt_2": "dark", "clip_skip": 1},
    "conditions": {
        "original_size": (512, 300),
        "target_size": (900, 1024),
        "crops_coords_top_left": (4, 200),
        "negative_original_size": (512, 512),
        "negative_target_size": (1024, 1024),
    },
}


@pytest.mark.parametrize("call", SDXL_CALLS.values(), ids=SDXL_CALLS)
@only([name for name, kind in KINDS.items() if is_sdxl(kind)])
def test_calls_of_sdxl(kind, stock, ours, call):
    images = draw(ours, LONG, **kind.inputs, **call)
    assert np.array_equal(images, draw_as_diffusers(stock, ours, LONG, **kind.inputs, **call))
    assert not np.array_equal(images, draw(ours, LONG, **kind.inputs))


def test_late_words_are_drawn(kind, stock, ours):
    later = LONG.replace("bicycle", "tractor")

    def differs(pipe):
        return not np.array_equal(*(draw(pipe, text, **kind.inputs) for text in (LONG, later)))

    assert differs(ours) and not differs(stock)


def test_an_unused_negative_prompt_lengthens_nothing(kind, ours, prompt):
    call = {**kind.inputs, "guidance_scale": 0.0}
    with watched(ours) as seen:
        images = draw(ours, prompt, negative_prompt=LONG + LONG, **call)
    assert seen == [(1, POSITIONS[prompt])] * 2
    assert np.array_equal(images, draw(ours, prompt, **call))


def test_outputs(kind, ours):
    images = draw(ours, LONG, **kind.inputs)
    assert images.std() > 0.01
    plain = draw(ours, LONG, output_type="pt", **kind.inputs).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(plain, images)
    (pil,) = draw(ours, LONG, output_type="pil", **kind.inputs)
    assert np.array_equal(np.asarray(pil), (images[0] * 255).round())
    call = {"prompt": LONG, "num_inference_steps": 2, "output_type": "np", **kind.inputs}
    outputs = [
        ours(generator=torch.Generator().manual_seed(0), return_dict=return_dict, **call)
        for return_dict in (True, False)
    ]
    assert type(outputs[0]).__module__.startswith("diffusers.pipelines.") and type(outputs[1]) is tuple
    assert all(np.array_equal(output[0], images) for output in outputs)


# ---- batches


def test_batches_of_unequal_prompts(kind, ours):
    prompts = [SHORT, SHORT[:25], 100 * "red cat "]
    inputs = {**kind.inputs, **{name: [image] * 3 for name, image in kind.images.items()}}
    with watched(ours) as seen:
        images = draw(ours, prompts, generator=generators(3), negative_prompt=["grey", "", OTHER], **inputs)
    assert seen == [(6, 227), (6, 227)]
    assert images.shape == (3, 64, 64, 3) and len({image.tobytes() for image in images}) == 3


def test_in_a_batch_as_alone(kind, stock, ours, prompt):
    prompts = [prompt, prompt.replace("red", "green")]
    inputs = {**kind.inputs, **{name: [image] * 2 for name, image in kind.images.items()}}
    images = draw(ours, prompts, generator=generators(2), **inputs)
    assert np.array_equal(images, draw_as_diffusers(stock, ours, prompts, generator=generators(2), **inputs))
    for seed, text in enumerate(prompts):
        assert np.abs(images[seed] - draw(ours, text, seed=seed, **kind.inputs)[0]).max() < 1e-4
    assert np.abs(images[0] - draw(ours, prompts[1], **kind.inputs)[0]).max() > 1e-4


# ---- pictures that go in


def test_kinds_of_pictures(kind, ours):
    if not kind.images:
        pytest.skip("it reads no pictures")
    images = draw(ours, LONG, **kind.inputs)
    tensors = {name: to_tensor(image)[None] for name, image in kind.images.items()}
    arrays = {name: tensor.permute(0, 2, 3, 1).numpy() for name, tensor in tensors.items()}
    for given in (tensors, arrays):
        assert np.abs(draw(ours, LONG, **given, **kind.others) - images).max() < 1e-4
    other = {name: tiny_sdxl.picture(7) if name != "mask_image" else image for name, image in kind.images.items()}
    assert np.abs(draw(ours, LONG, **other, **kind.others) - images).max() > 5e-3


@only(["SDXL image to image", "SDXL inpainting", "SD 1.5 image to image"])
def test_latents_go_in_as_a_picture(kind, ours):
    random = torch.Generator().manual_seed(0)
    tensor = ours.image_processor.preprocess(PICTURE)
    latents = ours.vae.encode(tensor).latent_dist.sample(random) * ours.vae.config.scaling_factor
    call = {**kind.inputs, "image": latents, "generator": random}
    assert np.abs(draw(ours, LONG, **call) - draw(ours, LONG, **kind.inputs)).max() < 1e-4


@only(["SDXL inpainting"])
def test_only_the_mask_is_drawn_anew(kind, ours):
    latents, others = (
        draw(ours, text, output_type="latent", **kind.inputs) for text in (LONG, LONG.replace("bicycle", "tractor"))
    )
    assert torch.equal(latents[..., :4], others[..., :4]) and not torch.equal(latents[..., 4:], others[..., 4:])


@only(["SDXL image to image", "SDXL inpainting"])
def test_a_range_of_steps(kind, stock, ours):
    call = {**kind.inputs, "num_inference_steps": 4, "denoising_start": 0.3, "denoising_end": 0.8}
    images = draw(ours, LONG, **call)
    assert np.array_equal(images, draw_as_diffusers(stock, ours, LONG, **call))
    assert not np.array_equal(images, draw(ours, LONG, **call | {"denoising_start": 0.6}))


@only(["SDXL image to image", "SDXL inpainting"])
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


# ---- ControlNets

CONTROLS = {
    "guess mode": {"guess_mode": True},
    "scale": {"controlnet_conditioning_scale": 0.3},
    "a part of the steps": {"control_guidance_start": 0.0, "control_guidance_end": 0.5},
    "no guidance": {"guidance_scale": 1.0},
}


@pytest.mark.parametrize("call", CONTROLS.values(), ids=CONTROLS)
@only(CONTROLLED)
def test_control(kind, stock, ours, call):
    images = draw(ours, LONG, **kind.inputs, **call)
    assert np.array_equal(images, draw_as_diffusers(stock, ours, LONG, **kind.inputs, **call))
    assert not np.array_equal(images, draw(ours, LONG, **kind.inputs))


@only(CONTROLLED)
def test_the_controlnet_reads_the_long_prompt_too(kind, ours, prompt):
    lengths = []
    hook = ours.controlnet.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["encoder_hidden_states"].shape[1]), with_kwargs=True
    )
    try:
        images = draw(ours, prompt, **kind.inputs)
    finally:
        hook.remove()
    assert lengths == [POSITIONS[prompt]] * 2
    assert np.abs(images - draw(ours, prompt, **kind.inputs, controlnet_conditioning_scale=0.0)).max() > 1e-3


@only(CONTROLLED)
def test_two_controlnets(kind, parts):
    nets = [tiny_sdxl.controlnet(parts["unet"], seed) for seed in (0, 1)]
    pipes = [assemble(cls, parts, controlnet=nets) for cls in (kind.stock, kind.ours)]
    control = "control_image" if "control_image" in kind.images else "image"
    call = {**kind.inputs, control: [CONTROL, tiny_sdxl.picture(5)], "controlnet_conditioning_scale": [1.0, 0.5]}
    images = draw(pipes[1], LONG, **call)
    assert np.array_equal(images, draw_as_diffusers(*pipes, LONG, **call))
    call["controlnet_conditioning_scale"] = [1.0, 0.0]
    assert not np.array_equal(images, draw(pipes[1], LONG, **call))


# ---- callbacks


def test_callbacks_and_interrupt(kind, stock, ours):
    names, latents = kind.ours._callback_tensor_inputs, []

    def keep(pipe, step, timestep, tensors):
        assert pipe is ours and set(tensors) == set(names)
        assert tensors["prompt_embeds"].shape[:2] == (2, POSITIONS[LONG])
        latents.append(tensors["latents"].clone())
        return tensors

    def stop(pipe, step, timestep, tensors):
        assert set(tensors) == {"latents"}
        pipe._interrupt = step == 0
        return tensors

    def swap(pipe, step, timestep, tensors):
        return {**tensors, "prompt_embeds": tensors["prompt_embeds"].flip(0)}

    call = {"callback_on_step_end": keep, "callback_on_step_end_tensor_inputs": names}
    images = draw(ours, LONG, **kind.inputs, **call)
    assert len(latents) == 2 and np.array_equal(images, draw(ours, LONG, **kind.inputs))
    stopped = draw(ours, LONG, output_type="latent", callback_on_step_end=stop, **kind.inputs)
    assert torch.equal(stopped, latents[0]) and not torch.equal(stopped, latents[1])
    call = {"callback_on_step_end": swap, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    swapped = draw(ours, LONG, negative_prompt="grey", **kind.inputs, **call)
    assert np.array_equal(swapped, draw_as_diffusers(stock, ours, LONG, negative_prompt="grey", **kind.inputs, **call))
    assert not np.array_equal(swapped, draw(ours, LONG, negative_prompt="grey", **kind.inputs))


# ---- text encoders alone, and the rest alone


def test_encoding_in_isolation(kind, parts, ours):
    texts = assemble(kind.ours, {name: parts[name] if name in TEXT_PARTS else None for name in parts}, **settings(kind))
    rest = assemble(kind.ours, {name: None if name in TEXT_PARTS else parts[name] for name in parts}, **settings(kind))
    calls = [(LONG, {}), (SHORT, {"negative_prompt": OTHER})]
    calls += [(LONG, {"prompt_2": OTHER, "clip_skip": 1})] if is_sdxl(kind) else []
    for prompt, call in calls:
        embeds = embed(texts, prompt, **call)
        assert set(embeds) == set(EMBEDDINGS if is_sdxl(kind) else EMBEDDINGS[:2])
        assert np.array_equal(draw(rest, **embeds, **kind.inputs), draw(ours, prompt, **call, **kind.inputs))
    with pytest.raises(ValueError, match="is None, so no prompt can be encoded"):
        draw(rest, LONG, **kind.inputs)


def test_encoders_are_used_through_forward(kind, parts, ours):
    """Which is where all ways of offloading bring the weights back."""
    own = assemble_copy(kind.ours, parts, **settings(kind))
    for name in ("text_encoder", "text_encoder_2"):
        if name in own.components:
            only_in_forward(own.components[name])
            assert own.components[name].get_input_embeddings().weight.isnan().all()
    call = {"negative_prompt": "grey", "clip_skip": 1, **kind.inputs}
    for prompt in PROMPTS.values():
        assert np.array_equal(draw(own, prompt, **call), draw(ours, prompt, **call))


# ---- IP-Adapter


def test_ip_adapter(kind, parts, ours):
    pipes = [assemble_copy(cls, parts, **settings(kind)) for cls in (kind.stock, kind.ours)]
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


# ---- dtypes, saving, from one class to another


def test_bfloat16(kind, parts):
    pipe = assemble_copy(kind.ours, parts, **settings(kind)).to(dtype=torch.bfloat16)
    stock = assemble(kind.stock, pipe.components, **settings(kind))
    assert {value.dtype for value in embed(pipe, LONG).values()} == {torch.bfloat16}
    images = draw(pipe, LONG, **kind.inputs)
    assert np.isfinite(images).all()
    assert np.array_equal(images, draw_as_diffusers(stock, pipe, LONG, **kind.inputs))


@only(["SDXL inpainting", "SDXL ControlNet image to image", "SD 1.5 image to image"])
def test_saved_and_loaded(kind, stock, ours, tmp_path):
    folder = save_both(stock, ours, tmp_path)
    again = kind.ours.from_pretrained(folder, **settings(kind))
    again.set_progress_bar_config(disable=True)
    assert np.array_equal(draw(again, LONG, **kind.inputs), draw(ours, LONG, **kind.inputs))


def test_from_pipe(kind, stock, ours):
    """From diffusers' class and back, sharing all models."""
    there = kind.ours.from_pipe(stock, **settings(kind))
    back = kind.stock.from_pipe(there, **settings(kind))
    for pipe in (there, back):
        assert all(pipe.components[name] is part for name, part in models(stock).items())
        pipe.set_progress_bar_config(disable=True)
    assert np.array_equal(draw(there, LONG, **kind.inputs), draw(ours, LONG, **kind.inputs))
    assert np.array_equal(draw(back, SHORT, **kind.inputs), draw(stock, SHORT, **kind.inputs))


@only([name for name, kind in KINDS.items() if is_sdxl(kind)])
def test_from_pipe_of_sdxl_from_text(kind, parts, ours):
    """What else a class needs goes in by name."""
    base = assemble(StableDiffusionXLLongPromptPipeline, {k: v for k, v in parts.items() if k != "controlnet"})
    extra = {name: ours.components[name] for name in set(ours.components) - set(base.components)}
    pipe = kind.ours.from_pipe(base, **extra)
    assert pipe.unet is base.unet and pipe.text_encoder is base.text_encoder
    pipe.set_progress_bar_config(disable=True)
    assert np.array_equal(draw(pipe, LONG, **kind.inputs), draw(ours, LONG, **kind.inputs))
