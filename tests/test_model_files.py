"""Models that are damaged or missing: each is refused with a message, before anything is drawn."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers.tiny_clip import byte_tokenizer, tiny_clip, tiny_siglip
from helpers.tiny_sdxl import build_tiny_sdxl
from safetensors.torch import load_file, save, save_file
from transformers import ViTConfig, ViTModel

from debias_diffusion.encoders import load_text_encoder, load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.eval.images.dpg_bench import VqaModel
from debias_diffusion.eval.images.networks import ClsFeatures, InceptionFeatures
from debias_diffusion.interchange.clip_model import export_clip_model
from debias_diffusion.interchange.single_file import write_file
from debias_diffusion.interchange.text_encoders import to_transformers
from debias_diffusion.interchange.transformers_folder import export_text_encoder
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.models.model_files import check_finite
from debias_diffusion.models.shipped import shipped
from debias_diffusion.pipelines.checkpoints import Checkpoint, load_pipeline
from debias_diffusion.tokens import clip_tokenizer

CPU = torch.device("cpu")


def small_clip():
    return tiny_clip(tokenizer=byte_tokenizer(77))


def load_sdxl(folder: Path):
    return load_pipeline(folder, None, CPU)


def save_vit(folder: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    ViTModel(ViTConfig(image_size=32, patch_size=8, **sizes)).save_pretrained(folder)


def save_file_alone(folder: Path) -> None:
    folder.mkdir()
    write_file(to_transformers(tiny_clip(tokenizer=clip_tokenizer(77)))[0], folder / "weights.safetensors")


def copy_difference(folder: Path) -> None:
    folder.mkdir()
    shutil.copy(Path(shipped("toy/debias-clip"), "difference.safetensors"), folder)


# A file of weights, its configuration, and what loads them.
MODEL = ("model.safetensors", "config.json")
OPEN_CLIP = ("open_clip_model.safetensors", "open_clip_config.json", load_two_tower)
TEXT = ("text_encoder/model.safetensors", "text_encoder/config.json", load_text_encoder)
# What is saved -> how, and these.
KINDS = {
    "open_clip": (lambda folder: small_clip().save(folder), *OPEN_CLIP),
    "siglip": (lambda folder: tiny_siglip().save(folder), *OPEN_CLIP),
    "text encoder": (lambda folder: export_text_encoder(small_clip(), folder), *TEXT),
    "clip": (lambda folder: export_clip_model(small_clip(), folder), *MODEL, load_two_tower),
    "vit": (save_vit, *MODEL, lambda folder: ClsFeatures(folder, CPU)),
    "sdxl": (build_tiny_sdxl, "unet/diffusion_pytorch_model.safetensors", "unet/config.json", load_sdxl),
    "sdxl vae": (build_tiny_sdxl, "vae/diffusion_pytorch_model.safetensors", "vae/config.json", load_sdxl),
    "sdxl text": (build_tiny_sdxl, "text_encoder_2/model.safetensors", "text_encoder_2/config.json", load_sdxl),
    "file": (save_file_alone, "weights.safetensors", None, lambda folder: load_text_encoder(next(folder.iterdir()))),
    "difference": (copy_difference, "difference.safetensors", None, load_two_tower),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What makes a folder of a kind, once; tests put back what they damage."""
    root, made = tmp_path_factory.mktemp("saved"), {}

    def folder_of(kind: str) -> Path:
        save = KINDS[kind][0]
        if save not in made:
            made[save] = root / kind
            save(made[save])
        return made[save]

    return folder_of


@contextlib.contextmanager
def replaced(file: Path, content: bytes):
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


@contextlib.contextmanager
def changed_config(file: Path, *keys, value):
    """The JSON file with another value at `keys`."""
    content = json.loads(file.read_text())
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    with replaced(file, json.dumps(content).encode()):
        yield


# ---- weights


VALUES = [float("nan"), float("-inf"), 1e38]


