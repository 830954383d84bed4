"""`sharpen`: cross-attention of long prompts, against attention written out, in all that pipelines may be."""

import math

import numpy as np
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.draw import LONG, SHORT, draw
from helpers.tiny_sdxl import assemble, assemble_copy
from peft import LoraConfig

from debias_diffusion.pipelines import (
    StableDiffusionLongPromptPipeline,
    StableDiffusionXLLongPromptControlNetPipeline,
    StableDiffusionXLLongPromptPipeline,
    sharpened,
    with_long_prompts,
)

pytestmark = pytest.mark.usefixtures("no_grad")
FACTOR = 2.0  # a power of two, by which rounding commutes


class LiteralAttention:
    """diffusers' processor, written out: softmax(factor * q k^T / sqrt(d)) v."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **_):
        text = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (
            layer(states).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for layer, states in ((attn.to_q, hidden_states), (attn.to_k, text), (attn.to_v, text))
        )
        factor = self.factor if encoder_hidden_states is not None and text.shape[1] > 77 else 1.0
        weights = (factor * q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return attn.to_out[0]((weights @ v).transpose(1, 2).flatten(2))


@pytest.fixture(scope="module")
def parts():
    return tiny_sdxl.sdxl_parts()


@pytest.fixture
def pipe(parts):
    """Of models that a test may change."""
    return assemble_copy(StableDiffusionXLLongPromptPipeline, parts)


def keys_of(unet):
    return [module.to_k for name, module in unet.named_modules() if name.endswith("attn2")]


def drawn_with_scaled_keys(pipe, prompt=LONG, **call):
    """The image where hooks double the keys, the plain way."""
    hooks = [layer.register_forward_hook(lambda module, inputs, keys: FACTOR * keys) for layer in keys_of(pipe.unet)]
    image = draw(pipe, prompt, **call)
    for hook in hooks:
        hook.remove()
    return image


def test_the_scale_is_that_of_the_formula(pipe):
    sharp = draw(pipe.set_long_prompt(sharpen=1.3), LONG)
    pipe.set_long_prompt().unet.set_attn_processor(LiteralAttention(1.3))
    literal = draw(pipe, LONG)
    pipe.unet.set_attn_processor(LiteralAttention(1.0))
    assert np.abs(sharp - literal).max() < 1e-5 < 1e-3 < np.abs(sharp - draw(pipe, LONG)).max()


@pytest.mark.parametrize("factor, prompt", [(FACTOR, SHORT), (1.0, LONG)])
def test_short_prompts_and_a_factor_of_one_stay_as_they_are(pipe, factor, prompt):
    plain = draw(pipe, prompt)
    assert np.array_equal(draw(pipe.set_long_prompt(sharpen=factor), prompt), plain)


def test_nothing_stays_behind(pipe):
    def traces():
        return [sorted(vars(module)) for module in pipe.unet.modules()]

    before, plain = traces(), draw(pipe, LONG)

    def fail(*_):
        assert traces() != before
        raise KeyboardInterrupt

    pipe.set_long_prompt(sharpen=FACTOR)
    with pytest.raises(KeyboardInterrupt):
        draw(pipe, LONG, callback_on_step_end=fail)
    assert traces() == before
    assert not np.array_equal(draw(pipe, LONG), plain) and traces() == before
    assert np.array_equal(draw(pipe.set_long_prompt(), LONG), plain)


class Own(StableDiffusionXLLongPromptPipeline):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


def test_a_context_within_a_context_scales_once(pipe):
    """Such as the call of a subclass, which calls that of its parent."""
    expected = draw(pipe.set_long_prompt(sharpen=FACTOR), LONG)
    own = Own(**pipe.components).set_long_prompt(sharpen=FACTOR)
    own.set_progress_bar_config(disable=True)
    assert np.array_equal(draw(own, LONG), expected)
    with sharpened(pipe.unet, FACTOR):
        assert np.array_equal(draw(pipe, LONG), expected)


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
    expected = drawn_with_scaled_keys(pipe, **call)
    sharp = draw(pipe.set_long_prompt(sharpen=FACTOR), LONG, **call)
    assert np.array_equal(sharp, expected) and not np.array_equal(sharp, draw(pipe.set_long_prompt(), LONG, **call))


def test_fused_projections(pipe):
    expected = drawn_with_scaled_keys(pipe)
    pipe.fuse_qkv_projections(vae=False)
    assert np.abs(draw(pipe.set_long_prompt(sharpen=FACTOR), LONG) - expected).max() < 1e-5


def test_a_controlnet_and_stable_diffusion_1_5(parts):
    controlled = assemble_copy(
        StableDiffusionXLLongPromptControlNetPipeline, parts, controlnet=tiny_sdxl.controlnet(parts["unet"])
    )
    older = assemble_copy(StableDiffusionLongPromptPipeline, tiny_sdxl.sd15_parts())
    for pipe, call in ((controlled, {"image": tiny_sdxl.picture()}), (older, {})):
        expected = drawn_with_scaled_keys(pipe, **call)
        assert np.array_equal(draw(pipe.set_long_prompt(sharpen=FACTOR), LONG, **call), expected)


def test_a_wrapped_pipeline_and_from_pipe(parts):
    stock = assemble(StableDiffusionXLPipeline, parts)
    wrapped = with_long_prompts(stock).set_long_prompt(sharpen=FACTOR)
    taken_over = StableDiffusionXLLongPromptPipeline.from_pipe(wrapped)
    taken_over.set_progress_bar_config(disable=True)
    assert np.array_equal(draw(wrapped, LONG), draw(taken_over, LONG))
    assert np.array_equal(draw(wrapped, LONG), drawn_with_scaled_keys(taken_over.set_long_prompt()))


@pytest.mark.parametrize("factor", [0.0, -1.0, 4.1, math.nan, math.inf])
def test_other_factors_are_refused(pipe, factor):
    with pytest.raises(ValueError, match=r"sharpen is .*, but must be above 0 and at most 4"):
        pipe.set_long_prompt(sharpen=factor)
    with pytest.raises(ValueError, match="sharpen is"), sharpened(pipe.unet, factor):
        pass
