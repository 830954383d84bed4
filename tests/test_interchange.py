import json

import open_clip
import pytest
import torch
from safetensors.torch import load_file
from tiny_clip import byte_tokenizer, tiny_clip
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from debias_diffusion import load_text_encoder
from debias_diffusion.backbones import load_backbone
from debias_diffusion.errors import UserError
from debias_diffusion.interchange import export_text_encoder, import_text_encoder, to_transformers

CAPTIONS = [
    "A cat sits on a red mat. " * 60,
    "A dog.",
    "Two birds fly over a blue house, and a small man in a green coat looks up at them. " * 6,
]


def open_clip_states(model, rows):
    """The input and every block's output of open_clip's own forward pass."""
    states = []
    hooks = [
        block.register_forward_hook(lambda module, inputs, output: states.append(output))
        for block in model.transformer.resblocks
    ]
    hooks.append(model.transformer.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0])))
    features = model.encode_text(rows)
    for hook in hooks:
        hook.remove()
    return states, features


@pytest.mark.parametrize("name", ["ViT-L-14", "ViT-L-14-quickgelu"])
def test_a_true_size_encoder_is_the_same_in_transformers(tmp_path, name):
    torch.manual_seed(0)
    backbone = load_backbone(name).eval()
    del backbone.model.visual  # not needed here, and large
    backbone.stretch()
    export_text_encoder(backbone, tmp_path / "plain")
    export_text_encoder(backbone, tmp_path / "projected", projection=True)
    plain, tokenizer = load_text_encoder(tmp_path / "plain")
    projected, _ = load_text_encoder(tmp_path / "projected")
    assert type(plain) is CLIPTextModel and type(projected) is CLIPTextModelWithProjection
    assert plain.config.hidden_act == ("quick_gelu" if "quickgelu" in name else "gelu")
    assert plain.config.max_position_embeddings == tokenizer.model_max_length == 248

    rows = backbone.tokenize(CAPTIONS).padded()
    inputs = tokenizer(CAPTIONS, padding="max_length", truncation=True, return_tensors="pt")
    is_text = rows != 0
    assert torch.equal(inputs.input_ids[is_text], rows[is_text])
    with torch.inference_mode():
        theirs = plain(inputs.input_ids, output_hidden_states=True)
        states, features = open_clip_states(backbone.model, rows)
        pooled = projected(inputs.input_ids)
        fast = backbone.encode_text(backbone.tokenize(CAPTIONS))
    assert len(states) == len(theirs.hidden_states) == 13
    for ours, other in zip(states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(other[is_text], ours[is_text], rtol=0, atol=1e-5)
    torch.testing.assert_close(pooled.text_embeds, features, rtol=0, atol=1e-5)
    torch.testing.assert_close(fast, features, rtol=0, atol=1e-5)


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_there_and_back_is_bit_identical(tmp_path, quick_gelu):
    backbone = tiny_clip(quick_gelu=quick_gelu)
    backbone.stretch()
    export_text_encoder(backbone, tmp_path, projection=True)
    encoder, _ = load_text_encoder(tmp_path)
    other = tiny_clip(seed=1, quick_gelu=quick_gelu)
    other.stretch()
    import_text_encoder(other, encoder)
    tokens = backbone.tokenize(CAPTIONS)
    assert torch.equal(other.encode_text(tokens), backbone.encode_text(tokens))


def test_the_folder_loads_without_anything_of_ours(tmp_path):
    backbone = tiny_clip()
    backbone.stretch()
    export_text_encoder(backbone, tmp_path)
    keys = load_file(tmp_path / "text_encoder" / "model.safetensors").keys()
    assert all(key.startswith("text_model.") for key in keys)
    config = json.loads((tmp_path / "text_encoder" / "config.json").read_text())
    assert config["dtype"] == "float32" and config["architectures"] == ["CLIPTextModel"]
    assert (config["bos_token_id"], config["eos_token_id"]) == (49406, 49407)
    assert {"vocab.json", "merges.txt"} <= {path.name for path in (tmp_path / "tokenizer").iterdir()}
    encoder = CLIPTextModel.from_pretrained(tmp_path, subfolder="text_encoder")
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path, subfolder="tokenizer")
    ids = tokenizer(CAPTIONS, padding="max_length", truncation=True, return_tensors="pt").input_ids
    ours, _ = to_transformers(backbone)
    assert torch.equal(encoder(ids).last_hidden_state, ours.eval()(ids).last_hidden_state)
    # Pooled at EOT, not at SOT, as a wrong eos_token_id would.
    pooled = backbone.text.project(encoder(ids).pooler_output)
    torch.testing.assert_close(pooled, backbone.encode_text(backbone.tokenize(CAPTIONS)), rtol=0, atol=1e-5)


