import io
import json
import os
import pickle
from contextlib import nullcontext

import pytest
import torch
import transformers
from helpers.text_encoders import (
    BIGG,
    CAPTIONS,
    SMALL,
    Expected,
    Runs,
    long_clip,
    long_clip_state,
    text_backbone,
    text_state,
)
from helpers.tiny_clip import tiny_clip, tiny_siglip
from helpers.vocabulary import BOS, EOS, tiny_tokenizer
from PIL import Image
from safetensors.torch import load_file, save, save_file
from torch import nn
from transformers import CLIPModel, CLIPProcessor, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from debias_diffusion import load_text_encoder
from debias_diffusion.clip.weight_files import save_tensors
from debias_diffusion.encoders.clip_model import export_clip_model
from debias_diffusion.encoders.single_file import write_file
from debias_diffusion.encoders.text_encoders import export_text_encoder, import_text_encoder, to_transformers
from debias_diffusion.errors import UserError
from debias_diffusion.text.tokens import clip_tokenizer

# Single files are read with CLIP's own vocabulary alone.


@pytest.fixture(scope="module")
def small():
    return text_backbone(SMALL, 64, quick_gelu=True, vocabulary=clip_tokenizer)


def comfyui_state(encoder, prefix):
    """The encoder's weights under the names of single files, with other tensors."""
    state = {name if "text_" in name else f"text_model.{name}": value for name, value in encoder.state_dict().items()}
    state |= {"text_model.embeddings.position_ids": torch.arange(248)[None], "logit_scale": torch.tensor(4.6)}
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.filterwarnings("error::UserWarning")  # only a bare two-tower has no sign that it is OpenAI's
def test_an_encoder_of_openais_depth_is_the_same_in_every_format(tmp_path, small):
    """L/14's blocks and activation, out to each format and in again."""
    encoder, _ = to_transformers(small)
    export_text_encoder(small, tmp_path / "plain")
    write_file(encoder, tmp_path / "comfyui.safetensors")
    torch.save({"state_dict": {f"module.{n}": t for n, t in small.model.state_dict().items()}}, tmp_path / "clip.pt")
    torch.save(long_clip_state(small), tmp_path / "longclip-L.pt")
    sizes = {name: torch.tensor(77) for name in ("input_resolution", "context_length", "vocab_size")}
    torch.save(text_state(small) | sizes, tmp_path / "ViT.pt")  # OpenAI's own files tell their sizes
    bare = {name.removeprefix("text_model."): tensor for name, tensor in encoder.state_dict().items()}
    save_file(bare, tmp_path / "bare.safetensors")  # as transformers 5 names them
    # A checkpoint of SDXL: its first encoder is found under its prefix, among other weights.
    wider = text_state(text_backbone({"width": 96, "heads": 1, "layers": 2}, 96, quick_gelu=False))
    checkpoint = comfyui_state(encoder, "conditioner.embedders.0.transformer.")
    checkpoint |= {"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(3)}
    save_file(checkpoint | {f"conditioner.embedders.1.model.{n}": t for n, t in wider.items()}, tmp_path / "sdxl.sft")
    expected = Expected(small)
    for name in ("plain", "comfyui.safetensors", "longclip-L.pt", "ViT.pt", "bare.safetensors", "sdxl.sft", "clip.pt"):
        guessed = pytest.warns(UserWarning, match="12 blocks quick_gelu is assumed")
        with guessed if name == "clip.pt" else nullcontext():
            encoder, tokenizer = load_text_encoder(tmp_path / name)
        assert type(encoder) is CLIPTextModel and encoder.config.hidden_act == "quick_gelu", name
        assert (tokenizer.model_max_length, tokenizer.pad_token_id) == (248, 49407)
        expected.check(encoder, tokenizer)


def test_a_narrow_bigg_is_the_same_in_every_single_file(tmp_path):
    bigg = text_backbone(BIGG, 128, quick_gelu=False, vocabulary=clip_tokenizer)
    encoder, _ = to_transformers(bigg, projection=True)
    write_file(encoder, tmp_path / "clip_g.safetensors")
    # As SDXL's checkpoints hold it: OpenAI's names under a prefix.
    sdxl = {f"conditioner.embedders.1.model.{name}": tensor for name, tensor in text_state(bigg).items()}
    save_file(sdxl, tmp_path / "sdxl.safetensors")
    expected = Expected(bigg)
    for name in ("clip_g.safetensors", "sdxl.safetensors"):
        loaded, tokenizer = load_text_encoder(tmp_path / name)
        assert type(loaded) is CLIPTextModelWithProjection and loaded.config.hidden_act == "gelu", name
        assert tokenizer.pad_token_id == loaded.config.pad_token_id == 0
        expected.check(loaded, tokenizer)


@pytest.mark.filterwarnings("error::UserWarning")
def test_the_gelu_of_a_smaller_model_is_carried_by_every_format_that_can(tmp_path):
    """12 blocks and GELU, as LAION's ViT-B and ViT-L: against the rule, so it must be in the file."""
    backbone = text_backbone(SMALL, 64, quick_gelu=False, vocabulary=clip_tokenizer)
    export_text_encoder(backbone, tmp_path)
    backbone.save(tmp_path / "open_clip")
    export_clip_model(backbone, tmp_path / "clip")
    write_file(to_transformers(backbone)[0], tmp_path / "file.safetensors")
    expected, weights = Expected(backbone), "open_clip/open_clip_model.safetensors"
    for name in ("", "open_clip", "clip", weights, "text_encoder/model.safetensors", "file.safetensors"):
        encoder, tokenizer = load_text_encoder(tmp_path / name)
        assert encoder.config.hidden_act == "gelu", name
        expected.check(encoder, tokenizer)
    # For the weights alone, and beside the configuration of another model, the rule assumes OpenAI's, and warns.
    (tmp_path / "alone").mkdir()
    (tmp_path / weights).rename(tmp_path / "alone" / "x.safetensors")
    other = {"hidden_size": 512, "num_hidden_layers": 12, "hidden_act": "gelu"}
    (tmp_path / "alone" / "config.json").write_text(json.dumps(other))
    with pytest.warns(UserWarning, match="12 blocks quick_gelu is assumed.*name the model, too: ViT-L-14:FILE"):
        assert load_text_encoder(tmp_path / "alone" / "x.safetensors")[0].config.hidden_act == "quick_gelu"


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_a_clip_model_gives_open_clips_features_of_images_and_texts(tmp_path, quick_gelu):
    backbone = long_clip(quick_gelu=quick_gelu)
    export_clip_model(backbone, tmp_path)
    model, info = CLIPModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and model.config.text_config.max_position_embeddings == 248
    processor = CLIPProcessor.from_pretrained(tmp_path)
    image = Image.effect_mandelbrot((97, 61), (-2, -1, 1, 1), 50).convert("RGB")
    inputs = processor(text=CAPTIONS, images=[image], padding=True, truncation=True, return_tensors="pt")
    pixels = backbone.preprocess(image)[None]
    # transformers resizes with torchvision, open_clip with Pillow: some pixels are one of 255 levels off.
    step, difference = 1.01 / 255 / min(processor.image_processor.image_std), (inputs.pixel_values - pixels).abs()
    assert inputs.pixel_values.shape == pixels.shape and difference.max() <= step and difference.mean() < step / 50
    with torch.inference_mode():
        output = model(**inputs | {"pixel_values": pixels})
        unit_image = nn.functional.normalize(backbone.encode_image(pixels), dim=-1)
        unit_text = nn.functional.normalize(backbone.encode_text(backbone.tokenize(CAPTIONS)), dim=-1)
        similarity = backbone.logit_scale.exp() * unit_image @ unit_text.T
    torch.testing.assert_close(output.image_embeds, unit_image, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.text_embeds, unit_text, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.logits_per_image, similarity, rtol=0, atol=1e-3)
    Expected(backbone).check(*load_text_encoder(tmp_path))  # its text half is a text encoder like any other


@pytest.mark.skipif(transformers.__version__ < "5", reason="SigLIP's tokenizer needs sentencepiece in transformers 4")
@pytest.mark.parametrize("export", [export_text_encoder, export_clip_model])
def test_a_siglip_is_refused(export, tmp_path):
    with pytest.raises(UserError, match="a SigLIP has no causal mask.*Export a CLIP"):
        export(tiny_siglip(), tmp_path)


@pytest.fixture(scope="module")
def two_blocks():
    backbone = text_backbone(SMALL | {"layers": 2}, 64, quick_gelu=True, vocabulary=clip_tokenizer)
    encoder, _ = to_transformers(backbone)
    return comfyui_state(encoder, "")


def pickled(content) -> bytes:
    torch.save(content, file := io.BytesIO())
    return file.getvalue()


CODE = r"more in it than tensors \(getattr\), which can be code. It is refused"
# By name: the bytes or tensors of a file that is no text encoder, or what makes them of an encoder's weights and of a
# path that is touched if code in the file is run; and what is said of it. .safetensors unless the name says another.
WRONG_FILES = {
    "header": ((1 << 62).to_bytes(8, "little") + b"{" + b"\0" * 99, "could not be loaded"),
    "truncated.pt": (lambda state, _: pickled(state)[:-999], "could not be loaded"),
    "code.ckpt": (lambda state, ran: pickled({"state_dict": state, "parameters": Runs(ran)}), CODE),
    "old code.bin": (lambda _, ran: pickle.dumps(Runs(ran), protocol=2), CODE),
    "unet": ({"model.diffusion_model.input_blocks.1.1.proj_in.weight": torch.zeros(4, 4)}, "no CLIP .*input_blocks"),
    "scaled fp8": (
        lambda state, _: save(state | {"text_model.encoder.layers.0.mlp.fc1.scale_weight": torch.ones(1)}),
        "is quantised",
    ),
}


@pytest.mark.parametrize("kind", WRONG_FILES)
def test_a_file_that_is_no_text_encoder_is_named_for_what_it_is(tmp_path, two_blocks, kind):
    content, message = WRONG_FILES[kind]
    content = content(two_blocks, tmp_path / "ran") if callable(content) else content
    file = tmp_path / (kind if "." in kind else f"{kind}.safetensors")
    file.write_bytes(save(content) if isinstance(content, dict) else content)
    with pytest.raises(UserError, match=message) as caught:
        load_text_encoder(file)
    assert str(tmp_path) in str(caught.value) and len(str(caught.value)) < 700
    assert not (tmp_path / "ran").exists()
    if kind == "old code.bin":  # which would have
        pickle.loads(file.read_bytes())
        assert (tmp_path / "ran").exists()


def test_folders_of_other_models_or_without_all_weights_are_refused(tmp_path):
    export_text_encoder(tiny_clip(), tmp_path)
    config, weights = (tmp_path / "text_encoder" / name for name in ("config.json", "model.safetensors"))
    sound, state = config.read_text(), load_file(weights)
    config.write_text(sound.replace("clip_text_model", "t5"))
    with pytest.raises(UserError, match="a model of type 't5'"):
        load_text_encoder(tmp_path)
    config.write_text(sound)
    # A Long-CLIP with the tokenizer it began with.
    tiny_tokenizer(33).save_pretrained(tmp_path / "tokenizer")
    assert load_text_encoder(tmp_path)[1].model_max_length == 77
    # transformers fills what is missing with random numbers, and only logs it.
    save_file({name: tensor for name, tensor in state.items() if "layers.1.mlp.fc1" not in name}, weights)
    with pytest.raises(UserError, match="lack 2 tensors of the model, such as .*layers.1.mlp.fc1.bias"):
        load_text_encoder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no model: neither config.json"):
        load_text_encoder(tmp_path / "empty")


def test_a_single_file_is_whole_for_comfyui(tmp_path):
    write_file(to_transformers(tiny_clip())[0], tmp_path / "clip_l.safetensors")
    keys = load_file(tmp_path / "clip_l.safetensors")
    assert "text_model.embeddings.position_embedding.weight" in keys and all(key[:11] == "text_model." for key in keys)


def test_weights_are_written_with_the_permissions_of_any_file_and_the_processes_mask_stays(tmp_path, monkeypatch):
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", None)
        save_tensors({"weight": torch.ones(2)}, tmp_path / "a.safetensors")
        assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o640
    finally:
        monkeypatch.undo()
        os.umask(before)


def test_there_and_back_is_bit_identical(tmp_path):
    backbone, other = long_clip(), long_clip(seed=1)
    export_text_encoder(backbone, tmp_path, projection=True)
    encoder, _ = load_text_encoder(tmp_path)
    import_text_encoder(other, encoder)
    tokens = backbone.tokenize(CAPTIONS)
    features = backbone.encode_text(tokens)
    assert torch.equal(other.encode_text(tokens), features)
    exported, _ = to_transformers(backbone)
    with torch.no_grad():
        for parameter in (*encoder.parameters(), *backbone.parameters()):  # nothing shares its weights
            parameter.zero_()
    assert torch.equal(other.encode_text(tokens), features)
    assert all(parameter.any() for parameter in exported.parameters())
    with pytest.raises(UserError, match="max_position_embeddings is 248, the backbone's is 77"):
        import_text_encoder(tiny_clip(), encoder)


def test_the_folder_loads_without_anything_of_ours(tmp_path):
    backbone = long_clip()
    export_text_encoder(backbone, tmp_path)
    assert all(key.startswith("text_model.") for key in load_file(tmp_path / "text_encoder" / "model.safetensors"))
    config = json.loads((tmp_path / "text_encoder" / "config.json").read_text())
    assert config["dtype"] == "float32" and config["architectures"] == ["CLIPTextModel"]
    assert (config["bos_token_id"], config["eos_token_id"]) == (BOS, EOS)
    encoder = CLIPTextModel.from_pretrained(tmp_path, subfolder="text_encoder")
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path, subfolder="tokenizer")
    ids = tokenizer(CAPTIONS, padding="max_length", truncation=True, return_tensors="pt").input_ids
    ours, _ = to_transformers(backbone)
    assert torch.equal(encoder(ids).last_hidden_state, ours.eval()(ids).last_hidden_state)
    # Pooled at EOT, not at SOT, as a wrong eos_token_id would.
    pooled = backbone.text.project(encoder(ids).pooler_output)
    torch.testing.assert_close(pooled, backbone.encode_text(backbone.tokenize(CAPTIONS)), rtol=0, atol=1e-5)
