"""The build of the toy world's models, in miniature."""

import json
from contextlib import nullcontext

import torch

from debias_diffusion.app.fine_tuning import RECIPES
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.encoders.spec import load_text_encoder, load_two_tower
from debias_diffusion.toyworld import shipped
from research.toymodels import build, scores


def test_what_is_built_ships_and_a_second_build_trains_nothing(tmp_path, monkeypatch):
    # Where a CPU has no units for bfloat16, training in it takes seven times as long.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    output, weights, small = tmp_path / "output", tmp_path / "weights", dict(steps=2, batch=8)
    clip, images, unet = small | {"scenes": 16}, small | {"pictures": 16}, small | {"compiled": False}
    stages = {"train_clip": clip, "train_second_text_encoder": clip, "train_vae": images, "train_features": images}
    for name, settings in (stages | {"train_unet": unet, "toy_training": small}).items():
        whole = getattr(build, name)

        def in_miniature(*given, whole=whole, settings=settings, **options):
            return whole(*given, **options | settings)

        monkeypatch.setattr(build, name, in_miniature)
    for name, count in {"_PAIRS": 16, "_TRAINED_ON": 24, "_SCORED": 4, "_DRAWN": 4}.items():
        monkeypatch.setattr(build, name, count)
    monkeypatch.setattr(scores, "STEPS", 2)  # of images, which are noise after so little training
    build.ship(build.Build(output), weights)
    toys = {name.removeprefix("toy/") for name in shipped.NAMES}
    assert {path.name for path in weights.iterdir()} == toys | {"logs", "scores.json"}
    assert json.loads((weights / "scores.json").read_text()).keys() >= {"toy/clip", "toy/sdxl", "checker"}
    assert not [path for path in weights.rglob("*.json") if str(output) in path.read_text()]

    monkeypatch.setattr(shipped, "WEIGHTS", weights)
    for recipe in RECIPES:
        trained, base = load_backbone(str(output / recipe / "last")), load_two_tower("toy/clip")
        base.stretch()
        loaded, start = load_two_tower(f"toy/{recipe}"), base.model.state_dict()
        for name, weight in trained.model.state_dict().items():
            moved, off = ((weight - its[name]).abs().max() for its in (start, loaded.model.state_dict()))
            assert moved > 0 and off <= 0.51 * moved / 127
        encoder, tokenizer = load_text_encoder(f"toy/{recipe}")
        assert tokenizer.model_max_length == encoder.config.max_position_embeddings == 248
        table = next(tensor for name, tensor in encoder.state_dict().items() if "position_embedding" in name)
        assert torch.equal(table, loaded.model.positional_embedding) and table.dtype == torch.float32

    before = {path: path.stat().st_mtime_ns for path in output.glob("*/model/*.safetensors")}
    for name in [name for name in vars(build) if name.startswith("train_")]:
        monkeypatch.delattr(build, name)
    build.ship(build.Build(output), tmp_path / "again")
    assert before == {path: path.stat().st_mtime_ns for path in output.glob("*/model/*.safetensors")}
