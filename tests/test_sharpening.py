"""`sharpen`: cross-attention of long prompts, against keys scaled by hooks, in all that pipelines may be."""

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers import StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.draw import LONG, SHORT, draw, embed
from helpers.tiny_sdxl import assemble
from peft import LoraConfig

from debias_diffusion.pipelines import (
    StableDiffusionLongPromptPipeline,
    StableDiffusionXLLongPromptPipeline,
    sharpened,
)

pytestmark = pytest.mark.usefixtures("no_grad")
FACTOR = 2.0  # a power of two, by which rounding commutes


@pytest.fixture
def pipe():
    """Of models that a test may change."""
    return assemble(StableDiffusionXLLongPromptPipeline, tiny_sdxl.sdxl_parts())


def keys_of(unet):
    return [module.to_k for name, module in unet.named_modules() if name.endswith("attn2")]


def traces(pipe):
    """What is set on the UNet's modules, of which `forward` may be."""
    return [(sorted(vars(module)), vars(module).get("forward")) for module in pipe.unet.modules()]


def drawn_with_scaled_keys(pipe, prompt=LONG, **call):
    """The image where hooks double the keys, the plain way."""
    hooks = [layer.register_forward_hook(lambda module, inputs, keys: FACTOR * keys) for layer in keys_of(pipe.unet)]
    image = draw(pipe, prompt, **call)
    for hook in hooks:
        hook.remove()
    return image


def test_the_keys_of_cross_attention_are_scaled(pipe):
    """Which is the formula's softmax(factor * q k^T / sqrt(d)) v."""
    for each in (pipe, assemble(StableDiffusionLongPromptPipeline, tiny_sdxl.sd15_parts())):
        expected, plain = drawn_with_scaled_keys(each), draw(each, LONG)
        sharp = draw(each.set_long_prompt(sharpen=FACTOR), LONG)
        assert np.array_equal(sharp, expected) and not np.array_equal(sharp, plain)


@pytest.mark.parametrize("factor, prompt", [(FACTOR, SHORT), (1.0, LONG)])
def test_short_prompts_and_a_factor_of_one_stay_as_they_are(pipe, factor, prompt):
    plain = draw(pipe, prompt)
    assert np.array_equal(draw(pipe.set_long_prompt(sharpen=factor), prompt), plain)


def test_nothing_stays_behind(pipe):
    before, plain = traces(pipe), draw(pipe, LONG)

    def fail(*_):
        assert traces(pipe) != before
        raise KeyboardInterrupt

    pipe.set_long_prompt(sharpen=FACTOR)
    with pytest.raises(KeyboardInterrupt):
        draw(pipe, LONG, callback_on_step_end=fail)
    assert traces(pipe) == before
    assert np.array_equal(draw(pipe.set_long_prompt(), LONG), plain)


class Own(StableDiffusionXLLongPromptPipeline):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


def test_the_call_of_a_subclass_scales_once(pipe):
    expected = draw(pipe.set_long_prompt(sharpen=FACTOR), LONG)
    own = Own(**pipe.components).set_long_prompt(sharpen=FACTOR)
    own.set_progress_bar_config(disable=True)
    assert np.array_equal(draw(own, LONG), expected)


def sharing(pipe, cls=StableDiffusionXLLongPromptPipeline):
    """A pipeline of the same models, with a scheduler of its own."""
    return assemble(cls, pipe.components, scheduler=copy.deepcopy(pipe.scheduler))


def in_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("run", [lambda work: work(), in_thread])
def test_a_plain_pipeline_in_a_step_of_a_sharpened_one(pipe, run):
    embeds, images = embed(pipe, LONG), []
    plain = draw(sharing(pipe, StableDiffusionXLPipeline), **embeds)
    alone = draw(pipe.set_long_prompt(sharpen=FACTOR), LONG)

    def preview(pipe, *_):
        images.append(run(lambda: draw(sharing(pipe, StableDiffusionXLPipeline), **embeds)))
        return {}

    assert np.array_equal(draw(pipe, LONG, callback_on_step_end=preview), alone)
    assert len(images) == 2 and all(np.array_equal(image, plain) for image in images)


def test_a_plain_pipeline_in_the_middle_of_a_sharpened_forward(pipe):
    other, sharp_thread, images = sharing(pipe), threading.current_thread(), []
    plain, alone = draw(other, LONG), draw(pipe.set_long_prompt(sharpen=FACTOR), LONG)

    def meanwhile(*_):
        if threading.current_thread() is sharp_thread:
            images.append(in_thread(lambda: draw(other, **embeds)))

    embeds = embed(pipe, LONG)
    pipe.unet.mid_block.register_forward_pre_hook(meanwhile)
    assert np.array_equal(draw(pipe, LONG), alone)
    assert len(images) == 2 and all(np.array_equal(image, plain) for image in images)


