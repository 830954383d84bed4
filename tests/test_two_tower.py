"""Two-towers from every kind of folder and file: the loaded model equals the saved one, with no random weight."""

import json
from pathlib import Path

import open_clip
import pytest
import torch
from helpers.text_encoders import hub_repository, long_clip
from helpers.tiny_clip import everyday
from helpers.vocabulary import tiny_tokenizer
from huggingface_hub import constants
from PIL import Image
from transformers import CLIPConfig, CLIPModel

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.encoders.clip_model import export_clip_model
from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.errors import UserError

CAPTIONS = ["A cat sits on a red mat. " * 60, "A dog.", "Two birds fly over a blue house, and a man looks up. " * 4]


def check(loaded: Backbone, expected: Backbone) -> None:
    """The loaded model equals the expected one bit for bit and is in eval mode."""
    assert not loaded.training and not loaded.random_weights
    torch.testing.assert_close(loaded.model.state_dict(), expected.model.state_dict(), rtol=0, atol=0)
    assert loaded.context_length == expected.context_length
    assert torch.equal(loaded.tokenize(CAPTIONS).padded(), expected.tokenize(CAPTIONS).padded())
    pixels = expected.preprocess(picture())[None]
    assert torch.equal(loaded.preprocess(picture())[None], pixels)
    with torch.inference_mode():
        features, wanted = (
            torch.cat([backbone.encode_image(pixels), backbone.encode_text(backbone.tokenize(CAPTIONS))])
            for backbone in (loaded, expected)
        )
    torch.testing.assert_close(features, wanted, rtol=0, atol=1e-5)


def picture() -> Image.Image:
    return Image.effect_mandelbrot((97, 61), (-2, -1, 1, 1), 50).convert("RGB")


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_a_clip_model_comes_back_as_it_was_exported(tmp_path, monkeypatch, quick_gelu):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    backbone = long_clip(quick_gelu=quick_gelu)
    export_clip_model(backbone, hub_repository(tmp_path, "some/clip"))
    loaded = load_two_tower("some/clip")
    check(loaded, backbone)
    loaded.save(tmp_path / "open_clip")
    check(load_two_tower(tmp_path / "open_clip"), backbone)
    with pytest.raises(UserError, match="give hf-hub:some/thing"):
        load_two_tower("some/thing")


def as_openai(folder: Path) -> CLIPModel:
    """A CLIPModel in the layout of openai/clip-vit-*, of which eos_token_id 2 and the forms of sizes are telling."""
    tokenizer = tiny_tokenizer(77)
    both = {"hidden_act": "quick_gelu", "num_hidden_layers": 2}
    text = both | {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 3, "layer_norm_eps": 1e-3}
    text |= {"vocab_size": len(tokenizer), "eos_token_id": 2}
    vision = both | {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2, "layer_norm_eps": 1e-5}
    vision |= {"image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    model = everyday(CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24))).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_processor(folder)
    return model


def write_processor(folder: Path, **processor) -> None:
    written = {"size": 32, "crop_size": 32, "do_center_crop": True, "resample": 3, "do_resize": True}
    written |= {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "do_normalize": True} | processor
    (folder / "preprocessor_config.json").write_text(json.dumps(written))


@pytest.mark.parametrize("in_half", [False, True])
def test_a_clip_model_as_openai_published_it_gives_transformers_own_features(tmp_path, in_half):
    model = as_openai(tmp_path)
    if in_half:  # and in an older file
        torch.save(model.half().state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
        model = model.float()
    loaded = load_two_tower(tmp_path)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    tokens, pixels = loaded.tokenize(CAPTIONS), loaded.preprocess(picture())[None]
    with torch.inference_mode():
        image, text = model.get_image_features(pixels), model.get_text_features(tokens.padded())
        image_features, text_features = loaded.encode_image(pixels), loaded.encode_text(tokens)
    assert text_features.std() > 0.1
    torch.testing.assert_close(image_features, image.pooler_output, rtol=0, atol=1e-5)
    torch.testing.assert_close(text_features, text.pooler_output, rtol=0, atol=1e-5)
    assert loaded.logit_scale.item() == model.logit_scale.item()


def test_images_are_prepared_as_the_processor_says_or_it_is_refused(tmp_path):
    as_openai(tmp_path)
    squash = {"do_center_crop": False, "size": {"height": 32, "width": 32}, "resample": 2}
    for processor, settings in (({}, ("shortest", "bicubic", 32)), (squash, ("squash", "bilinear", 32))):
        write_processor(tmp_path, **processor)
        cfg = load_two_tower(tmp_path).config["preprocess_cfg"]
        assert (cfg["resize_mode"], cfg["interpolation"], cfg["size"]) == settings and cfg["mean"] == (0.1, 0.2, 0.3)
    for change in ({"size": 40}, {"resample": 0}, {"do_normalize": False}):
        write_processor(tmp_path, **change)
        with pytest.raises(UserError, match="what open_clip does not"):
            load_two_tower(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    assert load_two_tower(tmp_path).preprocess.transforms[-1].mean == open_clip.OPENAI_DATASET_MEAN
