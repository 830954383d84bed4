import io
import json
import pickle
import shutil
from contextlib import nullcontext
from copy import deepcopy

import open_clip
import pytest
import torch
import transformers
from helpers.text_encoders import (
    BIGG,
    CAPTIONS,
    SMALL,
    Expected,
    Runs,
    hub_repository,
    long_clip,
    long_clip_state,
    text_backbone,
    text_state,
)
from helpers.tiny_clip import CONFIG, tiny_clip, tiny_siglip
from helpers.vocabulary import BOS, EOS, tiny_tokenizer
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file, save, save_file
from torch import nn
from transformers import CLIPModel, CLIPProcessor, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer
from transformers.utils import hub

from debias_diffusion import load_text_encoder
from debias_diffusion.errors import UserError
from debias_diffusion.interchange.clip_model import export_clip_model
from debias_diffusion.interchange.single_file import write_file
from debias_diffusion.interchange.text_encoders import import_text_encoder, to_transformers
from debias_diffusion.interchange.transformers_folder import export_text_encoder
from debias_diffusion.models.backbone import Backbone
from debias_diffusion.tokens import clip_tokenizer

# Single files are read with CLIP's own vocabulary alone.


@pytest.fixture(scope="module")
def small():
    return text_backbone(SMALL, 64, quick_gelu=True, vocabulary=clip_tokenizer)


@pytest.fixture(scope="module")
def bigg():
    return text_backbone(BIGG, 128, quick_gelu=False, vocabulary=clip_tokenizer)


@pytest.fixture(scope="module")
def wider():
    """Wider than `small`, as SDXL's second encoder is wider than its first."""
    return text_backbone({"width": 96, "heads": 1, "layers": 2}, 96, quick_gelu=False)


@pytest.fixture(scope="module")
def expected(small, bigg):
    return {"small": Expected(small), "bigg": Expected(bigg)}


def comfyui_state(encoder, prefix):
    """The encoder's weights under the names of single files, with other tensors."""
    state = {name if "text_" in name else f"text_model.{name}": value for name, value in encoder.state_dict().items()}
    state |= {"text_model.embeddings.position_ids": torch.arange(248)[None], "logit_scale": torch.tensor(4.6)}
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.filterwarnings("error::UserWarning")  # only a bare two-tower has no sign that it is OpenAI's
def test_an_encoder_of_openais_depth_is_the_same_in_every_format(tmp_path, small, expected):
    """L/14's blocks and activation, out to each format and in again."""
    export_text_encoder(small, tmp_path / "plain")
    write_file(to_transformers(small)[0], tmp_path / "comfyui.safetensors")
    torch.save({"state_dict": {f"module.{n}": t for n, t in small.model.state_dict().items()}}, tmp_path / "clip.pt")
    torch.save(long_clip_state(small), tmp_path / "longclip-L.pt")
    sizes = {name: torch.tensor(77) for name in ("input_resolution", "context_length", "vocab_size")}
    torch.save(text_state(small) | sizes, tmp_path / "ViT.pt")  # OpenAI's own files tell their sizes
    save_file({f"text.{name}": tensor.contiguous() for name, tensor in text_state(small).items()}, tmp_path / "t.sft")
    encoder, _ = to_transformers(small)
    bare = {name.removeprefix("text_model."): tensor for name, tensor in encoder.state_dict().items()}
    save_file(bare, tmp_path / "bare.safetensors")  # as transformers 5 names them
    for name in ("plain", "comfyui.safetensors", "longclip-L.pt", "ViT.pt", "bare.safetensors", "clip.pt", "t.sft"):
        guessed = name in ("clip.pt", "t.sft")
        with pytest.warns(UserWarning, match="12 blocks quick_gelu is assumed") if guessed else nullcontext():
            encoder, tokenizer = load_text_encoder(tmp_path / name)
        assert type(encoder) is CLIPTextModel and encoder.config.hidden_act == "quick_gelu", name
        assert (tokenizer.model_max_length, tokenizer.pad_token_id) == (248, 49407)
        expected["small"].check(encoder, tokenizer)


