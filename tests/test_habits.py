"""What people load into diffusers' SDXL and its encoders, loaded into the long-prompt class: LoRAs, dtypes and more."""

import copy

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.hooks import apply_layerwise_casting
from helpers import tiny_sdxl
from helpers.draw import SHORT, draw
from helpers.single_files import original_layout
from helpers.tiny_sdxl import assemble_copy
from helpers.vocabulary import tiny_tokenizer
from safetensors.torch import save_file
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


def same_as_stock(stock, pipe, **call):
    """The image of a short prompt, the same from both, bit for bit."""
    images = draw(pipe, SHORT, **call)
    assert np.array_equal(images, draw(stock, SHORT, **call))
    return images


# ---- LoRA

RANK, ALPHA = 4, 2.0
LORA_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "to_q", "to_k", "to_v", "to_out.0")
# kohya names the UNet's blocks as the original code does
KOHYA_BLOCKS = {
    "down_blocks.1.attentions.0": "input_blocks.3.1",
    "mid_block.attentions.0": "middle_block.1",
    "up_blocks.0.attentions.0": "output_blocks.0.1",
    "up_blocks.0.attentions.1": "output_blocks.1.1",
}


@pytest.fixture(scope="module")
def lora(loaded):
    """{(model, layer): (down, up)} for the UNet and both encoders, layers without the prefix `text_model.`."""
    generator, pipe, weights = torch.Generator().manual_seed(0), ours(loaded), {}
    for model in ("unet", *ENCODERS):
        for name, layer in getattr(pipe, model).named_modules():
            if name.endswith(LORA_LAYERS):
                down = 0.3 * torch.randn(RANK, layer.in_features, generator=generator)
                up = 0.3 * torch.randn(layer.out_features, RANK, generator=generator)
                weights[model, name.removeprefix("text_model.")] = (down, up)
    return weights


def diffusers_file(path, lora):
    """The names that diffusers' own scripts gave their LoRAs; there alpha is the rank."""
    state = {}
    for (model, layer), (down, up) in lora.items():
        name = f"{model}.{layer}" if model == "unet" else f"{model}.text_model.{layer}"
        state |= {f"{name}.lora_A.weight": down * (ALPHA / RANK), f"{name}.lora_B.weight": up}
    save_file(state, path)
    return path


def kohya_file(path, lora):
    prefixes, state = {"unet": "unet_", "text_encoder": "te1_text_model_", "text_encoder_2": "te2_text_model_"}, {}
    for (model, layer), (down, up) in lora.items():
        for block, name in KOHYA_BLOCKS.items():
            layer = layer.replace(block, name)
        name = f"lora_{prefixes[model]}{layer.replace('.', '_')}"
        state |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(ALPHA)}
    save_file(state, path)
    return path


LAYOUTS = {"diffusers": diffusers_file, "kohya": kohya_file}


def merged(pipe, lora, **scales):
    """The pipeline with the LoRA added to its weights by hand, each model's times its scale."""
    for (model, layer), (down, up) in lora.items():
        tower = getattr(pipe, model)
        layer = getattr(tower, "text_model", tower).get_submodule(layer)
        layer.weight += scales.get(model, 1.0) * ALPHA / RANK * (up @ down)
    return pipe


def assert_encodes_like(pipe, reference, plain, prompt):
    """Equal to `reference`, and unlike `plain` in either encoder."""
    got, expected, without = (p.encode_prompt(prompt)[0] for p in (pipe, reference, plain))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    for a, b in zip(got.split([32, 40], -1), without.split([32, 40], -1), strict=True):
        assert (a - b).abs().max() > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lora_file_is_the_same_lora_at_any_length(loaded, lora, layout, tmp_path):
    path = LAYOUTS[layout](tmp_path / "lora.safetensors", lora)
    stock, pipe = pair(loaded)
    reference, plain = merged(ours(loaded), lora), ours(loaded)
    for loading in (stock, pipe):
        loading.load_lora_weights(path, adapter_name="style")
    assert pipe.get_list_adapters() == {model: ["style"] for model in ("unet", *ENCODERS)}
    image = same_as_stock(stock, pipe)
    assert np.abs(image - draw(reference, SHORT)).max() < 1e-3 < np.abs(image - draw(plain, SHORT)).max()
    for prompt in (SHORT, LONG):
        assert_encodes_like(pipe, reference, plain, prompt)
    # and in an encoder with 248 positions, if it is there first
    long, expected, without = (
        ours(loaded, text_encoder=tiny_sdxl.stretched(p.text_encoder, 248), tokenizer=tiny_tokenizer(248))
        for p in (plain, reference, plain)
    )
    long.load_lora_weights(path)
    first = [p.encode_prompt(LONG)[0][..., :32] for p in (long, expected, without)]
    torch.testing.assert_close(first[0], first[1], rtol=1e-4, atol=1e-4)
    assert (first[0] - first[2]).abs().max() > 0.1


