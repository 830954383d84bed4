import json

import open_clip
import pytest
import torch
from helpers.released import two_tables
from helpers.text_encoders import long_clip
from helpers.tiny_clip import CONFIG, registered, save_tiny_clip, tiny_clip
from PIL import Image

from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.encoders.text_encoders import to_transformers
from debias_diffusion.errors import UserError
from debias_diffusion.text.tokens import clip_tokenizer


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_a_saved_folder_loads_in_open_clip_and_here(tmp_path, quick_gelu):
    backbone = tiny_clip(quick_gelu=quick_gelu)
    before = backbone.encode_text(backbone.tokenize(["a cat on a mat"]))
    backbone.stretch()
    assert backbone.context_length == backbone.tokenizer.context_length == 248
    assert torch.equal(backbone.encode_text(backbone.tokenize(["a cat on a mat"])), before)
    backbone.save(tmp_path)
    tokens, images = backbone.tokenize(["a caption of a few words. " * 20]), torch.randn(2, 3, 32, 32)
    expected, again = backbone.encode_text(tokens), load_backbone(str(tmp_path))
    assert torch.equal(again.encode_text(tokens), expected)
    assert (again.context_length, again.kept_positions, again.random_weights) == (248, 20, False)
    theirs = open_clip.create_model(f"local-dir:{tmp_path}")
    torch.testing.assert_close(theirs.encode_text(tokens.padded()), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs.encode_image(images), backbone.encode_image(images), rtol=0, atol=1e-5)


def test_average_pooling_is_saved_and_heeded_when_loaded(tmp_path):
    backbone = tiny_clip()
    tokens = backbone.tokenize(["a cat on a mat", "dogs"])
    at_eot, backbone.pooling = backbone.encode_text(tokens), "average"
    backbone.save(tmp_path)
    again = load_backbone(str(tmp_path))
    assert again.pooling == "average" and torch.equal(again.encode_text(tokens), backbone.encode_text(tokens))
    assert not torch.allclose(again.encode_text(tokens), at_eot)
    with pytest.raises(UserError, match="average pooling"):
        to_transformers(again, projection=True)


def test_pixels_give_the_features_of_preprocessed_images_bit_for_bit():
    backbone, generator = tiny_clip().eval(), torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (61, 40, 3), generator=generator, dtype=torch.uint8)
    image = Image.fromarray(pixels.numpy())
    read = backbone.read_pixels(image)
    assert read.dtype == torch.uint8 and read.shape == (3, 32, 32)
    assert torch.equal(backbone.encode_image(read[None]), backbone.encode_image(backbone.preprocess(image)[None]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("coca_ViT-B-32:none", "cannot be used.*multimodal_cfg"),
        ("ViT-B-16:openai", "Use the model ViT-B-16-quickgelu"),
        ("ViT-B-16:opneai", "Did you mean openai"),
        ("ViT-B-16-quickgelu:openai", "'ViT-B-16-quickgelu:openai' could not be loaded: nothing of it is in the hub's"),
    ],
)
def test_what_cannot_be_used_is_named(name, message):
    with pytest.raises(UserError, match=message):
        load_two_tower(name)


QUICK = CONFIG | {"quick_gelu": True}


def test_positions_of_another_length_are_never_interpolated(tmp_path):
    long_clip().save(tmp_path / "trained")
    state = tiny_clip(quick_gelu=True, context_length=308, tokenizer=clip_tokenizer(308)).model.state_dict()
    torch.save(state | two_tables(state["positional_embedding"]), tmp_path / "longclip.pt")
    with registered(tmp_path / "configs", **{"tiny": CONFIG, "tiny-quickgelu": QUICK}):
        for model, weights, message in (
            ("tiny", "trained/open_clip_model.safetensors", "holds 248 text positions, 'tiny' has 77"),
            ("tiny-quickgelu", "longclip.pt", "holds 308 text positions, 'tiny-quickgelu' has 248"),
            ("tiny", "longclip.pt", "Use the model tiny-quickgelu"),
        ):
            with pytest.raises(UserError, match=message):
                load_backbone(model, str(tmp_path / weights))


@pytest.mark.parametrize("change", [{"std": [0] * 3}, {"std": [1e-45] * 3}, {"std": [0.2] * 2}, {"mean": [1e400] * 3}])
def test_a_preprocess_configuration_that_no_image_survives_is_named(tmp_path, change):
    """Not the images: with such a configuration each of them counted as unreadable."""
    folder, file = save_tiny_clip(tmp_path), tmp_path / "open_clip_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"preprocess_cfg": config["preprocess_cfg"] | change}))
    with pytest.raises(UserError, match="preprocess configuration"):
        load_two_tower(folder)
