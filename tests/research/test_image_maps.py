"""Maps over the patches of an image: their similarity to a text, and what regional prompts look at."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.fix_clip_steps import PROMPTS, prompted
from helpers.tiny_clip import tiny_clip
from PIL import Image

from research.evaluations.image_maps import evaluate_maps, image_maps
from research.evaluations.options import MapsConfig

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


def test_the_command_draws_a_row_for_each_encoder(image, tmp_path):
    prompted().float().save(tmp_path / "fix-clip")
    encoders = ["toy/clip", str(tmp_path / "fix-clip")]
    report = evaluate_maps(MapsConfig(encoders, str(tmp_path / "out"), text=TEXT, image=image))
    found = [numbers["prompts"] for numbers in report["encoders"].values()]
    assert [len(prompts) for prompts in found] == [0, PROMPTS]
    assert np.sum(found[1], axis=(1, 2)) == pytest.approx(1)  # the last block's attention to all patches
    assert (tmp_path / "out" / "image-maps.png").is_file()
