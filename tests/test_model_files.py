"""Models that are damaged or missing: each is refused with a message, before anything is drawn."""

import contextlib
import json
from functools import cache, reduce
from itertools import cycle
from pathlib import Path

import pytest
import torch
from helpers.model_folders import CPU, KINDS, load_sdxl, small_clip
from safetensors.torch import load_file, save

from debias_diffusion.encoders.clip_model import export_clip_model
from debias_diffusion.encoders.single_file import write_file
from debias_diffusion.encoders.text_encoders import export_text_encoder, to_transformers
from debias_diffusion.errors import UserError, explain_failure


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
    overflow = pytest.raises(UserError, match="'conv_in.weight' with values .* to inf")
    with replaced(weights, save(state, metadata={"format": "pt"})), overflow:
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
        with pytest.raises(UserError, match="final_layer_norm.weight' with values from nan"):
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


TEXT_CFG = ["model_cfg", "text_cfg"]
WRONG = [
    ("siglip", [*TEXT_CFG, "tokenizer_kwargs", "trust_remote_code"], True, "'trust_remote_code': True"),
    ("open_clip", ["debias_diffusion"], {"pooling": []}, "pooling must be one of"),
    ("text encoder", ["num_hidden_layers"], 2, "layers.2.* has no place in it"),
    ("text encoder", ["max_position_embeddings"], 78, r"position_embedding.weight is \(77, 32\), not \(78, 32\)"),
    ("clip", ["vision_config", "num_hidden_layers"], 3, "lack 16 tensors of the model, such as .*layers.2"),
    ("sdxl vae", ["mid_block_add_attention"], False, "mid_block.* has no place in it"),
]


@pytest.mark.parametrize(("kind", "keys", "value", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_a_configuration_that_cannot_be_of_its_files_is_refused(saved, kind, keys, value, message):
    folder, (_, _, config, load) = saved(kind), KINDS[kind]
    content = with_value(folder / config, keys, value)
    with replaced(folder / config, content), pytest.raises(UserError, match=message):
        load(folder)


@pytest.mark.parametrize(("kind", "place"), [("open_clip", "tokenizer"), ("sdxl", "tokenizer_2")])
def test_a_tokenizer_that_makes_its_library_panic_is_refused(saved, kind, place):
    """Rust's panics are no Exception."""
    file, load = saved(kind) / place / "tokenizer.json", KINDS[kind][3]
    panics = with_value(file, ["normalizer"], {"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with replaced(file, panics), pytest.raises(UserError, match="[Tt]okenizer|checkpoint"):
        load(saved(kind))


def absent_name():
    return there  # noqa: F821


def absent_attribute():
    return CPU.there


def assertion():
    assert CPU.index


@pytest.mark.parametrize("bug", [absent_name, absent_attribute, assertion])
def test_a_bug_is_no_fault_of_a_file(bug):
    with pytest.raises((AttributeError, AssertionError, NameError)), explain_failure("The model"):
        bug()


@pytest.mark.parametrize("use", [lambda value: value["a"], lambda value: value.a, lambda value: value + 1])
def test_values_that_cannot_be_used_are_a_fault_of_the_file(use):
    for value in ({}, [], "", None):
        with pytest.raises(UserError, match="^The model: "), explain_failure("The model"):
            use(value)