def test_lora_scales_weights_and_fusing(loaded, lora, tmp_path):
    path = kohya_file(tmp_path / "lora.safetensors", lora)
    stock, pipe = pair(loaded)
    for loading in (stock, pipe):
        loading.load_lora_weights(path, adapter_name="style")
    plain, before = ours(loaded), pipe.encode_prompt(LONG)[0]

    # a scale for one call, which is gone after it
    half = {"cross_attention_kwargs": {"scale": 0.5}}
    assert not np.array_equal(same_as_stock(stock, pipe, **half), draw(pipe, SHORT))
    image = draw(pipe, LONG, **half)
    reference = merged(ours(loaded), lora, unet=0.5, text_encoder=0.5, text_encoder_2=0.5)
    assert np.abs(image - draw(reference, LONG)).max() < 1e-3 < np.abs(image - draw(plain, LONG)).max()
    assert torch.equal(pipe.encode_prompt(LONG)[0], before)

    # a weight for each model, until it is set anew
    weights = {"unet": 0.9, "text_encoder": 0.2, "text_encoder_2": 0.7}
    for loading in (stock, pipe):
        loading.set_adapters("style", adapter_weights=[weights])
    same_as_stock(stock, pipe, **half)
    assert_encodes_like(pipe, merged(ours(loaded), lora, **weights), plain, LONG)

    # merged into the weights, and out again
    pipe.set_adapters("style")
    pipe.fuse_lora(lora_scale=0.5)
    assert_encodes_like(pipe, merged(ours(loaded), lora, text_encoder=0.5, text_encoder_2=0.5), plain, LONG)
    pipe.unfuse_lora()
    pipe.set_adapters("style")  # in diffusers, fuse_lora's scale stays with the unfused layers
    torch.testing.assert_close(pipe.encode_prompt(LONG)[0], before, rtol=1e-4, atol=1e-4)
    pipe.unload_lora_weights()
    torch.testing.assert_close(pipe.encode_prompt(LONG)[0], plain.encode_prompt(LONG)[0], rtol=1e-4, atol=1e-4)


def test_a_lora_of_the_replaced_encoder_is_gone(loaded, lora, tmp_path):
    """diffusers keeps a LoRA in the encoder's layers, so a new encoder must come first. Loading again mends it."""
    path = kohya_file(tmp_path / "lora.safetensors", lora)
    pipe, plain = ours(loaded), ours(loaded)
    pipe.load_lora_weights(path, adapter_name="style")
    pipe.text_encoder = plain.text_encoder
    assert torch.equal(pipe.encode_prompt(SHORT)[0][..., :32], plain.encode_prompt(SHORT)[0][..., :32])
    assert pipe.get_list_adapters() == {"unet": ["style"], "text_encoder_2": ["style"]}
    pipe.unload_lora_weights()
    pipe.load_lora_weights(path, adapter_name="style")
    assert_encodes_like(pipe, merged(ours(loaded), lora), ours(loaded), LONG)


# ---- textual inversion


def test_a_textual_inversion_file_of_both_encoders(loaded):
    """The tensors that A1111's trainers write for SDXL, loaded as diffusers' documentation says."""
    generator = torch.Generator().manual_seed(0)
    vectors = {"clip_l": torch.randn(4, 32, generator=generator), "clip_g": torch.randn(4, 40, generator=generator)}
    tokenizers = {"tokenizer": tiny_tokenizer(77), "tokenizer_2": tiny_tokenizer(77, pad_token="!")}
    stock, pipe = pair(loaded, **tokenizers)
    pipe.register_modules(**copy.deepcopy(tokenizers))
    for loading in (stock, pipe):
        for name, tokenizer, encoder in (
            ("clip_l", loading.tokenizer, loading.text_encoder),
            ("clip_g", loading.tokenizer_2, loading.text_encoder_2),
        ):
            loading.load_textual_inversion(vectors[name], token="<style>", text_encoder=encoder, tokenizer=tokenizer)
    call = {"prompt_2": "a <style> cat", "negative_prompt": "<style>"}
    assert not np.array_equal(same_as_stock(stock, pipe, **call), draw(pipe, SHORT, negative_prompt="<style>"))
    assert pipe.prompt_layout(f"{LONG} <style>").tokens == 140 + 4


# ---- single files


def test_from_single_file(sdxl_folder, loaded, tmp_path):
    stock, pipe = pair(loaded)
    path = tmp_path / "checkpoint.safetensors"
    save_file(original_layout(stock.components), path)
    single = StableDiffusionXLLongPromptPipeline.from_single_file(path, config=str(sdxl_folder), add_watermarker=False)
    for name in ("unet", "vae", *ENCODERS):
        expected, got = (getattr(p, name).state_dict() for p in (stock, single))
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[key], got[key]) for key in expected)
    same_as_stock(stock, single, negative_prompt="blurry")
    assert np.array_equal(draw(single, LONG), draw(pipe, LONG))
    # a 248-token encoder goes in as into `from_pretrained`
    encoder = {"text_encoder": tiny_sdxl.stretched(stock.text_encoder, 248), "tokenizer": tiny_tokenizer(248)}
    single = StableDiffusionXLLongPromptPipeline.from_single_file(path, config=str(sdxl_folder), **encoder)
    assert single.text_encoder is encoder["text_encoder"]
    assert single.prompt_layout(LONG).chunks == (1, 3)
    assert torch.equal(single.encode_prompt(LONG)[0], ours(loaded, **encoder).encode_prompt(LONG)[0])


# ---- dtypes


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_encoders_quantised_to_int8(loaded):
    """Their weights are no parameters any more, and nothing may ask for another dtype."""
    quantised = {
        name: torch.ao.quantization.quantize_dynamic(loaded[name], {nn.Linear}, dtype=torch.qint8) for name in ENCODERS
    }
    stock, pipe = pair(loaded, **quantised)
    assert any(isinstance(module, nn.quantized.dynamic.Linear) for module in pipe.text_encoder.modules())
    same_as_stock(stock, pipe, negative_prompt="blurry")
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
