"""Trainings that begin with a checkpoint's own text encoder: its states are kept, all else is the base model's."""

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.single_files import original_layout
from helpers.text_encoders import long_clip
from helpers.tiny_clip import tiny_clip
from helpers.training_runs import config, log, saved
from safetensors.torch import load_file, save_file

from debias_diffusion.data.seen import read_seen, write_seen
from debias_diffusion.encoders.spec import EncoderSpec
from debias_diffusion.encoders.text_encoders import export_text_encoder, to_transformers
from debias_diffusion.errors import UserError
from debias_diffusion.jobs import Job
from debias_diffusion.training.two_tower import train

SLOW = {"recipe": "debias-clip-sdxl", "learning_rate": 1e-9, "max_steps": 1, "warmup": 0}


def sdxl(folder, encoder):
    parts = tiny_sdxl.sdxl_parts() | {"text_encoder": encoder}
    tiny_sdxl.assemble(StableDiffusionXLPipeline, parts).save_pretrained(folder)
    return folder


def test_the_checkpoints_encoder_is_trained_and_its_states_are_kept(world, tmp_path, capsys):
    own, base = tiny_clip(seed=5), load_file(f"{world[0]}/open_clip_model.safetensors")
    checkpoint = sdxl(tmp_path / "checkpoint", to_transformers(own)[0])
    write_seen(checkpoint, {"other data": [[3, 9]]})
    train(config(world, tmp_path / "run", text_from=str(checkpoint), **SLOW))
    printed = capsys.readouterr().out
    assert "R@1 on 6 held-out pairs: " in printed and f"the text encoder of {checkpoint}" in printed
    trained, wanted = saved(tmp_path / "run", "last"), own.model.state_dict()
    for name, weight in trained.items():
        if name == "positional_embedding":
            assert len(weight) == 248 and torch.equal(weight[:20], wanted[name][:20])
        elif name != "logit_scale":
            is_images = name.startswith("visual.") or name == "text_projection"
            torch.testing.assert_close(weight, base[name] if is_images else wanted[name], rtol=0, atol=1e-6)
    train(config(world, tmp_path / "base", **SLOW))
    errors = [line["state_error"] for run in ("run", "base") for line in log(tmp_path / run) if "state_error" in line]
    assert max(errors) < 0.4  # of each from its own teacher; of models with other weights it is 2
    inputs = [Job.read(tmp_path / run).inputs for run in ("run", "base")]
    assert inputs[0]["base model"] != inputs[1]["base model"] and inputs[0]["data"] == inputs[1]["data"]
    assert read_seen(EncoderSpec.parse(tmp_path / "run"))["other data"] == [(3, 9)]


def test_an_encoder_of_248_positions_is_not_stretched_again(world, tmp_path):
    long = long_clip(seed=5)
    export_text_encoder(long, tmp_path / "long")
    train(config(world, tmp_path / "run", text_from=str(tmp_path / "long"), **SLOW))
    table = saved(tmp_path / "run", "last")["positional_embedding"]
    torch.testing.assert_close(table, long.model.positional_embedding.detach(), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    root, sd15 = tmp_path_factory.mktemp("refused"), tiny_sdxl.sd15_parts()
    tiny_sdxl.assemble(StableDiffusionPipeline, sd15).save_pretrained(root / "sd15")
    save_file(original_layout(sd15), root / "sd15.safetensors")
    sdxl(root / "quick", to_transformers(tiny_clip(quick_gelu=True))[0])
    sdxl(root / "deep", to_transformers(tiny_clip(layers=5))[0])
    return root


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sd15", "is a Stable Diffusion 1.5 checkpoint, .* Give --keep-states 0"),
        ("sd15.safetensors", "is a Stable Diffusion 1.5 checkpoint"),
        ("quick", "hidden_act is quick_gelu, the backbone's is gelu"),
        ("deep", "num_hidden_layers is 5, the backbone's is 3"),
        ("gone", "is not there"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(world, tmp_path, refused, name, message):
    with pytest.raises(UserError, match=message):
        train(config(world, tmp_path / "run", text_from=str(refused / name), **SLOW))
