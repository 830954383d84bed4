"""Text towers in their true width, and what torch.compile makes of tiny ones."""

import os
import shutil
from copy import deepcopy

import open_clip
import pytest
import torch
from diffusers import StableDiffusionPipeline
from helpers import tiny_sdxl
from helpers.draw import LONG
from helpers.fix_clip_steps import N, pixels, prompted
from helpers.same_steps import TINY, assert_same_steps
from helpers.tiny_clip import SIGLIP_CONFIG, without_weights
from helpers.tiny_sdxl import assemble
from PIL import Image

from debias_diffusion.clip.image_tower import MaskedPatches
from debias_diffusion.methods.fix_clip import draw_mask
from debias_diffusion.pipelines import with_long_prompts


def of_true_width(model):
    """Two layers of a model in its true width with a small vocabulary; a tiny image tower in place of timm's."""
    config = open_clip.get_model_config(model)
    config["text_cfg"] |= {"layers": 2, "vocab_size": 514}
    if "timm_model_name" in config["vision_cfg"]:
        config["vision_cfg"] = SIGLIP_CONFIG["vision_cfg"]
    else:
        config["vision_cfg"]["layers"] = 2
    settings = {name: value for name, value in deepcopy(config).items() if name != "custom_text"}
    torch.manual_seed(0)
    network = (open_clip.CustomTextCLIP if config.get("custom_text") else open_clip.CLIP)(**settings)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 0:
                parameter.add_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return without_weights(network, config).eval()


@pytest.mark.parametrize(
    "model", ["ViT-B-16-quickgelu", "ViT-L-14", "ViT-bigG-14", "ViT-B-16-SigLIP", "ViT-gopt-16-SigLIP2-256"]
)
def test_two_layers_of_true_width_give_open_clips_features_and_gradients(model):
    backbone = of_true_width(model)
    backbone.stretch(keep=60, factor=2)
    ids = backbone.tokenizer.text_ids(["a" * 300, "the cat is a thing on the mat", "x"])
    tokens = backbone.tokenizer.batch(ids, [0, 9, 30])
    results = []
    for encode in (backbone.encode_text, lambda tokens: backbone.model.encode_text(tokens.padded())):
        backbone.zero_grad()
        features = encode(tokens)
        torch.nn.functional.normalize(features, dim=-1).sum(dim=0).square().sum().backward()
        gradients = {n: p.grad for n, p in backbone.model.named_parameters() if p.grad is not None}
        results.append(gradients | {"features": features.detach()})
    fast, plain = results
    assert fast.keys() == plain.keys() and len(fast) > 20
    for name, expected in plain.items():
        tolerance = 1e-5 * expected.abs().max().item()
        assert tolerance > 0, name
        torch.testing.assert_close(fast[name], expected, rtol=0, atol=tolerance, msg=name)
    image = Image.effect_noise((64, 48), 90)
    pixels = backbone.encode_image(backbone.read_pixels(image)[None])
    expected = backbone.model.encode_image(backbone.preprocess(image)[None])
    torch.testing.assert_close(pixels, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


BACKEND = "inductor" if shutil.which("c++") else "aot_eager"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", TINY)
def test_compiled_towers_give_the_same(family, checkpointing):
    assert BACKEND == "inductor" or "CI" not in os.environ, "no C++ compiler: what torch.compile builds goes UNTESTED"
    plain, other = TINY[family](), TINY[family]()
    if checkpointing:
        other.checkpoint_activations()
    torch.compiler.reset()
    other.compile(backend="aot_eager" if checkpointing else BACKEND)
    graphs = torch._dynamo.utils.counters["stats"]
    assert_same_steps(plain, other, [2], rtol=1e-4, atol=1e-4)
    assert (before := graphs["unique_graphs"]) > 0
    assert_same_steps(plain, other, [3, 5, 9], rtol=1e-4, atol=1e-4)
    assert graphs["unique_graphs"] == before  # no length is compiled anew


def test_a_compiled_image_tower_with_prompts_gives_the_same():
    backbone, images = prompted(), pixels()
    masked = MaskedPatches(torch.stack([draw_mask(0.5, N, 0, 0, str(at)) for at in range(3)]), None)
    expected = backbone.image.encode_with_masked(images, [0, 3], masked)
    torch.compiler.reset()
    backbone.compile(backend="aot_eager")
    for ours, plain in zip(backbone.image.encode_with_masked(images, [0, 3], masked), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("first", [None, 1])
def test_a_compiled_text_encoder_skips_layers(first):
    """Whichever call compiles it."""
    stock = assemble(StableDiffusionPipeline, tiny_sdxl.sd15_parts())
    call = {"device": None, "num_images_per_prompt": 1, "do_classifier_free_guidance": False}
    expected = {skip: with_long_prompts(stock).encode_prompt(LONG, **call, clip_skip=skip)[0] for skip in (None, 1)}
    torch.compiler.reset()
    stock.text_encoder = torch.compile(stock.text_encoder, backend="eager")
    pipe = with_long_prompts(stock)
    for skip in (first, None, 1, None):
        torch.testing.assert_close(pipe.encode_prompt(LONG, **call, clip_skip=skip)[0], expected[skip])
    assert not torch.allclose(expected[None], expected[1])
