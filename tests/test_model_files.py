"""Models that are damaged or missing: each is refused with a message, before anything is drawn."""

import contextlib
import json
import shutil
import types
from functools import cache, partial, reduce
from itertools import cycle
from pathlib import Path

import open_clip
import pytest
import torch
from helpers.tiny_clip import byte_tokenizer, tiny_clip, tiny_siglip
from helpers.tiny_sdxl import build_tiny_sdxl
from safetensors.torch import load_file, save
from transformers import ViTConfig, ViTModel

from debias_diffusion.clip.model_files import check_sizes
from debias_diffusion.encoders.clip_model import export_clip_model
from debias_diffusion.encoders.single_file import write_file
from debias_diffusion.encoders.spec import load_text_encoder, load_two_tower
from debias_diffusion.encoders.text_encoders import to_transformers
from debias_diffusion.encoders.transformers_folder import export_text_encoder
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.eval.images.networks import ClsFeatures, InceptionFeatures
from debias_diffusion.eval.multimodal import ChatModel
from debias_diffusion.pipelines.rendering.checkpoints import Checkpoint, load_pipeline
from debias_diffusion.text.tokens import clip_tokenizer
from debias_diffusion.toyworld.shipped import shipped

CPU = torch.device("cpu")
load_sdxl = partial(load_pipeline, encoder=None, device=CPU)


def small_clip():
    return tiny_clip(tokenizer=byte_tokenizer(77))


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

    @cache
    def folder_of(save) -> Path:
        save(folder := tmp_path_factory.mktemp("saved") / "model")
        return folder

    return lambda kind: folder_of(KINDS[kind][0])


@contextlib.contextmanager
def replaced(file: Path, content: bytes):
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


def with_value(file: Path, keys: list[str], value) -> bytes:
    """The JSON file with another value at `keys`."""
    content = json.loads(file.read_text())
    reduce(dict.__getitem__, keys[:-1], content)[keys[-1]] = value
    return json.dumps(content).encode()


VALUES = [float("nan"), float("-inf"), 1e38]


@pytest.mark.parametrize(("kind", "value"), zip(KINDS, cycle(VALUES)))
def test_one_weight_that_is_not_finite_or_overflows_is_named(saved, kind, value):
    folder, (_, weights, _, load) = saved(kind), KINDS[kind]
    state = load_file(folder / weights)
    name = next(name for name, tensor in sorted(state.items()) if tensor.dtype == torch.float32 and tensor.ndim > 0)
    state[name].view(-1)[0] = value
    shown = {"difference": "steps"}.get(kind, name.split(".")[-2] if "." in name else name)
    message = rf"NaN or beyond 1,000,000: '.*{shown}.*' with values from .* to (nan|[0-9,-]+)\."
    with replaced(folder / weights, save(state, metadata={"format": "pt"})), pytest.raises(UserError, match=message):
        load(folder)
    load(folder)


def test_what_a_dtype_cannot_hold_is_found_where_it_is_cast(saved):
    weights = saved("sdxl") / KINDS["sdxl"][1]
    state = load_file(weights)
    state["conv_in.weight"].view(-1)[0] = 1e5
    with replaced(weights, save(state, metadata={"format": "pt"})):
        load_sdxl(saved("sdxl"))
        with pytest.raises(UserError, match="unet' has weights .* 'conv_in.weight' with values .* to inf"):
            load_sdxl(saved("sdxl"), dtype=torch.float16)


def test_nothing_is_exported_that_is_not_finite(tmp_path):
    backbone = small_clip()
    with torch.no_grad():
        backbone.model.ln_final.weight[3] = float("nan")
    for export in (
        lambda: export_text_encoder(backbone, tmp_path / "text"),
        lambda: export_clip_model(backbone, tmp_path / "clip"),
        lambda: write_file(to_transformers(backbone)[0], tmp_path / "file.safetensors"),
    ):
        with pytest.raises(UserError, match="to be written has .*final_layer_norm.weight' with values from nan"):
            export()
    assert not list(tmp_path.rglob("*.safetensors"))


DEEP = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("content", [DEEP, b"[]", b"\xff"], ids=["deep", "list", "binary"])
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
    ("siglip", ["model_cfg", "text_cfg", "tokenizer_kwargs", "trust_remote_code"], True, "trust_remote_code=True"),
    ("open_clip", ["debias_diffusion"], {"pooling": []}, "pooling must be one of"),
    ("text encoder", ["num_hidden_layers"], 2, "layers.2.* has no place in it and [0-9]+ more"),
    ("text encoder", ["max_position_embeddings"], 78, r"position_embedding.weight is \(77, 32\), not \(78, 32\)"),
    ("clip", ["vision_config", "num_hidden_layers"], 3, "lack 16 tensors of the model, such as .*layers.2"),
    ("sdxl vae", ["mid_block_add_attention"], False, "fit the model: .*mid_block.* has no place in it and .* more"),
    ("sdxl", ["cross_attention_dim"], "abc", "could not be loaded"),
]