def test_a_narrow_bigg_is_the_same_in_every_format(tmp_path, bigg, expected):
    few_words = text_backbone(BIGG, 128, quick_gelu=False)
    export_text_encoder(few_words, tmp_path / "folder", projection=True)
    few_words.save(tmp_path / "open_clip")
    encoder, _ = to_transformers(bigg, projection=True)
    write_file(encoder, tmp_path / "clip_g.safetensors")
    # As SDXL's checkpoints hold it: OpenAI's names under a prefix.
    sdxl = {f"conditioner.embedders.1.model.{name}": tensor for name, tensor in text_state(bigg).items()}
    save_file(sdxl, tmp_path / "sdxl.safetensors")
    # ComfyUI once saved its projection transposed.
    state = comfyui_state(encoder, "")
    state["text_projection"] = state.pop("text_projection.weight").T.contiguous()
    save_file(state, tmp_path / "old.safetensors")
    of_few_words = Expected(few_words)
    for name in ("folder", "open_clip", "clip_g.safetensors", "sdxl.safetensors", "old.safetensors"):
        loaded, tokenizer = load_text_encoder(tmp_path / name)
        assert type(loaded) is CLIPTextModelWithProjection and loaded.config.hidden_act == "gelu", name
        if "." in name:
            assert tokenizer.pad_token_id == loaded.config.pad_token_id == 0
        (expected["bigg"] if "." in name else of_few_words).check(loaded, tokenizer)


def test_a_bigg_that_is_not_pooled_at_eot_is_loaded_without_its_projection(tmp_path):
    averaged = text_backbone(BIGG, 128, quick_gelu=False)
    averaged.pooling = "average"
    averaged.save(tmp_path)
    encoder, tokenizer = load_text_encoder(tmp_path)
    assert type(encoder) is CLIPTextModel
    Expected(averaged).check(encoder, tokenizer)


@pytest.mark.filterwarnings("error::UserWarning")
def test_the_gelu_of_a_smaller_model_is_carried_by_every_format_that_can(tmp_path):
    """12 blocks and GELU, as LAION's ViT-B and ViT-L: against the rule, so it must be in the file."""
    files = ("text_encoder/model.safetensors", "open_clip/open_clip_model.safetensors", "clip/model.safetensors")
    for vocabulary, names in (
        (tiny_tokenizer, ("", "open_clip", "clip")),
        (clip_tokenizer, (*files, "file.safetensors")),
    ):
        folder = tmp_path / vocabulary.__name__
        backbone = text_backbone(SMALL, 64, quick_gelu=False, vocabulary=vocabulary)
        export_text_encoder(backbone, folder)
        backbone.save(folder / "open_clip")
        export_clip_model(backbone, folder / "clip")
        write_file(to_transformers(backbone)[0], folder / "file.safetensors")
        expected = Expected(backbone)
        for name in names:
            encoder, tokenizer = load_text_encoder(folder / name)
            assert encoder.config.hidden_act == "gelu", name
            expected.check(encoder, tokenizer)
    # For the weights alone the rule assumes OpenAI's activation, and warns.
    alone = tmp_path / "alone"
    alone.mkdir()
    (folder / "open_clip" / "open_clip_model.safetensors").rename(alone / "x.safetensors")
    with pytest.warns(UserWarning, match="12 blocks quick_gelu is assumed.*--model ViT-L-14 "):
        assert load_text_encoder(alone / "x.safetensors")[0].config.hidden_act == "quick_gelu"
    # The configuration of another model beside it does not count.
    (alone / "config.json").write_text(json.dumps({"hidden_size": 512, "num_hidden_layers": 12, "hidden_act": "gelu"}))
    with pytest.warns(UserWarning, match="quick_gelu is assumed"):
        load_text_encoder(alone / "x.safetensors")


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [
        ("", "safetensors"),
        ("clip_l.", "pt"),
        ("clip_l.transformer.", "sft.bin"),
        ("cond_stage_model.transformer.", "pt"),
        ("conditioner.embedders.0.transformer.", "safetensors"),
    ],
)
def test_clip_l_is_found_under_every_prefix_whatever_the_file_is_called(tmp_path, small, wider, prefix, kind):
    encoder, _ = to_transformers(small)
    state = {name: t.half() if t.is_floating_point() else t for name, t in comfyui_state(encoder, prefix).items()}
    # The rest of a checkpoint, SDXL's second encoder among it.
    state |= {"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(3), "first_stage_model.x": torch.zeros(2)}
    state |= {f"conditioner.embedders.1.model.{n}": t for n, t in text_state(wider).items()}
    file = tmp_path / f"model.{kind}"
    torch.save({"state_dict": state, "global_step": 3}, file) if kind == "pt" else save_file(state, file)
    loaded, tokenizer = load_text_encoder(file)
    assert type(loaded) is CLIPTextModel and loaded.config.hidden_act == "quick_gelu"
    assert loaded.dtype == torch.float32 and tokenizer.model_max_length == 248
    ours, theirs = encoder.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name].half(), theirs[name].half()) for name in ours)


