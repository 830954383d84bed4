"""diffusers' checks of its SDXL from text, run on ours: with a prompt within 77 tokens, with a long one, or both.

Values are compared bit for bit with diffusers' class, which for a long prompt is given our embeddings
(tests/test_long_prompt.py compares those with a literal reading of the layout). What all our classes must do is in
tests/test_pipeline_family.py: signatures, outputs, batches, callbacks, encoding in isolation, from_pipe, IP-Adapter.

Not here: what diffusers does after encoding and we do not touch (images, callbacks and further schedulers it takes).
"""

import numpy as np
import pytest
import torch
from diffusers import (
    EulerAncestralDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    StableDiffusionXLPipeline,
    UniPCMultistepScheduler,
)
from diffusers.hooks import apply_group_offloading
from helpers import tiny_sdxl
from helpers.draw import (
    DTYPE,
    LONG,
    OTHER,
    POSITIONS,
    PROMPTS,
    SHORT,
    TEXT_PARTS,
    draw,
    draw_as_diffusers,
    embed,
    load,
    models,
    watched,
)
from helpers.tiny_sdxl import assemble, assemble_copy

from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline

Stock, Ours = StableDiffusionXLPipeline, StableDiffusionXLLongPromptPipeline

ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
needs_accelerator = pytest.mark.needs("accelerator")
DEVICES = ["cpu", pytest.param(str(ACCELERATOR), marks=needs_accelerator)]

pytestmark = pytest.mark.usefixtures("no_grad")


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


@pytest.fixture(params=PROMPTS.values(), ids=PROMPTS)
def prompt(request):
    return request.param


# ---- calls


def scheduler(cls, **settings):
    return {"scheduler": cls.from_config(tiny_sdxl.sdxl_parts()["scheduler"].config, **settings)}


def lcm():
    """Its UNet reads the guidance scale instead of a negative prompt."""
    return scheduler(LCMScheduler) | {"unet": tiny_sdxl.unet(time_cond_proj_dim=256)}


UNUSED = {"negative_prompt": LONG + LONG}  # where nothing is guided: it does not count for the length
# by name: whether encoding is affected, so that a short prompt is tried too; other parts; the call
CALLS = {
    "guidance of 1.5": (True, dict, {"guidance_scale": 1.5}),
    "no guidance": (True, dict, {"guidance_scale": 1.0} | UNUSED),
    "guidance_rescale": (False, dict, {"guidance_rescale": 0.7}),
    "negative": (True, dict, {"negative_prompt": OTHER}),
    "prompt_2": (True, dict, {"prompt_2": OTHER, "negative_prompt": "blurry"}),
    "negative_prompt_2": (True, dict, {"negative_prompt": "blurry", "negative_prompt_2": LONG}),
    "clip_skip": (True, dict, {"clip_skip": 1}),
    "size": (False, dict, {"height": 96, "width": 64}),
    "timesteps": (False, dict, {"timesteps": [900, 500, 100], "num_inference_steps": None}),
    "denoising_end": (False, dict, {"num_inference_steps": 4, "denoising_end": 0.5}),
    "UniPC": (False, lambda: scheduler(UniPCMultistepScheduler), {"num_inference_steps": 3}),
    "PNDM": (False, lambda: scheduler(PNDMScheduler, skip_prk_steps=True), {"num_inference_steps": 3}),
    "turbo": (
        *(True, lambda: scheduler(EulerAncestralDiscreteScheduler, timestep_spacing="trailing")),
        {"num_inference_steps": 1, "guidance_scale": 0.0} | UNUSED,
    ),
    "LCM": (True, lcm, {"guidance_scale": 8.0} | UNUSED),
}
CASES = [(name, text) for name, (encoded, *_) in CALLS.items() for text in (PROMPTS if encoded else ["long"])]


@pytest.mark.parametrize(("name", "text"), CASES, ids=" ".join)
def test_a_call_draws_what_diffusers_draws(parts, ours, name, text):
    _, changed_parts, call = CALLS[name]
    prompt, changed = PROMPTS[text], changed_parts()
    pipes = [assemble(cls, parts, **changed) for cls in (Stock, Ours)]
    with watched(pipes[1]) as seen:
        images = draw(pipes[1], prompt, **call)
    expected = {key: value for key, value in call.items() if UNUSED.get(key) != value}
    assert np.array_equal(images, draw_as_diffusers(*pipes, prompt, **expected))
    assert seen[0][1] == max(POSITIONS[prompt], POSITIONS.get(call.get("negative_prompt_2"), 77))
    plain = draw(ours, prompt)
    assert images.shape != plain.shape or np.abs(images - plain).max() > 1e-4


# ---- dtypes


