"""Text towers in their true width, and what torch.compile makes of tiny ones."""

import shutil
from copy import deepcopy

import open_clip
import pytest
import torch
from helpers.same_steps import TINY, assert_same_steps
from helpers.tiny_clip import SIGLIP_CONFIG, tiny_clip, without_weights
from PIL import Image


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
    "model", ["ViT-B-16-quickgelu", "ViT-L-14", "ViT-H-14", "ViT-bigG-14", "ViT-B-16-SigLIP", "ViT-gopt-16-SigLIP2-256"]
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
    assert torch.equal(pixels, backbone.model.encode_image(backbone.preprocess(image)[None]))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_towers_give_the_same(checkpointing):
    plain, other = tiny_clip(), tiny_clip()
    if checkpointing:
        other.checkpoint_activations()
    torch.compiler.reset()
    other.compile(backend="aot_eager")
    graphs = torch._dynamo.utils.counters["stats"]
    assert_same_steps(plain, other, [2], rtol=1e-4, atol=1e-4)
    before = graphs["unique_graphs"]
    assert before > 0
    assert_same_steps(plain, other, [3, 5, 9], rtol=1e-4, atol=1e-4)
    assert graphs["unique_graphs"] == before  # no length is compiled anew


@pytest.mark.parametrize("family", TINY)
def test_compiled_towers_give_the_same_through_the_compiler(family):
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler (`c++`) on this machine: what torch.compile builds here goes UNTESTED")
    plain, other = TINY[family](), TINY[family]()
    torch.compiler.reset()
    other.compile()
    assert_same_steps(plain, other, [2, 5], rtol=1e-4, atol=1e-4)
