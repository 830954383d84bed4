"""Maps of an image: similarity to a text and responses of regional prompts, written out, and the pictures of them."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.fix_clip_steps import LAYERS, PROMPTS, N, prompted
from helpers.tiny_clip import tiny_clip
from PIL import Image

from debias_diffusion.errors import UserError
from debias_diffusion.eval.attention import AttentionConfig, evaluate_attention
from debias_diffusion.eval.image_maps import _opacity, image_maps, plot_maps

TEXT = "A cat on a red chair."


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    file = tmp_path_factory.mktemp("image") / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 32, 3), dtype=np.uint8)).save(file)
    return str(file)


def embedded(backbone, image):
    with Image.open(image) as opened:
        return backbone.preprocess(opened)[None].double()


@torch.no_grad()
def test_a_patch_is_compared_with_the_text_as_cls_would_be(image):
    backbone = tiny_clip().double().eval()
    visual = backbone.model.visual
    visual.output_tokens = True
    _, tokens = visual(embedded(backbone, image))  # after the norm
    visual.output_tokens = False
    text = backbone.encode_text(backbone.tokenize([TEXT]))[0]
    expected = F.cosine_similarity(tokens[0] @ visual.proj, text[None])
    maps = image_maps(backbone, image, TEXT)
    torch.testing.assert_close(torch.tensor(maps["similarity"]).flatten(), expected.float(), rtol=0, atol=1e-6)
    assert expected.std() > 0.01 and maps["prompts"] == [] and maps["pixels"].shape == (32, 32, 3)


@pytest.mark.parametrize(("mask", "layers", "band"), [("bands", "own", 5), ("none", "shared", 0)])
@torch.no_grad()
def test_a_prompt_responds_to_patches_by_the_last_block_s_attention(mask, layers, band, image):
    backbone = prompted(mask, layers).eval()
    states, last = backbone.image.embed(embedded(backbone, image)), backbone.model.visual.transformer.resblocks[-1]
    for block in range(LAYERS - 1):
        states = backbone.image.run_block(block, states)
    width, heads = last.attn.embed_dim, last.attn.num_heads
    weight, bias = last.attn.in_proj_weight, last.attn.in_proj_bias
    query = last.ln_1(backbone.model.visual.regional_prompts.prompts[-1]) @ weight[:width].T + bias[:width]
    key = last.ln_1(states[0, 1:]) @ weight[width : 2 * width].T + bias[width : 2 * width]
    maps = image_maps(backbone, image, TEXT)
    assert len(maps["prompts"]) == PROMPTS and maps["band"] == band
    for prompt, of_prompt in zip(query, maps["prompts"], strict=True):
        expected = torch.zeros(N, dtype=torch.float64)
        for part in (slice(at, at + width // heads) for at in range(0, width, width // heads)):
            expected += (key[:, part] @ prompt[part] / math.sqrt(width // heads)).softmax(dim=0) / heads
        torch.testing.assert_close(torch.tensor(of_prompt).double().flatten(), expected, rtol=0, atol=1e-6)


def test_patches_outside_of_a_prompt_s_band_are_faint():
    faint = [_opacity(np.zeros((4, 4)), prompt, 5).flatten() < 0.5 for prompt in range(-1, 3)]
    assert not faint[0].any() and not _opacity(np.zeros((4, 4)), 1, 0).min() < 0.5
    assert [(~part).nonzero()[0].tolist() for part in faint[1:]] == [[*range(at, at + 5)] for at in (0, 5, 10)]


def test_the_command_draws_a_row_for_each_encoder(image, tmp_path):
    for name, backbone in (("clip", tiny_clip()), ("fix-clip", prompted().float())):
        backbone.save(tmp_path / name)
    encoders = [str(tmp_path / name) for name in ("clip", "fix-clip")]
    report = evaluate_attention(AttentionConfig(encoders, str(tmp_path / "out"), prompt=TEXT, image=image))
    assert report == json.loads((tmp_path / "out" / "attention.json").read_text())
    assert [len(numbers["image"]["prompts"]) for numbers in report["encoders"].values()] == [0, PROMPTS]
    with Image.open(tmp_path / "out" / "attention_image.png") as picture:
        assert picture.width > picture.height
    maps = {name: image_maps(backbone, image, TEXT) for name, backbone in (("a", tiny_clip()), ("b", prompted()))}
    assert [len(axes.images) for axes in plot_maps(maps).axes] == [1, 2, 0, 0, 0, 1, 2, 2, 2, 2]


def test_what_has_no_maps_is_refused(image, tmp_path):
    backbone = tiny_clip()
    backbone.model.visual.pool_type = "avg"
    with pytest.raises(UserError, match="does not pool at CLS"):
        image_maps(backbone, image, TEXT)
    with pytest.raises(UserError, match="'nowhere.png' cannot be read"):
        image_maps(tiny_clip(), "nowhere.png", TEXT)
    with pytest.raises(UserError, match="Give --prompt, too"):
        AttentionConfig(["toy/clip"], str(tmp_path), data="toy/test", image=image)