def start_noise(pipe):
    """In half precision some versions of PyTorch draw other numbers from the same seed."""
    unet = pipe.unet.config
    shape = (1, unet.in_channels, unet.sample_size, unet.sample_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_to_dtype_and_saved_in_it(own_stock, own, prompt, dtype, tmp_path):
    noise = start_noise(own)
    plain = draw(own, prompt, latents=noise)
    for pipe in (own_stock, own):
        pipe.to(dtype=dtype)
        assert pipe.dtype == dtype and all(part.dtype == dtype for part in models(pipe).values())
    assert all(value.dtype == dtype for value in embed(own, prompt).values())
    images = draw(own, prompt, latents=noise.to(dtype))
    assert np.isfinite(images).all() and np.abs(images - plain).max() < 0.1
    assert np.array_equal(images, draw_as_diffusers(own_stock, own, prompt, latents=noise.to(dtype)))
    own.save_pretrained(tmp_path)
    again = load(Ours, tmp_path, **{DTYPE: {"vae": torch.float32, "default": dtype}})
    dtypes = {name: part.dtype for name, part in models(again).items()}
    assert dtypes == dict.fromkeys(models(own), dtype) | {"vae": torch.float32}
    assert torch.equal(embed(again, prompt)["prompt_embeds"], embed(own, prompt)["prompt_embeds"])


@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2"])
def test_each_encoder_can_have_its_own_dtype(own_stock, own, prompt, name):
    """The embeddings have the second one's."""
    for pipe in (own_stock, own):
        pipe.components[name].to(torch.bfloat16)
    embeds = own.encode_prompt(prompt, negative_prompt="grey")
    assert {value.dtype for value in embeds} == {own.text_encoder_2.dtype}
    if prompt == SHORT:
        assert all(map(torch.equal, embeds, own_stock.encode_prompt(prompt, negative_prompt="grey")))


def test_layers_cast_to_float8_as_in_diffusers(own_stock, own):
    plain = draw(own, LONG)
    for pipe in (own_stock, own):
        pipe.to(dtype=torch.bfloat16)
        pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    images = draw(own, LONG)
    assert np.isfinite(images).all() and np.array_equal(images, draw(own_stock, **embed(own, LONG)))
    assert np.abs(images - plain).max() > 1e-4


# ---- components


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_from_pipe_keeps_the_configuration(own_stock, ours):
    own_stock.register_to_config(force_zeros_for_empty_prompt=False)
    there = quiet(Ours.from_pipe(own_stock))
    configs = [
        {key: value for key, value in pipe.config.items() if key[0] != "_"}
        for pipe in (own_stock, there, Stock.from_pipe(there))
    ]
    assert configs[0] == configs[1] == configs[2]
    # without zeros an absent negative prompt is an empty one, and counts no more than that
    assert np.array_equal(draw(there, SHORT), draw(own_stock, SHORT))
    assert not np.array_equal(draw(there, SHORT), draw(ours, SHORT))
    replaced = Ours.from_pipe(own_stock, text_encoder=tiny_sdxl.stretched(own_stock.text_encoder, 248))
    assert replaced.prompt_layout(LONG).chunks == (1, 3)


@pytest.mark.parametrize("absent", [TEXT_PARTS, tuple(Stock._optional_components)], ids=["encoders", "all optional"])
def test_optional_components_stay_away(own, ours, tmp_path, absent):
    embeds = embed(own, LONG)
    for name in absent:
        setattr(own, name, None)
    own.save_pretrained(tmp_path)
    again = load(Ours, tmp_path)
    assert {name for name, part in again.components.items() if part is None} >= set(absent)
    assert np.array_equal(draw(again, **embeds), draw(ours, LONG))


# ---- models that are not where they run


@needs_accelerator
@pytest.mark.parametrize(("kind", "place"), [("sequential", "meta"), ("model", "cpu")])
def test_cpu_offload(own, own_stock, prompt, kind, place):
    expected = draw(own.to(ACCELERATOR), prompt)
    for pipe in (own, own, Ours.from_pipe(own_stock)):
        getattr(quiet(pipe), f"enable_{kind}_cpu_offload")(device=ACCELERATOR)
        assert pipe._execution_device.type == ACCELERATOR.type
        assert np.abs(draw(pipe, prompt) - expected).max() < 1e-3
        assert {part.device.type for part in models(pipe).values()} == {place}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind", [{"offload_type": "block_level", "num_blocks_per_group": 1}, {"offload_type": "leaf_level"}]
)
def test_group_offload_of_each_model(own, device, kind):
    expected = draw(own.to(device), LONG)
    own.to("cpu")
    for part in (own.text_encoder, own.text_encoder_2, own.unet):
        apply_group_offloading(part, onload_device=torch.device(device), offload_device=torch.device("cpu"), **kind)
    own.vae.to(device)
    assert np.abs(draw(own, LONG) - expected).max() < 1e-3


@needs_accelerator
def test_on_an_accelerator(own_stock, own, prompt, tmp_path):
    own.save_pretrained(tmp_path)
    on_cpu, noise = draw(own, prompt), start_noise(own)
    for pipe in (own_stock, own):
        pipe.to(ACCELERATOR)
    assert all(value.device.type == ACCELERATOR.type for value in embed(own, prompt).values())
    images = draw(own, prompt)
    assert np.array_equal(images, draw_as_diffusers(own_stock, own, prompt))
    assert np.abs(images - on_cpu).max() < 1e-2
    assert np.abs(draw(load(Ours, tmp_path, device_map=ACCELERATOR.type), prompt) - images).max() < 1e-3
    images = draw(own, prompt, latents=noise).ravel()
    half = draw(own.to(dtype=torch.float16), prompt, latents=noise.half()).ravel()
    assert np.dot(images, half) / np.linalg.norm(images) / np.linalg.norm(half) > 0.95