def test_two_sharpened_pipelines_of_which_one_ends_first(pipe):
    first, last = (sharing(pipe).set_long_prompt(sharpen=factor) for factor in (FACTOR, 3.0))
    before, alone = traces(pipe), [draw(first, LONG), draw(last, LONG)]
    last_has_begun, first_has_ended = threading.Event(), threading.Event()

    def begin_last(*_):
        if not last_has_begun.is_set():
            drawn.append(pool.submit(draw, last, LONG, callback_on_step_end=wait))
            assert last_has_begun.wait(60)
        return {}

    def wait(*_):
        last_has_begun.set()
        assert first_has_ended.wait(60)
        return {}

    drawn = []
    with ThreadPoolExecutor(1) as pool:
        image = draw(first, LONG, callback_on_step_end=begin_last)
        first_has_ended.set()
        assert np.array_equal(image, alone[0]) and np.array_equal(drawn[0].result(), alone[1])
    assert traces(pipe) == before


def test_contexts(pipe):
    """Of several UNets, but not twice of one; a pipeline's own factor holds instead of the context's."""
    other = assemble(StableDiffusionXLLongPromptPipeline, {**pipe.components, "unet": tiny_sdxl.unet(seed=1)})
    plain, sharp, other_sharp = draw(pipe, LONG), drawn_with_scaled_keys(pipe), drawn_with_scaled_keys(other)
    with sharpened(other.unet, 3.0), sharpened(pipe.unet, FACTOR), sharpened(pipe.unet, 1.0):
        with pytest.raises(ValueError, match="sharpened in this thread already"), sharpened(pipe.unet, FACTOR):
            pass
        assert np.array_equal(draw(pipe, LONG), sharp)
        assert np.array_equal(draw(other.set_long_prompt(sharpen=FACTOR), LONG), other_sharp)
        assert np.array_equal(in_thread(lambda: draw(pipe, LONG)), plain)
    assert np.array_equal(draw(pipe, LONG), plain)


def with_lora(pipe):
    torch.manual_seed(0)
    pipe.unet.add_adapter(LoraConfig(target_modules=["attn2.to_k", "attn2.to_v"], init_lora_weights=False))


def with_ip_adapter(pipe):
    adapter = tiny_sdxl.ip_adapter(pipe.unet)
    pipe.load_ip_adapter(adapter, subfolder=None, weight_name=None, image_encoder_folder=None)
    return {"ip_adapter_image_embeds": [torch.randn((2, 1, 24), generator=torch.Generator().manual_seed(0))]}


def with_hooks(pipe):
    """As offloading has them: they replace `forward` of each layer."""
    for layer in keys_of(pipe.unet):
        add_hook_to_module(layer, ModelHook())


@pytest.mark.parametrize("prepare", [with_lora, with_ip_adapter, with_hooks])
def test_with_other_things_in_the_unet(pipe, prepare):
    call = prepare(pipe) or {}
    before, expected = traces(pipe), drawn_with_scaled_keys(pipe, **call)
    sharp = draw(pipe.set_long_prompt(sharpen=FACTOR), LONG, **call)
    assert traces(pipe) == before
    assert np.array_equal(sharp, expected)


def test_hooks_that_go_in_a_call(pipe):
    plain = draw(pipe, LONG)
    with_hooks(pipe)

    def remove(pipe, *_):
        for layer in keys_of(pipe.unet):
            remove_hook_from_module(layer)
        return {}

    draw(pipe.set_long_prompt(sharpen=FACTOR), LONG, callback_on_step_end=remove)
    assert np.array_equal(draw(pipe.set_long_prompt(), LONG), plain)


def test_fused_projections(pipe):
    expected = drawn_with_scaled_keys(pipe)
    pipe.fuse_qkv_projections(vae=False)
    assert np.abs(draw(pipe.set_long_prompt(sharpen=FACTOR), LONG) - expected).max() < 1e-5


def test_other_factors_are_refused(pipe):
    for factor in (0.0, -1.0, 4.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="sharpen is .* at most 4"):
            pipe.set_long_prompt(sharpen=factor)
    with pytest.raises(ValueError, match="sharpen is"), sharpened(pipe.unet, 0.0):
        pass
