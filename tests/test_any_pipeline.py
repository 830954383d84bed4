"""`with_long_prompts`: pipelines that are already there, of classes without a long-prompt class of their own."""

import gc

import diffusers
import numpy as np
import pytest
import torch
from diffusers import (
    AutoPipelineForImage2Image,
    DiffusionPipeline,
    FluxPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPAGPipeline,
    StableDiffusionXLPipeline,
)
from helpers import tiny_sdxl
from helpers.drawing import LONG, SHORT, draw
from helpers.tiny_sdxl import assemble, assemble_copy

from debias_diffusion.pipelines import (
    SDLongPromptMixin,
    SDXLLongPromptMixin,
    StableDiffusionXLLongPromptPipeline,
    with_long_prompts,
)


@pytest.fixture(scope="module")
def base():
    return tiny_sdxl.sdxl_parts()


def test_models_are_shared_and_the_pipeline_given_stays_as_it_is(base):
    pipe = assemble(StableDiffusionXLPipeline, base)
    short = draw(pipe, SHORT)
    long = with_long_prompts(pipe)
    assert type(pipe) is StableDiffusionXLPipeline and isinstance(long, StableDiffusionXLPipeline)
    assert all(long.components[name] is component for name, component in pipe.components.items())
    assert np.array_equal(draw(long, SHORT), short)
    own = assemble(StableDiffusionXLLongPromptPipeline, base)
    assert np.array_equal(draw(long, LONG), draw(own, LONG))
    assert pipe.encode_prompt(LONG)[0].shape[1] == 77
    # Options and new components belong to one of the two only.
    long.set_long_prompt(strict=True)
    again = with_long_prompts(long)
    with pytest.raises(ValueError, match="`strict` allows one"):
        again.encode_prompt(LONG)
    again.set_long_prompt()
    with pytest.raises(ValueError, match="`strict` allows one"):
        long.encode_prompt(LONG)
    long.text_encoder = None
    assert pipe.text_encoder is not None and pipe.config["text_encoder"] == ("transformers", "CLIPTextModel")


def test_nothing_is_cast_or_copied(base):
    pipe = assemble_copy(StableDiffusionXLPipeline, base).to(torch.bfloat16)
    pipe.unet.to(torch.float32)
    gc.collect()
    before = {id(object_) for object_ in gc.get_objects() if isinstance(object_, torch.nn.Parameter)}
    long = with_long_prompts(pipe)
    after = {id(object_) for object_ in gc.get_objects() if isinstance(object_, torch.nn.Parameter)}
    assert after <= before
    assert long.text_encoder.dtype == torch.bfloat16 and long.unet.dtype == torch.float32


@pytest.mark.parametrize("cls", [StableDiffusionXLPAGPipeline, StableDiffusionXLImg2ImgPipeline])
def test_other_classes(base, cls):
    pipe = assemble(cls, base)
    image = {"image": torch.zeros(1, 3, 64, 64), "strength": 0.9} if cls is StableDiffusionXLImg2ImgPipeline else {}
    long = with_long_prompts(pipe)
    assert type(long) is type(with_long_prompts(pipe)) and issubclass(type(long), cls)
    assert np.array_equal(draw(long, SHORT, **image), draw(pipe, SHORT, **image))
    assert not np.array_equal(draw(long, LONG, **image), draw(long, LONG.replace("bicycle", "tractor"), **image))


def test_a_refiner_has_one_encoder(base):
    pipe = assemble(StableDiffusionXLImg2ImgPipeline, base, text_encoder=None, tokenizer=None)
    long = with_long_prompts(pipe)
    assert all(map(torch.equal, long.encode_prompt(SHORT), pipe.encode_prompt(SHORT)))
    assert long.encode_prompt(LONG)[0].shape == (1, 152, tiny_sdxl.WIDTH_2)


def test_it_saves_and_loads_as_diffusers_class(base, tmp_path):
    long = with_long_prompts(assemble(StableDiffusionXLPAGPipeline, base))
    long.save_pretrained(tmp_path)
    assert type(DiffusionPipeline.from_pretrained(tmp_path)) is StableDiffusionXLPAGPipeline


def test_the_auto_pipelines_find_what_belongs_to_it(base):
    long = with_long_prompts(assemble(StableDiffusionXLPipeline, base))
    other = AutoPipelineForImage2Image.from_pipe(long)
    assert type(other) is StableDiffusionXLImg2ImgPipeline and other.unet is long.unet
    assert with_long_prompts(other).encode_prompt(LONG)[0].shape[1] == 152


@pytest.mark.parametrize(
    ("name", "mixin"),
    [
        ("StableDiffusionXLAdapterPipeline", SDXLLongPromptMixin),
        ("StableDiffusionXLControlNetInpaintPipeline", SDXLLongPromptMixin),
        ("StableDiffusionXLControlNetPAGPipeline", SDXLLongPromptMixin),
        ("StableDiffusionXLControlNetUnionPipeline", SDXLLongPromptMixin),
        ("AnimateDiffPipeline", SDLongPromptMixin),
        ("StableDiffusionAdapterPipeline", SDLongPromptMixin),
        ("StableDiffusionControlNetPipeline", SDLongPromptMixin),
        ("StableDiffusionInpaintPipeline", SDLongPromptMixin),
    ],
)
def test_which_classes_encode_as_they_do(name, mixin):
    cls = getattr(diffusers, name)
    assert isinstance(with_long_prompts(cls.__new__(cls)), mixin)


def test_what_encodes_otherwise_is_refused_by_name():
    with pytest.raises(ValueError, match="FluxPipeline does not encode prompts as SDXL .* takes prompt, prompt_2"):
        with_long_prompts(FluxPipeline.__new__(FluxPipeline))
    with pytest.raises(ValueError, match="DiffusionPipeline does not encode .* is missing"):
        with_long_prompts(DiffusionPipeline())