@pytest.mark.parametrize(
    ("kind", "value"),
    [(kind, VALUES[index % 3]) for index, kind in enumerate(KINDS)] + [("file", value) for value in VALUES],
)
def test_one_weight_that_is_not_finite_or_overflows_is_named(saved, kind, value):
    folder, (_, weights, _, load) = saved(kind), KINDS[kind]
    state = load_file(folder / weights)
    name = next(name for name, tensor in sorted(state.items()) if tensor.dtype == torch.float32 and tensor.ndim > 0)
    state[name].view(-1)[0] = value
    shown = {"difference": "steps"}.get(kind, name.split(".")[-2] if "." in name else name)
    message = rf"values in '.*{shown}.*' there are 1 (NaN|infinite|beyond 1,000,000)\."
    with replaced(folder / weights, save(state, metadata={"format": "pt"})), pytest.raises(UserError, match=message):
        load(folder)
    load(folder)


def test_counts_are_of_values_and_of_tensors():
    tensors = {"a": torch.tensor([float("nan")] * 2 + [float("inf")] + [1e30] * 3 + [0.0]), "b": torch.tensor(2e6)}
    with pytest.raises(UserError, match="of 7 values in 'a' there are 2 NaN, 1 infinite, 3 beyond 1,000,000, and 1 mo"):
        check_finite(tensors.items(), "It")
    fine = {"whole": torch.tensor([2**40]), "empty": torch.zeros(0), "half": torch.tensor([65504.0]).half()}
    check_finite(fine.items(), "It")


def test_what_a_dtype_cannot_hold_is_found_where_it_is_cast(tmp_path):
    build_tiny_sdxl(tmp_path)
    weights = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    state["conv_in.weight"].view(-1)[0] = 1e5
    save_file(state, weights, metadata={"format": "pt"})
    load_sdxl(tmp_path)
    with pytest.raises(UserError, match="unet' has weights .* 'conv_in.weight' there are 1 infinite"):
        load_pipeline(tmp_path, None, CPU, torch.float16)


def test_nothing_is_exported_that_is_not_finite(tmp_path):
    backbone = tiny_clip()
    with torch.no_grad():
        backbone.model.ln_final.weight[3] = float("nan")
    encoder, _ = to_transformers(backbone)
    for export in (
        lambda: export_text_encoder(backbone, tmp_path / "text"),
        lambda: export_clip_model(backbone, tmp_path / "clip"),
        lambda: write_file(encoder, tmp_path / "file.safetensors"),
    ):
        with pytest.raises(UserError, match="to be written has weights .*final_layer_norm.weight' there are 1 NaN"):
            export()
    assert not list(tmp_path.rglob("*.safetensors"))


# ---- configurations


DEEP = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("content", [DEEP, b"", b"[]", b"\xff"], ids=["deep", "empty", "list", "binary"])
def test_a_configuration_that_is_none_is_named(saved, content):
    for kind, (_, _, config, load) in KINDS.items():
        if config is not None:
            file = saved(kind) / config
            with replaced(file, content), pytest.raises(UserError, match=file.name):
                load(saved(kind))
    index = saved("sdxl") / "model_index.json"
    with replaced(index, content), pytest.raises(UserError, match=r"model_index\.json"):
        Checkpoint.parse(index.parent).check_kind()


WRONG = [
    ("siglip", ["model_cfg", "text_cfg", "tokenizer_kwargs"], "abc", "tokenizer_kwargs: abc"),
    ("open_clip", ["model_cfg", "text_cfg", "layers"], 40, "could not be loaded"),
    ("open_clip", ["model_cfg"], None, "must be JSON objects"),
    ("open_clip", ["preprocess_cfg"], {"mean": "abc"}, "could not be loaded"),
    ("open_clip", ["debias_diffusion"], {"pooling": []}, "pooling must be one of"),
    ("text encoder", ["num_hidden_layers"], 4, "lack 16 tensors of the model, such as .*layers.3"),
    ("text encoder", ["num_hidden_layers"], 2, "layers.2.* has no place in it and [0-9]+ more"),
    ("text encoder", ["max_position_embeddings"], 78, r"position_embedding.weight is \(77, 32\), not \(78, 32\)"),
    ("text encoder", ["num_attention_heads"], 0, "could not be loaded"),
    ("clip", ["vision_config", "num_hidden_layers"], 3, "lack 16 tensors of the model, such as .*layers.2"),
    ("clip", ["vision_config", "num_hidden_layers"], 1, "layers.1.* has no place in it and [0-9]+ more"),
    ("clip", ["text_config"], "abc", "CLIPModel"),
    ("vit", ["image_size"], None, "could not be loaded"),
    ("sdxl text", ["num_hidden_layers"], 2, "layers.2.* has no place in it"),
    ("sdxl vae", ["mid_block_add_attention"], False, "fit the model: .*mid_block.* has no place in it and .* more"),
    ("sdxl", ["cross_attention_dim"], "abc", "could not be loaded"),
]


