"""Chinese-CLIP: a tiny ChineseCLIPModel against transformers' own features, ablated, and never trained."""

import string
from functools import partial

import pytest
import torch
from helpers.tiny_clip import everyday
from PIL import Image
from transformers import BertTokenizer, ChineseCLIPConfig, ChineseCLIPImageProcessor, ChineseCLIPModel

from debias_diffusion.ablation.heads import Ablation
from debias_diffusion.encoders.clip_model import export_clip_model
from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.training.config import TrainConfig
from research.ablate.command import write_ablation
from research.chinese_clip import CONTEXT_LENGTH

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIGNS = list('一只猫号第个人。，:"0123456789' + string.ascii_lowercase)
CAPTIONS = ["一只猫", "第3个人，一只猫。", "cat", "一" * 30]
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
HIDDEN = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}


pytestmark = pytest.mark.usefixtures("with_research")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A random ChineseCLIPModel of everyday size, with tokenizer and image processor, as transformers saves it."""
    folder = tmp_path_factory.mktemp("chinese-clip")
    words = SPECIAL + SIGNS + [f"##{sign}" for sign in string.ascii_lowercase]
    text = HIDDEN | {"vocab_size": len(words), "num_hidden_layers": 2, "max_position_embeddings": 80}
    vision = HIDDEN | {"num_hidden_layers": 3, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    config = ChineseCLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    everyday(ChineseCLIPModel(config)).save_pretrained(folder)
    BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)
    square = {"height": 32, "width": 32}
    ChineseCLIPImageProcessor(size=square, crop_size=square, do_center_crop=False).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def backbone(folder):
    return load_two_tower(folder)


PIXELS = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_features_equal_those_of_transformers(backbone, folder):
    theirs = ChineseCLIPModel.from_pretrained(folder).eval()
    assert (backbone.family.name, backbone.loss, backbone.context_length) == ("Chinese-CLIP", "softmax", CONTEXT_LENGTH)
    close(backbone.encode_image(PIXELS), theirs.get_image_features(PIXELS).pooler_output)
    rows = BertTokenizer.from_pretrained(folder)(CAPTIONS, padding=True, return_tensors="pt")
    expected = theirs.get_text_features(**rows).pooler_output
    assert (expected[0] - expected[1]).abs().max() > 0.01
    close(backbone.encode_text(backbone.tokenize(CAPTIONS)), expected)
    for number, caption in enumerate(CAPTIONS):  # pads are not seen
        close(backbone.encode_text(backbone.tokenize([caption]))[0], expected[number])
    assert backbone.logit_scale == theirs.logit_scale


def test_captions_are_cleaned_and_cut_and_images_squashed_as_the_authors_do(backbone, folder):
    tokenizer = BertTokenizer.from_pretrained(folder)
    quoted = "\N{LEFT DOUBLE QUOTATION MARK}CAT\N{RIGHT DOUBLE QUOTATION MARK}"
    rows = backbone.tokenize(["一" * 100, quoted, "[SEP]猫"]).padded()
    ids = [row[row != tokenizer.pad_token_id].tolist() for row in rows]
    assert len(ids[0]) == CONTEXT_LENGTH == 52 and ids[0][-1] == tokenizer.sep_token_id
    assert ids[1] == tokenizer('"cat"')["input_ids"]
    assert ids[2].count(tokenizer.sep_token_id) == 1  # a literal special token is text
    image = Image.new("RGB", (64, 32), "white")
    image.paste("black", (0, 0, 32, 32))  # the left half, which a crop of the middle would make a quarter
    assert backbone.preprocess(image)[0, :, :12].std() < 0.1


def test_an_ablated_one_is_loaded(folder, backbone, tmp_path):
    ablation = Ablation.of_rows("image", [[1] * 4, [1, 0, 1, 1], [1] * 4])
    write_ablation(tmp_path / "ablation.json", folder, backbone, ablation)
    with torch.no_grad():
        plain, features = (model.encode_image(PIXELS) for model in (backbone, load_two_tower(tmp_path)))
        ablation.apply(backbone)
        assert torch.equal(backbone.encode_image(PIXELS), features) and not torch.allclose(features, plain, atol=1e-3)


def test_it_is_neither_trained_nor_exported(folder, backbone, tmp_path):
    for model in (folder, "OFA-Sys/chinese-clip-vit-base-patch16"):
        with pytest.raises(UserError, match="not in open_clip's layout, so it cannot be trained"):
            TrainConfig(data="toy/train-2", model=model, output=str(tmp_path / "run"))
    with pytest.raises(UserError, match="open_clip has no Chinese-CLIP"):
        backbone.save(tmp_path / "saved")
    with pytest.raises(UserError, match="no causal mask"):
        export_clip_model(backbone, tmp_path / "exported")
    assert not list(tmp_path.iterdir())
