"""What people load into diffusers' SDXL and its encoders, loaded into the long-prompt class: LoRAs, dtypes and more."""

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.hooks import apply_layerwise_casting
from helpers import tiny_sdxl
from helpers.draw import SHORT, add_lora, draw
from helpers.tiny_sdxl import assemble_copy
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline

LONG = " ".join(["red", "cat", "blue", "sofa", "tree", "house", "sky"] * 20)  # one token each
ENCODERS = ("text_encoder", "text_encoder_2")

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def loaded():
    return tiny_sdxl.sdxl_parts()


def ours(loaded, **components):
    return assemble_copy(StableDiffusionXLLongPromptPipeline, loaded, **components)


def pair(loaded, **components):
    """diffusers' pipeline and ours, of separate models."""
    return assemble_copy(StableDiffusionXLPipeline, loaded, **components), ours(loaded, **components)


def test_a_lora_counts_in_long_prompts_as_if_it_were_merged(loaded):
    pipe, plain = ours(loaded), ours(loaded)
    for name in ENCODERS:
        add_lora(getattr(pipe, name))
    for scale in (1.0, 0.5):
        merged = ours(loaded)
        for name in ENCODERS:
            towers = [dict(getattr(p, name).named_modules()) for p in (pipe, merged)]
            for layer in (layer for layer, module in towers[0].items() if hasattr(module, "lora_A")):
                down, up = (getattr(towers[0][layer], part)["default"].weight for part in ("lora_A", "lora_B"))
                towers[1][layer].weight += scale * up @ down
        got, expected, without = (
            p.encode_prompt(LONG, **call)[0] for p, call in ((pipe, {"lora_scale": scale}), (merged, {}), (plain, {}))
        )
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert all(part.abs().max() > 0.01 for part in (got - without).split([32, 40], -1))


# ---- dtypes


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_encoders_quantised_to_int8(loaded):
    """Their weights are no parameters any more, and nothing may ask for another dtype."""
    quantised = {
        name: torch.ao.quantization.quantize_dynamic(loaded[name], {nn.Linear}, dtype=torch.qint8) for name in ENCODERS
    }
    stock, pipe = pair(loaded, **quantised)
    assert any(isinstance(module, nn.quantized.dynamic.Linear) for module in pipe.text_encoder.modules())
    call = {"negative_prompt": "blurry"}
    assert np.array_equal(draw(pipe, SHORT, **call), draw(stock, SHORT, **call))
    assert not np.array_equal(draw(pipe, LONG), draw(pipe, LONG + " dragon"))


@pytest.mark.parametrize("names", [ENCODERS[:1], ENCODERS])
def test_encoders_stored_in_float8(loaded, names):
    """diffusers' layerwise casting keeps weights in float8 and computes in float32."""
    pipe, plain = ours(loaded), ours(loaded)
    for name in names:
        apply_layerwise_casting(getattr(pipe, name), torch.float8_e4m3fn, torch.float32)
    assert pipe.text_encoder.dtype == torch.float8_e4m3fn
    outputs = [p.encode_prompt(LONG, negative_prompt="grey") for p in (pipe, plain)]
    for got, expected in zip(*outputs, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=0, atol=1)
    assert not torch.equal(outputs[0][0], outputs[1][0])


class NeverCast(type(tiny_sdxl.text_encoder())):
    def to(self, *args, **kwargs):
        raise AssertionError(f"cast with {args} {kwargs}")


def test_encoders_are_never_cast_or_moved(loaded):
    plain = ours(loaded)
    encoder = NeverCast(plain.text_encoder.config).eval()
    encoder.load_state_dict(plain.text_encoder.state_dict())
    pipe = StableDiffusionXLLongPromptPipeline(**{**plain.components, "text_encoder": encoder})
    assert np.array_equal(draw(pipe, LONG, negative_prompt=SHORT), draw(plain, LONG, negative_prompt=SHORT))
    with pytest.raises(AssertionError, match="cast with"):
        pipe.to(torch.bfloat16)


class NoFloat64(TorchDispatchMode):
    """MPS has none."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        assert torch.float64 not in {tensor.dtype for tensor in tensors}, function
        return result


def test_no_float64(loaded):
    pipe = ours(loaded)
    with NoFloat64():
        pipe.encode_prompt([LONG, SHORT], negative_prompt="grey", num_images_per_prompt=2, lora_scale=0.5, clip_skip=1)
        pipe.set_long_prompt(emphasis="comfyui").encode_prompt(f"(red:1.3) {LONG}")
    with pytest.raises(AssertionError), NoFloat64():
        torch.ones(1, dtype=torch.float64)


# ---- all together


def test_everything_at_once_is_what_it_is_one_by_one(loaded):
    """Prompts and negatives of unequal lengths, clip_skip and two images each: every row is its own call's."""
    pipe = ours(loaded)
    prompts, negatives = [SHORT, LONG], [LONG + " grey", "blurry"]
    batch = pipe.encode_prompt(prompts, negative_prompt=negatives, num_images_per_prompt=2, clip_skip=1)
    assert batch[0].shape == (4, 152, 72)
    for row in range(4):
        alone = pipe.encode_prompt(prompts[row // 2], negative_prompt=negatives[row // 2], clip_skip=1)
        for together, single in zip(batch, alone, strict=True):
            torch.testing.assert_close(together[row : row + 1], single, rtol=1e-5, atol=1e-5)