def test_an_encoder_keeps_its_weights_when_its_file_changes(tmp_path, small):
    encoder, _ = to_transformers(small)
    save_file(comfyui_state(encoder, ""), file := tmp_path / "clip_l.safetensors")
    loaded, _ = load_text_encoder(file)
    with open(file, "r+b") as opened:  # in place: the file would be mapped into memory
        opened.write(b"\1" * file.stat().st_size)
    ours = encoder.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in loaded.state_dict().items())


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
        image_features, text_features = backbone.encode_image(pixels), backbone.encode_text(backbone.tokenize(CAPTIONS))
        theirs = model.get_image_features(pixels)
        theirs = getattr(theirs, "pooler_output", theirs)  # transformers 4 gives the tensor
    torch.testing.assert_close(theirs, image_features, rtol=0, atol=1e-5)
    unit_image, unit_text = (nn.functional.normalize(x, dim=-1) for x in (image_features, text_features))
    torch.testing.assert_close(output.text_embeds, unit_text, rtol=0, atol=1e-5)
    similarity = backbone.logit_scale.exp() * unit_image @ unit_text.T
    torch.testing.assert_close(output.logits_per_image, similarity, rtol=0, atol=1e-3)
    # Its text half is a text encoder like any other.
    encoder, tokenizer = load_text_encoder(tmp_path)
    assert type(encoder) is CLIPTextModel
    Expected(backbone).check(encoder, tokenizer)


@pytest.mark.skipif(transformers.__version__ < "5", reason="SigLIP's tokenizer needs sentencepiece in transformers 4")
@pytest.mark.parametrize("export", [export_text_encoder, export_clip_model])
def test_a_siglip_is_refused(export, tmp_path):
    with pytest.raises(UserError, match="a SigLIP has no causal mask.*Export a CLIP"):
        export(tiny_siglip(), tmp_path)


