"""The build of the toy world's models, in miniature."""

import json

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME as UNET_WEIGHTS
from safetensors.torch import load_file

from debias_diffusion.encoders import load_text_encoder, load_two_tower
from debias_diffusion.models import shipped
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.toymodels import build
from debias_diffusion.toymodels.fine_tuning import RECIPES
from debias_diffusion.toymodels.vae import SIZE
from debias_diffusion.toyworld.grammar import STYLES


@pytest.fixture(scope="module")
def built(tmp_path_factory, full_precision):
    root = tmp_path_factory.mktemp("toyworld")
    small = dict(steps=2, batch=8)
    sizes = build.Sizes(
        clip=small | {"scenes": 16},
        second=small | {"scenes": 16},
        vae=small | {"pictures": 16},
        features=small | {"pictures": 16},
        unet=small | {"compiled": False},
        prepared_unet=small | {"compiled": False},
        fine_tuning=small,
        pairs=16,
        trained_on=24,
        scored=4,
    )
    build.ship(build.Build(root / "output", sizes), root / "weights")
    return root, sizes


@pytest.fixture
def shipped_weights(built, monkeypatch):
    monkeypatch.setattr(shipped, "WEIGHTS", built[0] / "weights")


def test_the_build_leaves_models_logs_and_scores(built):
    root, _ = built
    weights = root / "weights"
    assert {path.name for path in weights.iterdir()} == {
        *(name.removeprefix("toy/") for name in shipped.NAMES),
        "logs",
        "scores.json",
    }
    scores = json.loads((weights / "scores.json").read_text())
    assert set(scores) >= {
        "toy/clip",
        "toy/sdxl",
        "toy/long-clip",
        "toy/debias-clip",
        "toy/debias-clip-sdxl",
        "checker",
    }
    assert set(scores["toy/sdxl"]) == set(scores["prepared-sdxl"]) == set(STYLES)
    unets = [load_file(root / "output" / stage / "model" / UNET_WEIGHTS) for stage in ("unet", "prepared-unet")]
    assert not torch.equal(*(unet["conv_in.weight"] for unet in unets))
    assert not list(weights.rglob("*.bin"))
    assert not [path for path in weights.rglob("*.json") if str(root) in path.read_text()]


def test_a_second_build_trains_nothing(built, monkeypatch):
    root, sizes = built
    before = {path: path.stat().st_mtime_ns for path in (root / "output").glob("*/model/*.safetensors")}
    for name in [name for name in vars(build) if name.startswith("train_")]:
        monkeypatch.delattr(build, name)
    build.ship(build.Build(root / "output", sizes), root / "again")
    assert before == {path: path.stat().st_mtime_ns for path in (root / "output").glob("*/model/*.safetensors")}


def test_stock_diffusers_loads_the_toy_sdxl_and_it_is_configured_as_sdxl(built):
    pipe = StableDiffusionXLPipeline.from_pretrained(built[0] / "weights" / "sdxl")
    pipe.set_progress_bar_config(disable=True)
    assert pipe.unet.config.addition_embed_type == "text_time"
    assert pipe.config.force_zeros_for_empty_prompt
    assert (pipe.tokenizer.pad_token, pipe.tokenizer_2.pad_token_id) == ("<|endoftext|>", 0)
    assert {part.dtype for part in (pipe.unet, pipe.text_encoder, pipe.text_encoder_2, pipe.vae)} == {torch.float32}
    image = pipe("a red star", num_inference_steps=2, output_type="np").images[0]
    assert image.shape == (SIZE, SIZE, 3) and np.isfinite(image).all()


def test_the_shipped_clip_and_encoders_load(shipped_weights):
    assert load_backbone("toy/clip").context_length == 77
    for name in (f"toy/{recipe}" for recipe in RECIPES):
        encoder, tokenizer = load_text_encoder(name)
        assert encoder.dtype == torch.float32
        assert tokenizer.model_max_length == encoder.config.max_position_embeddings == 248


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_shipped_two_tower_is_the_one_that_was_trained(built, shipped_weights, recipe):
    trained, base = load_backbone(str(built[0] / "output" / recipe / "last")), load_backbone("toy/clip")
    base.stretch()
    loaded, start = load_two_tower(f"toy/{recipe}"), base.model.state_dict()
    assert loaded.context_length == 248 and not loaded.training
    for name, weight in trained.model.state_dict().items():
        moved, off = ((weight - its[name]).abs().max() for its in (start, loaded.model.state_dict()))
        assert off <= 0.51 * moved / 127
        assert moved > 0
    encoder, _ = load_text_encoder(f"toy/{recipe}")
    table = next(tensor for name, tensor in encoder.state_dict().items() if "position_embedding" in name)
    assert torch.equal(table, loaded.model.positional_embedding)
