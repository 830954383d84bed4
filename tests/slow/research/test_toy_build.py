"""The build of the toy world's models, in miniature."""

import json

import pytest
import torch
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME as UNET_WEIGHTS
from safetensors.torch import load_file

from debias_diffusion.app.fine_tuning import RECIPES
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.encoders.spec import load_text_encoder, load_two_tower
from debias_diffusion.toyworld import shipped
from debias_diffusion.toyworld.grammar import STYLES
from research.toymodels import build


@pytest.fixture(scope="module")
def built(tmp_path_factory, full_precision):
    """The build's folder, the weights that ship and the sizes."""
    root = tmp_path_factory.mktemp("toyworld")
    small = dict(steps=2, batch=8)
    clip, images, unet = small | {"scenes": 16}, small | {"pictures": 16}, small | {"compiled": False}
    sizes = build.Sizes(clip, clip, images, images, unet, unet, small, pairs=16, trained_on=24, scored=4)
    build.ship(build.Build(root / "output", sizes), root / "weights")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped, "WEIGHTS", root / "weights")
        yield root / "output", root / "weights", sizes


def test_the_build_leaves_models_logs_and_scores(built):
    output, weights, _ = built
    toys = {name.removeprefix("toy/") for name in shipped.NAMES}
    assert {path.name for path in weights.iterdir()} == toys | {"logs", "scores.json"}
    scores = json.loads((weights / "scores.json").read_text())
    assert set(scores) >= {"toy/clip", "toy/sdxl", *(f"toy/{recipe}" for recipe in RECIPES), "checker"}
    assert set(scores["toy/sdxl"]) == set(scores["prepared-sdxl"]) == set(STYLES)
    unets = [load_file(output / stage / "model" / UNET_WEIGHTS) for stage in ("unet", "prepared-unet")]
    assert not torch.equal(*(unet["conv_in.weight"] for unet in unets))
    assert not list(weights.rglob("*.bin"))
    assert not [path for path in weights.rglob("*.json") if str(output) in path.read_text()]


def test_a_second_build_trains_nothing(built, monkeypatch, tmp_path):
    output, _, sizes = built
    before = {path: path.stat().st_mtime_ns for path in output.glob("*/model/*.safetensors")}
    for name in [name for name in vars(build) if name.startswith("train_")]:
        monkeypatch.delattr(build, name)
    build.ship(build.Build(output, sizes), tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in output.glob("*/model/*.safetensors")}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_shipped_two_tower_is_the_one_that_was_trained(built, recipe):
    trained, base = load_backbone(str(built[0] / recipe / "last")), load_two_tower("toy/clip")
    assert base.context_length == 77
    base.stretch()
    loaded, start = load_two_tower(f"toy/{recipe}"), base.model.state_dict()
    assert loaded.context_length == 248 and not loaded.training
    for name, weight in trained.model.state_dict().items():
        moved, off = ((weight - its[name]).abs().max() for its in (start, loaded.model.state_dict()))
        assert off <= 0.51 * moved / 127
        assert moved > 0
    encoder, tokenizer = load_text_encoder(f"toy/{recipe}")
    assert tokenizer.model_max_length == encoder.config.max_position_embeddings == 248
    table = next(tensor for name, tensor in encoder.state_dict().items() if "position_embedding" in name)
    assert torch.equal(table, loaded.model.positional_embedding) and table.dtype == torch.float32