@pytest.mark.parametrize(("kind", "keys", "value", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_settings_of_wrong_types_and_sizes_are_refused(saved, kind, keys, value, message):
    folder, (_, _, config, load) = saved(kind), KINDS[kind]
    content = with_value(folder / config, keys, value)
    with replaced(folder / config, content), pytest.raises(UserError, match=message):
        load(folder)


HUGE = [
    ("open_clip", ["model_cfg", "text_cfg", "layers"], 10**7),
    ("open_clip", ["model_cfg", "vision_cfg", "image_size"], 10**9),
    ("open_clip", ["model_cfg", "embed_dim"], 10**12),
    ("siglip", ["model_cfg", "text_cfg", "width"], 10**9),
    ("text encoder", ["num_hidden_layers"], 10**7),
    ("text encoder", ["intermediate_size"], 10**12),
    ("clip", ["vision_config", "num_hidden_layers"], 10**7),
    ("clip", ["text_config", "max_position_embeddings"], 10**12),
    ("vit", ["num_hidden_layers"], 10**7),
    ("sdxl", ["transformer_layers_per_block"], 10**7),
    ("sdxl", ["block_out_channels"], [32, 10**9]),
    ("sdxl vae", ["layers_per_block"], 10**7),
    ("sdxl text", ["vocab_size"], 10**12),
]


@pytest.mark.parametrize(("kind", "keys", "value"), HUGE, ids=lambda value: str(value)[:40])
def test_a_model_that_cannot_be_in_its_files_is_refused_before_it_is_built(saved, kind, keys, value):
    folder, (_, _, config, load) = saved(kind), KINDS[kind]
    content = with_value(folder / config, keys, value)
    with replaced(folder / config, content), pytest.raises(UserError, match="has a configuration of at least .* bytes"):
        load(folder)


@pytest.mark.parametrize("model", ["ViT-bigG-14", "RN50x64", "ViT-SO400M-14-SigLIP2", "convnext_xxlarge"])
def test_published_models_can_be_in_their_files(model):
    with torch.device("meta"):
        clip = open_clip.model.CLIP if "SigLIP" not in model else open_clip.CustomTextCLIP
        sizes = {name: value for name, value in open_clip.get_model_config(model).items() if name != "custom_text"}
        weights = sum(weight.numel() for weight in clip(**sizes).parameters())
    check_sizes(open_clip.get_model_config(model), weights // 2, model)  # of four bits each
    with pytest.raises(UserError):
        check_sizes(open_clip.get_model_config(model), weights // 5000, model)


@pytest.mark.parametrize(("kind", "place"), [("open_clip", "tokenizer"), ("clip", ""), ("sdxl", "tokenizer_2")])
def test_a_tokenizer_that_makes_its_library_panic_is_refused(saved, kind, place):
    """Rust's panics are no Exception."""
    file, load = saved(kind) / place / "tokenizer.json", KINDS[kind][3]
    panics = with_value(file, ["normalizer"], {"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with replaced(file, panics), pytest.raises(UserError, match="[Tt]okenizer|checkpoint"):
        load(saved(kind))


def test_a_tokenizer_with_ids_that_the_encoder_has_not_is_refused(saved):
    file = saved("text encoder") / "tokenizer" / "tokenizer.json"
    too_many = with_value(file, ["model", "vocab", "zebra"], 70_000)
    with replaced(file, too_many), pytest.raises(UserError, match="ids"):
        load_text_encoder(saved("text encoder"))


def test_a_damaged_difference_is_refused(saved):
    file = saved("difference") / "difference.safetensors"
    state, whole = load_file(file), file.read_bytes()
    shorter = save(state | {"steps": state["steps"][:-1].clone()})
    for content in (shorter, save(dict(list(state.items())[:-1])), whole[:1000]):
        with replaced(file, content), pytest.raises(UserError, match="could not be loaded"):
            load_two_tower(file.parent)


@pytest.mark.parametrize("path", ["runs/none", "/x", "~/x", "mine/none", "a/b/c", "a" * 300, "\0"])
def test_a_path_that_is_missing_is_no_name_of_the_hub(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    in_pictures = [partial(network, device=CPU) for network in (ClsFeatures, InceptionFeatures)]
    in_pictures.append(partial(ChatModel, device=CPU, precision="fp32", batch=1))
    for load in (load_text_encoder, load_two_tower, load_sdxl, *in_pictures):
        with pytest.raises(UserError, match=r"not there|Unknown model|could not be|cannot be"):
            load(path)


def absent_name():
    return there  # noqa: F821


def absent_attribute():
    return CPU.there


def assertion():
    assert CPU.index


BUGS = [absent_name, absent_attribute, assertion, lambda: assertion(1), lambda: assertion(a=1)]


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_this_package_is_no_fault_of_a_file(bug):
    in_package = types.FunctionType(bug.__code__, {**globals(), "__name__": "debias_diffusion.encoders.spec"})
    with pytest.raises((AttributeError, AssertionError, NameError, TypeError)), explain_failure("The model"):
        in_package()
    with pytest.raises(UserError, match="^The model: "), explain_failure("The model"):
        bug()  # of a library


@pytest.mark.parametrize("use", [lambda value: value["a"], lambda value: value.a, lambda value: value + 1])
def test_values_that_this_package_cannot_use_are_a_fault_of_the_file(use):
    in_package = types.FunctionType(use.__code__, {"__name__": "debias_diffusion.encoders.spec"})
    for value in ({}, [], "", None):
        with pytest.raises(UserError, match="^The model: "), explain_failure("The model"):
            in_package(value)