def test_a_two_tower_that_no_clip_model_can_be_is_refused(tmp_path):
    averaged = tiny_clip()
    averaged.pooling = "average"
    with pytest.raises(UserError, match="trained with average pooling, and a CLIPModel pools at EOT"):
        export_clip_model(averaged, tmp_path)
    for change, message in (
        ({"pool_type": "avg"}, "avg pooling"),
        ({"no_ln_pre": True}, "no norm before the blocks"),
        ({"ls_init_value": 0.1}, "layer scale"),
        ({"image_size": [32, 64]}, "images that are not square"),
        ({"attentional_pool": True, "attn_pooler_heads": 4}, "attention pooling"),
        ({"layers": [1, 1, 1, 1], "width": 32, "head_width": 16}, "is a ModifiedResNet"),
    ):
        config = deepcopy(CONFIG)
        config["vision_cfg"] |= change
        model = open_clip.CLIP(**deepcopy(config))
        odd = Backbone(model, averaged.tokenizer, {"model_cfg": config, "preprocess_cfg": {}}, True)
        with pytest.raises(UserError, match=message):
            export_clip_model(odd, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def two_blocks():
    sizes = {"width": 64, "heads": 1, "layers": 2}
    encoder, _ = to_transformers(text_backbone(sizes, 64, quick_gelu=True, vocabulary=clip_tokenizer))
    return comfyui_state(encoder, "")


def written(save_to, content) -> bytes:
    save_to(content, file := io.BytesIO())
    return file.getvalue()


def having(name: str, tensor: torch.Tensor):
    return lambda state, _: state | {f"text_model.{name}": tensor}


def lacking(part: str):
    return lambda state, _: {name: tensor for name, tensor in state.items() if part not in name}


WEIGHT = torch.zeros(4, 4)
CODE = r"more in it than tensors \(getattr\), which can be code. It is refused"
# A file that is no text encoder, .safetensors unless its name says another -> (its bytes or tensors, or what makes them
# of an encoder's weights and of a path that is touched if code in the file is run; how the file is named).
WRONG_FILES = {
    "empty": (b"", "is empty"),
    "html": (b"\n<!DOCTYPE html><html>Not found</html>", "is a web page or XML"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of Git LFS"),
    "gguf": (b"GGUF\x03\x00\x00\x00", "is a GGUF file"),
    "noise.pt": (bytes(range(255, 0, -1)) * 9, "is damaged, not a file of weights, or a pickle"),
    "header": ((1 << 62).to_bytes(8, "little") + b"{" + b"\0" * 99, "could not be read"),
    "truncated.pt": (lambda state, _: written(torch.save, state)[:-999], "could not be read; it may be cut short"),
    "code.ckpt": (lambda state, ran: written(torch.save, {"state_dict": state, "parameters": Runs(ran)}), CODE),
    "old code.bin": (lambda _, ran: pickle.dumps(Runs(ran), protocol=2), CODE),
    "torchscript.pt": (
        written(torch.jit.save, torch.jit.script(nn.Linear(2, 2))),
        "TorchScript archive, which holds code",
    ),
    "tensor.pt": (written(torch.save, WEIGHT), "holds no state dict"),
    "lora": ({"lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": WEIGHT}, "it is a LoRA"),
    "unet": ({"model.diffusion_model.input_blocks.1.1.proj_in.weight": WEIGHT}, "it is a diffusion model"),
    "vae": ({"decoder.conv_in.weight": WEIGHT, "quant_conv.bias": torch.zeros(4)}, "it is a VAE"),
    "t5": ({"encoder.block.0.layer.0.SelfAttention.q.weight": WEIGHT}, "it is a T5 text encoder"),
    "inversion": ({"clip_l": WEIGHT, "clip_g": torch.zeros(4, 5)}, "it is a textual inversion"),
    "image tower": ({"vision_model.embeddings.class_embedding": WEIGHT[0]}, "it is an image tower alone"),
    "other": ({"a.weight": WEIGHT}, "it holds 1 weights such as a.weight"),
    "vocabulary": (having("embeddings.token_embedding.weight", torch.zeros(32000, 64)), "a vocabulary of 32000"),
    "shape": (having("encoder.layers.1.mlp.fc2.weight", WEIGHT), r"mlp.fc2.weight: .*\[4, 4\].*\[64, 256\]"),
    "integers": (having("final_layer_norm.weight", torch.zeros(64).char()), "final_layer_norm.weight is of torch.int8"),
    "scaled fp8": (having("encoder.layers.0.mlp.fc1.scale_weight", torch.ones(1)), "is quantised"),
    "strange part": (having("encoder.layers.0.gate.weight", WEIGHT), "layers.0.gate.weight has no place in it"),
    "no blocks": (lacking(".layers."), "without positions or without blocks"),
    "flat table": (having("embeddings.position_embedding.weight", torch.tensor(3.0)), "without positions or without"),
    "a layer less": (lacking(".layers.0.self_attn.q_proj"), "lack 2 tensors of the model, such as .*0.self_attn.q_"),
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


def test_the_trap_of_the_hostile_files_works(tmp_path):
    pickle.loads(WRONG_FILES["old code.bin"][0]({}, tmp_path / "ran"))
    assert (tmp_path / "ran").exists()


def test_a_hub_id_is_read_with_and_without_a_folder_for_the_encoder(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "TRANSFORMERS_CACHE", str(tmp_path), raising=False)  # transformers 4
    backbone = long_clip()
    export_text_encoder(backbone, hub_repository(tmp_path, "some/pipeline"))
    export_clip_model(backbone, hub_repository(tmp_path, "some/clip"))
    expected = Expected(backbone)
    for name in ("some/pipeline", "some/clip"):
        expected.check(*load_text_encoder(name))
    with pytest.raises(UserError, match="'some/thing' is not a folder or file here, and as a hub id it gives no"):
        load_text_encoder("some/thing")


def test_folders_of_other_models_or_without_all_weights_are_refused(tmp_path):
    export_text_encoder(tiny_clip(), tmp_path)
    config_file, weights = (tmp_path / "text_encoder" / name for name in ("config.json", "model.safetensors"))
    config, state = json.loads(config_file.read_text()), load_file(weights)
    config_file.write_text(json.dumps(config | {"model_type": "t5"}))
    with pytest.raises(UserError, match="a model of type 't5'"):
        load_text_encoder(tmp_path)
    config_file.write_text(json.dumps(config))
    # A Long-CLIP with the tokenizer it began with; SDXL's second encoder with its own.
    tiny_tokenizer(33).save_pretrained(tmp_path / "tokenizer")
    assert load_text_encoder(tmp_path)[1].model_max_length == 77
    shutil.copytree(tmp_path / "text_encoder", tmp_path / "text_encoder_2")
    tiny_tokenizer(77, pad_token="!").save_pretrained(tmp_path / "tokenizer_2")
    assert load_text_encoder(tmp_path / "text_encoder_2")[1].pad_token_id == 0
    # transformers fills what is missing with random numbers, and only logs it.
    save_file({name: tensor for name, tensor in state.items() if "layers.1.mlp.fc1" not in name}, weights)
    with pytest.raises(UserError, match="lack 2 tensors of the model, such as .*layers.1.mlp.fc1.bias"):
        load_text_encoder(tmp_path)
    weights.write_bytes(b"not weights")
    with pytest.raises(UserError, match="could not be loaded: .*header"):
        load_text_encoder(tmp_path)
    weights.unlink()
    (tmp_path / "empty").mkdir()
    for name, message in (("nowhere", "is not there"), ("empty", "holds no text encoder")):
        with pytest.raises(UserError, match=message):
            load_text_encoder(tmp_path / name)


def test_a_single_file_is_whole_for_comfyui(tmp_path):
    write_file(to_transformers(tiny_clip())[0], tmp_path / "clip_l.safetensors")
    keys = load_file(tmp_path / "clip_l.safetensors")
    assert all(name.startswith("text_model.") for name in keys)
    # What ComfyUI's loaders look for: the kind of encoder, and its length.
    assert keys["text_model.embeddings.position_embedding.weight"].shape == (77, 32)
    layers = {name.split(".")[3] for name in keys if ".layers." in name}
    assert layers == {"0", "1", "2"} and "text_model.encoder.layers.1.mlp.fc1.weight" in keys


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_there_and_back_is_bit_identical(tmp_path, quick_gelu):
    backbone = long_clip(quick_gelu=quick_gelu)
    export_text_encoder(backbone, tmp_path, projection=True)
    encoder, _ = load_text_encoder(tmp_path)
    other = long_clip(seed=1, quick_gelu=quick_gelu)
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
        import_text_encoder(tiny_clip(quick_gelu=quick_gelu), encoder)
    names = ("gelu", "quick_gelu")
    message = f"hidden_act is {names[quick_gelu]}, the backbone's is {names[not quick_gelu]}"
    with pytest.raises(UserError, match=message):
        import_text_encoder(long_clip(quick_gelu=not quick_gelu), encoder)


def test_the_folder_loads_without_anything_of_ours(tmp_path):
    backbone = long_clip()
    export_text_encoder(backbone, tmp_path)
    keys = load_file(tmp_path / "text_encoder" / "model.safetensors").keys()
    assert all(key.startswith("text_model.") for key in keys)
    config = json.loads((tmp_path / "text_encoder" / "config.json").read_text())
    assert config["dtype"] == "float32" and config["architectures"] == ["CLIPTextModel"]
    assert (config["bos_token_id"], config["eos_token_id"]) == (BOS, EOS)
    assert {"vocab.json", "merges.txt"} <= {path.name for path in (tmp_path / "tokenizer").iterdir()}
    encoder = CLIPTextModel.from_pretrained(tmp_path, subfolder="text_encoder")
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path, subfolder="tokenizer")
    ids = tokenizer(CAPTIONS, padding="max_length", truncation=True, return_tensors="pt").input_ids
    ours, _ = to_transformers(backbone)
    assert torch.equal(encoder(ids).last_hidden_state, ours.eval()(ids).last_hidden_state)
    # Pooled at EOT, not at SOT, as a wrong eos_token_id would.
    pooled = backbone.text.project(encoder(ids).pooler_output)
    torch.testing.assert_close(pooled, backbone.encode_text(backbone.tokenize(CAPTIONS)), rtol=0, atol=1e-5)
