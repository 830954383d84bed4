"""Hub repositories of one file of weights, laid out as Long-CLIP's is: `longclip-L.pt` and a README."""

import pytest
import torch
from helpers.released import CAPTIONS, released
from helpers.text_encoders import hub_repository
from helpers.tiny_sdxl import build_tiny_sdxl
from huggingface_hub import ModelInfo, constants

from debias_diffusion import load_text_encoder
from debias_diffusion.app.export import export
from debias_diffusion.app.options import ExportConfig
from debias_diffusion.encoders import load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.interchange import hub
from debias_diffusion.interchange.hub import find_hub_file
from debias_diffusion.interchange.transformers_folder import export_text_encoder
from debias_diffusion.pipelines.checkpoints import load_pipeline

NAME = "SomeOne/LongCLIP-tiny"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache on this machine; the hub itself cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def features(cache, tmp_path):
    """The repository, as downloading it leaves it; the features of CAPTIONS."""
    file, features = released(tmp_path, "")
    folder = hub_repository(cache, NAME)
    file.rename(folder / "longclip-tiny.pt")
    (folder / "README.md").write_text("# Long-CLIP\n")
    return features


def test_its_file_is_loaded_wherever_a_hub_id_is_taken(known, features, tmp_path):
    two_tower = load_two_tower(NAME)
    torch.testing.assert_close(two_tower.encode_text(two_tower.tokenize(CAPTIONS)), features, rtol=0, atol=1e-4)
    encoder, tokenizer = load_text_encoder(NAME)
    assert (encoder.config.max_position_embeddings, tokenizer.model_max_length) == (248, 248)
    ids = tokenizer(CAPTIONS, padding="max_length", truncation=True, return_tensors="pt").input_ids
    pooled = encoder(ids).pooler_output @ two_tower.model.text_projection
    torch.testing.assert_close(pooled, features, rtol=0, atol=1e-4)
    for to, output in (("transformers", "folder"), ("comfyui", "clip_l.safetensors"), ("clip", "both")):
        export(ExportConfig(NAME, str(tmp_path / output), to))
    exported = {"folder": load_text_encoder(tmp_path / "folder")[0]}
    exported |= {name: load_text_encoder(tmp_path / name)[0] for name in ("clip_l.safetensors", "both")}
    for name, other in exported.items():
        assert torch.equal(other(ids).last_hidden_state, encoder(ids).last_hidden_state), name
    base = build_tiny_sdxl(tmp_path / "sdxl", text_width=64)
    pipe = load_pipeline(base, NAME, torch.device("cpu"))
    assert torch.equal(pipe.text_encoder(ids).last_hidden_state, encoder(ids).last_hidden_state)


def test_a_repository_with_a_folder_to_load_is_not_searched_for_files(cache, known, features, tmp_path):
    assert find_hub_file(NAME).name == "longclip-tiny.pt"
    export_text_encoder(load_two_tower(NAME), folder := hub_repository(cache, "some/encoder"))
    (folder / "longclip.pt").write_bytes(b"not read")
    assert find_hub_file("some/encoder") is None and find_hub_file("some/missing") is None
    encoder, _ = load_text_encoder("some/encoder")
    assert encoder.config.max_position_embeddings == 248
    for kept in ("open_clip_config.json", "pytorch_model.bin"):
        (folder := hub_repository(cache, f"some/{kept}")).joinpath(kept).write_text("{}")
        (folder / "other.pt").write_bytes(b"not read")
        assert find_hub_file(f"some/{kept}") is None


def test_the_hub_is_asked_for_the_list_and_the_one_file(tmp_path, monkeypatch):
    """In place of the network: what huggingface_hub answers."""
    asked, listed = [], ["longclip-L.pt", "README.md", ".gitattributes", "images/a.bin"]

    def model_info(_, name, timeout):
        return ModelInfo(id=name, siblings=[{"rfilename": file} for file in listed])

    monkeypatch.setattr(hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(hub, "hf_hub_download", lambda *names: asked.append(names) or str(tmp_path / names[1]))
    assert find_hub_file("BeichenZhang/LongCLIP-L") == tmp_path / "longclip-L.pt"
    assert asked == [("BeichenZhang/LongCLIP-L", "longclip-L.pt")]
    listed.append("a-smaller-one.safetensors")
    with pytest.raises(UserError, match="holds 2 files of weights and no .*: a-smaller-one.safetensors, longclip-L.pt"):
        load_text_encoder("some/files")

    def broken(*_):
        raise OSError("the connection broke")

    monkeypatch.setattr(hub, "hf_hub_download", broken)
    listed.remove("longclip-L.pt")
    with pytest.raises(UserError, match="'a-smaller-one.safetensors' of .* cannot be downloaded: the connection broke"):
        load_two_tower("some/files")