def test_a_small_vocabulary_pools_at_its_own_eot(tmp_path):
    # transformers' default eos_token_id is of CLIP's vocabulary; with it a small one would silently pool at SOT.
    backbone = tiny_clip(tokenizer=byte_tokenizer(77))
    export_text_encoder(backbone, tmp_path, projection=True)
    encoder, tokenizer = load_text_encoder(tmp_path)
    assert (encoder.config.eos_token_id, len(tokenizer)) == (513, 514)
    captions = ["a cat", "a dog on a mat"]
    ids = tokenizer(captions, padding="max_length", return_tensors="pt").input_ids
    theirs, ours = encoder(ids).text_embeds, backbone.encode_text(backbone.tokenize(captions))
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    assert not torch.allclose(theirs[0], theirs[1])


def test_every_kind_of_folder_is_recognised(tmp_path):
    backbone = tiny_clip()
    backbone.stretch()
    backbone.save(tmp_path / "open_clip")
    export_text_encoder(backbone, tmp_path / "export")
    tokens = to_transformers(backbone)[1](CAPTIONS, padding="max_length", truncation=True, return_tensors="pt")
    expected = to_transformers(backbone)[0](tokens.input_ids).last_hidden_state
    for path in ("open_clip", "export", "export/text_encoder"):
        encoder, tokenizer = load_text_encoder(tmp_path / path)
        assert not encoder.training and tokenizer.model_max_length == 248
        assert torch.equal(encoder(tokens.input_ids).last_hidden_state, expected)


def test_an_export_owns_its_weights():
    backbone = tiny_clip()
    encoder, _ = to_transformers(backbone)
    before = [p.clone() for p in encoder.parameters()]
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, encoder.parameters(), strict=True))


def test_wrong_folders_are_named(tmp_path):
    with pytest.raises(UserError, match="is not there"):
        load_text_encoder(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no text encoder"):
        load_text_encoder(tmp_path)
    backbone = tiny_clip()
    export_text_encoder(backbone, tmp_path)
    (tmp_path / "text_encoder" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UserError, match="could not be loaded"):
        load_text_encoder(tmp_path)
    longer = tiny_clip()
    longer.stretch()
    with pytest.raises(UserError, match="max_position_embeddings is 77, the backbone's is 248"):
        import_text_encoder(longer, to_transformers(backbone)[0])
    with pytest.raises(UserError, match="hidden_act is gelu, the backbone's is quick_gelu"):
        import_text_encoder(tiny_clip(quick_gelu=True), to_transformers(backbone)[0])


def test_the_open_clip_folder_is_an_ordinary_one(tmp_path):
    backbone = tiny_clip()
    backbone.stretch()
    backbone.save(tmp_path)
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{tmp_path}")
    rows = tokenizer(CAPTIONS)
    assert rows.shape == (3, 248) and preprocess is not None
    torch.testing.assert_close(
        model.encode_text(rows), backbone.encode_text(backbone.tokenize(CAPTIONS)), rtol=0, atol=1e-5
    )
