import open_clip
import pytest
import torch
from PIL import Image
from tiny_clip import save_tiny_clip, tiny_clip

from debias_diffusion.backbones import load_backbone
from debias_diffusion.errors import UserError


def test_stretching_leaves_short_captions_as_they_were():
    backbone = tiny_clip()
    tokens = backbone.tokenize(["a cat on a mat"])
    before = backbone.encode_text(tokens)
    backbone.stretch()
    assert backbone.context_length == 248 and backbone.tokenizer.context_length == 248
    assert torch.equal(backbone.encode_text(backbone.tokenize(["a cat on a mat"])), before)
    assert backbone.model.encode_text(backbone.tokenize(["a cat"]).padded()).shape == (1, 24)


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_a_saved_folder_loads_in_open_clip_and_here(tmp_path, quick_gelu):
    backbone = tiny_clip(quick_gelu=quick_gelu)
    backbone.stretch()
    backbone.save(tmp_path)
    tokens = backbone.tokenize(["a caption of a few words. " * 20])
    expected = backbone.encode_text(tokens)
    again = load_backbone(str(tmp_path))
    assert torch.equal(again.encode_text(tokens), expected)
    assert (again.context_length, again.kept_positions, again.random_weights) == (248, 20, False)
    theirs = open_clip.create_model(f"local-dir:{tmp_path}")
    torch.testing.assert_close(theirs.encode_text(tokens.padded()), expected, rtol=0, atol=1e-5)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(theirs.encode_image(images), backbone.encode_image(images))


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
@pytest.mark.parametrize("size", [(61, 40), (32, 32), (5, 200)])
def test_pixels_give_the_features_of_preprocessed_images_bit_for_bit(mode, size):
    backbone = tiny_clip().eval()
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (*size, 3), generator=generator, dtype=torch.uint8)
    image = Image.fromarray(pixels.numpy()).convert(mode)
    read = backbone.read_pixels(image)
    assert read.dtype == torch.uint8 and read.shape == (3, 32, 32) and read.float().std() > 1
    expected = backbone.encode_image(backbone.preprocess(image)[None])
    assert torch.equal(backbone.encode_image(read[None]), expected)


def test_pixels_are_normalised_in_the_models_own_dtype_and_leave_no_trace_in_its_weights():
    backbone = tiny_clip().double()
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert backbone.encode_image(pixels).dtype == torch.float64
    assert backbone.state_dict().keys() == {f"model.{name}" for name in backbone.model.state_dict()}


def test_random_weights_come_from_the_seed():
    torch.manual_seed(3)
    first = load_backbone("ViT-S-32-alt")
    torch.manual_seed(3)
    second = load_backbone("ViT-S-32-alt")
    assert first.random_weights
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("model", "pretrained", "message"),
    [
        ("ViT-B16", None, r"Unknown model 'ViT-B16'. Did you mean ViT-B-16"),
        ("coca_ViT-B-32", None, "cannot be used.*multimodal_cfg"),
        ("roberta-ViT-B-32", None, "cannot be used.*hf_model_name"),
        ("ViT-L-14-CLIPA", None, "cannot be used.*no_causal_mask.*pool_type: last"),
        ("ViT-B-16-SigLIP2", "wbeli", "No weights 'wbeli' for 'ViT-B-16-SigLIP2'. Did you mean webli"),
        ("hf-hub:tests/no-such-repository", None, "could not be fetched.*Check the name and the network"),
        ("ViT-B-16", "openai", "trained with QuickGELU, which 'ViT-B-16' lacks. Use --model ViT-B-16-quickgelu"),
        ("ViT-B-16-quickgelu", "laion2b_s34b_b88k", "No weights|Use --model ViT-B-16"),
        ("ViT-B-16", "opneai", "No weights 'opneai' for 'ViT-B-16'. Did you mean openai"),
        ("local-dir:/nowhere", None, "holds no open_clip_config.json"),
    ],
)
def test_what_cannot_be_used_is_named(model, pretrained, message):
    with pytest.raises(UserError, match=message):
        load_backbone(model, pretrained)


def test_weights_that_do_not_fit_or_are_no_weights_are_refused(tmp_path):
    folder = save_tiny_clip(tmp_path)
    with pytest.raises(UserError, match="brings its own weights"):
        load_backbone(folder, "openai")
    (tmp_path / "open_clip_model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UserError, match="could not be loaded"):
        load_backbone(folder)


def test_a_folder_without_weights_or_with_a_broken_configuration_is_refused(tmp_path):
    folder = save_tiny_clip(tmp_path)
    (tmp_path / "open_clip_model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no weights"):
        load_backbone(folder)
    for broken in ("", "{", "[]", '{"model_cfg": 3}', '{"model_cfg": {"text_cfg": {}, "vision_cfg": 1}}', "\x00"):
        (tmp_path / "open_clip_config.json").write_text(broken)
        with pytest.raises(UserError, match="is no open_clip configuration"):
            load_backbone(folder)


def test_a_pickle_with_code_is_not_executed(tmp_path):
    import pickle

    marker = tmp_path / "executed"

    class Hostile:
        def __reduce__(self):
            return (marker.write_text, ("x",))

    (tmp_path / "weights.pt").write_bytes(pickle.dumps({"state_dict": Hostile()}))
    with pytest.raises(UserError, match="could not be loaded"):
        load_backbone("ViT-S-32-alt", str(tmp_path / "weights.pt"))
    assert not marker.exists()
