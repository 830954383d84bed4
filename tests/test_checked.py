"""Images are checked to be some: where values stop being finite is said, and nothing else changes."""

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.drawing import EMBEDDINGS

from debias_diffusion.pipelines.rendering import generate_images

PROMPTS = ["a red cat", "a dog", "a blue bird"]


@pytest.fixture
def pipe():
    pipe = tiny_sdxl.assemble(StableDiffusionXLPipeline, tiny_sdxl.sdxl_parts())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def noise(count=3):
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def test_good_images_are_the_pipelines_own(pipe):
    steps = []
    expected = pipe(PROMPTS, num_inference_steps=2, generator=noise()).images
    images = generate_images(
        pipe,
        PROMPTS,
        num_inference_steps=2,
        generator=noise(),
        on_step=lambda step, steps_in_all: steps.append(step),
    )
    assert [image.tobytes() for image in images] == [image.tobytes() for image in expected] and steps == [1, 2]
    pipe.vae.enable_slicing()
    assert len(generate_images(pipe, PROMPTS, num_inference_steps=1, generator=noise())) == 3
    assert not pipe.vae.decoder._forward_hooks


@pytest.mark.parametrize(
    ("part", "value", "where"),
    [
        ("text_encoder", float("nan"), "latents after step 1"),
        ("text_encoder_2", 1e38, "latents after step 1"),
        ("unet", float("inf"), "latents after step 1"),
        ("vae", float("nan"), "pixels"),
    ],
)
def test_weights_that_are_no_numbers_give_no_image(pipe, part, value, where):
    weights = [weight for weight in getattr(pipe, part).parameters() if weight.ndim > 1]
    with torch.no_grad():
        weights[-1].view(-1)[0] = value
        if part.startswith("text"):
            getattr(pipe, part).get_input_embeddings().weight[:] = value
    reasons = generate_images(pipe, PROMPTS, num_inference_steps=2, generator=noise())
    assert reasons == [f"its {where} are not finite (NaN or infinite)"] * 3
    assert not pipe.vae.decoder._forward_hooks


@pytest.mark.parametrize("slicing", [False, True])
def test_infinite_pixels_of_one_image_are_its_alone(pipe, slicing):
    """They are neither black nor NaN once they are clipped to [0, 1]."""
    (pipe.vae.enable_slicing if slicing else pipe.vae.disable_slicing)()
    expected = pipe(PROMPTS, num_inference_steps=1, generator=noise()).images
    calls = []

    def break_second(module, inputs, pixels):
        calls.append(len(pixels))
        if (1 if slicing else 0) == len(calls) - 1:
            pixels[0 if slicing else 1] = float("inf")
        return pixels

    pipe.vae.decoder.conv_out.register_forward_hook(break_second)
    images = generate_images(pipe, PROMPTS, num_inference_steps=1, generator=noise())
    assert images[1] == "its pixels are not finite (NaN or infinite)"
    assert [images[i].tobytes() for i in (0, 2)] == [expected[i].tobytes() for i in (0, 2)]


def test_embeddings_that_are_no_numbers_draw_nothing(pipe):
    embeddings = dict(zip(EMBEDDINGS, pipe.encode_prompt(PROMPTS[:2]), strict=True))
    embeddings["negative_prompt_embeds"][:, 5, 3] = float("nan")
    pipe.unet = None
    reasons = generate_images(pipe, **embeddings, num_inference_steps=1)
    assert reasons == ["its embeddings are not finite (NaN or infinite)"] * 2


def test_an_image_that_the_safety_checker_blacked_out_is_none():
    pipe = tiny_sdxl.assemble(StableDiffusionPipeline, tiny_sdxl.sd15_parts())
    pipe.set_progress_bar_config(disable=True)
    pipe.run_safety_checker = lambda image, device, dtype: (image, [True, False])
    images = generate_images(pipe, PROMPTS[:2], num_inference_steps=1, generator=noise(2))
    assert images[0] == "the safety checker of the checkpoint has blacked it out" and images[1].size == (64, 64)