@pytest.mark.parametrize(("kind", "keys", "value", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_settings_of_wrong_types_and_sizes_are_refused(saved, kind, keys, value, message):
    folder, (_, _, config, load) = saved(kind), KINDS[kind]
    with changed_config(folder / config, *keys, value=value), pytest.raises(UserError, match=message):
        load(folder)


def test_a_size_that_is_none_is_refused_and_two_are_height_and_width(saved):
    base = saved("sdxl")
    for size in (None, [8], [8, None], [8, 8, 8]):
        with (
            changed_config(base / "unet/config.json", "sample_size", value=size),
            pytest.raises(UserError, match="sam"),
        ):
            Checkpoint.parse(base).size  # noqa: B018
    with changed_config(base / "unet/config.json", "sample_size", value=[8, 16]):
        assert Checkpoint.parse(base).size == (64, 128)


def test_a_tokenizer_with_ids_that_the_encoder_has_not_is_refused(saved):
    folder = saved("text encoder")
    file = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    extra = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"].append({"id": 513, "content": "zebra"} | extra)
    content["model"]["vocab"]["zebra"] = 70_000
    with replaced(file, json.dumps(content).encode()), pytest.raises(UserError, match="ids"):
        load_text_encoder(folder)


# ---- what is not there, or cannot be read


@pytest.mark.parametrize(
    ("kind", "place"),
    [("open_clip", "tokenizer"), ("text encoder", "tokenizer"), ("clip", ""), ("sdxl", "tokenizer_2")],
)
def test_a_tokenizer_that_makes_its_library_panic_is_refused(saved, monkeypatch, kind, place):
    """Rust's panics are no Exception; Ctrl-C is none either, and passes."""
    file, load = saved(kind) / place / "tokenizer.json", KINDS[kind][3]
    content = json.loads(file.read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with replaced(file, json.dumps(content).encode()), pytest.raises(UserError, match="[Tt]okenizer|checkpoint"):
        load(saved(kind))
    monkeypatch.setattr(json, "loads", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        load(saved(kind))


def test_a_damaged_difference_is_refused(saved):
    file = saved("difference") / "difference.safetensors"
    state, whole = load_file(file), file.read_bytes()
    some = next(name for name in state if name != "steps" and state[name].ndim == 1)
    damaged = [
        {name: tensor for name, tensor in state.items() if name != "steps"},
        state | {"steps": state["steps"][:-1].clone()},
        {name: tensor for name, tensor in state.items() if name != some},
        state | {some: state[some][:-1].clone()},
    ]
    for content in (*map(save, damaged), whole[:1000], b"", (2**62).to_bytes(8, "little") + whole[8:]):
        with replaced(file, content), pytest.raises(UserError, match="could not be loaded.*Install the package"):
            load_two_tower(file.parent)


LOADERS = (
    *(load_text_encoder, load_two_tower, load_backbone, lambda path: Checkpoint.parse(path).check_kind()),
    *(lambda path: ClsFeatures(path, CPU), lambda path: VqaModel(path, CPU), lambda path: InceptionFeatures(path, CPU)),
)


@pytest.mark.parametrize("path", ["runs/none", "/x", "../x/y", "~/x", "mine/none", "a/b/c", "a" * 300, "\0"])
def test_a_path_that_is_missing_is_no_name_of_the_hub(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for load in LOADERS:
        with pytest.raises(UserError, match=r"not there|Unknown model|could not be|cannot be"):
            load(path)


def test_what_may_not_be_read_is_a_user_error(tmp_path):
    export_text_encoder(small_clip(), tmp_path / "closed" / "text")
    (tmp_path / "closed").chmod(0)
    is_root = os.geteuid() == 0
    try:
        if is_root:  # for whom nothing is closed
            os.seteuid(65534)
        for load in LOADERS:
            with pytest.raises(UserError):
                load(str(tmp_path / "closed" / "text"))
    finally:
        if is_root:
            os.seteuid(0)
        (tmp_path / "closed").chmod(0o700)
