"""Fitting encoders to a frozen UNet: the loss against the pipelines' own embeddings, resume, and what is left."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler
from helpers.training_runs import is_the_same_run, killed_copy, lines_of, log
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

from debias_diffusion.app.align.command import Alignment, align
from debias_diffusion.app.align.data import collate
from debias_diffusion.app.options import AlignConfig
from debias_diffusion.clip.weight_files import weights_digest
from debias_diffusion.data.seen import read_seen, write_seen
from debias_diffusion.data.sources import data_digest, read_captions
from debias_diffusion.encoders.spec import EncoderSpec, load_text_encoder, load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.eval.options import GenerationConfig
from debias_diffusion.eval.session import read_source
from debias_diffusion.pipelines.rendering.loading import load_pipeline

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def settings(sdxl_folder, long_clip_folder, world, tmp_path_factory):
    """A configuration with changes: a first encoder of 248 positions, and the checkpoint's second one stretched."""
    latents = str(tmp_path_factory.mktemp("latents"))
    encoder = str(shutil.copytree(long_clip_folder, tmp_path_factory.mktemp("encoder") / "clip"))
    Path(encoder).chmod(0o755)  # a shared folder is read-only
    write_seen(Path(encoder), {"other data": [[3, 9]]})

    def make(output, **changes):
        values = dict(base=str(sdxl_folder), data=world[1], images=world[2], output=str(output), latent_cache=latents)
        values |= dict(encoder=encoder, encoder_2="stretch", validation=4, batch=4, epochs=9, max_steps=4)
        values |= dict(learning_rate=1e-3, warmup=1, workers=0, checkpoint_every=2, eval_every=4, log_every=1)
        return AlignConfig(**(values | changes))

    return make


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory):
    """Both encoders fitted, each in one piece."""
    output = tmp_path_factory.mktemp("finished")
    align(settings(output))
    return output


def prepared(config):
    """A run with its data, before the first step."""
    run = Alignment(config)
    run.prepare()
    return run


def samples(run, count):
    return collate([run.dataset[(0, index, index)] for index in range(count)])


# ---- the loss


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_the_denoising_loss_is_that_of_the_pipelines_embeddings(settings, tmp_path, prediction):
    """The UNet's own training loss, written out on what a long-prompt pipeline with these encoders gives it."""
    run = prepared(settings(tmp_path))
    run.objective.scheduler.register_to_config(prediction_type=prediction)
    pipe = load_pipeline(run.config.base, run.config.encoder, CPU, torch.float32, "stretch")
    scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
    batch, caption = run.dataset[(0, 5, 5)], run.records[5].caption
    embeds, _, pooled, _ = pipe.encode_prompt(caption.lower(), do_classifier_free_guidance=False)
    time = torch.tensor([round(999 * batch.shares.item())])
    noisy = scheduler.add_noise(batch.latents, batch.noise, time)
    added = {"text_embeds": pooled, "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]])}
    predicted = pipe.unet(noisy, time, encoder_hidden_states=embeds, added_cond_kwargs=added).sample
    velocity = scheduler.get_velocity(batch.latents, batch.noise, time)
    target = {"epsilon": batch.noise, "v_prediction": velocity, "sample": batch.latents}[prediction]
    expected = F.mse_loss(predicted, target).item()
    assert run.objective.losses(batch)["denoising_loss"].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.usefixtures("no_grad")
def test_latents_are_those_of_the_checkpoints_autoencoder(settings, tmp_path):
    run = prepared(settings(tmp_path, pixels=32))
    pipe, record = load_pipeline(run.config.base, None, CPU), run.records[2]
    image = pil_to_tensor(Image.open(f"{run.config.images}/{record.image}"))[None].float() / 127.5 - 1
    latents = pipe.vae.encode(image).latent_dist.mean * pipe.vae.config.scaling_factor
    assert image.shape == (1, 3, 32, 32) and latents.shape == (1, 4, 4, 4)
    torch.testing.assert_close(run.dataset[(0, 2, 2)].latents, latents, rtol=0, atol=1e-5)


def test_chunks_and_recomputed_activations_change_no_gradient(settings, tmp_path):
    def gradients_of(run, chunk=None):
        run.config.chunk = chunk
        report = {name: value.item() for name, value in run.backward(samples(run, 4)).items()}
        gradients = {name: parameter.grad.clone() for name, parameter in run.model.named_parameters()}
        run.optimizer.clear()
        return report, gradients

    run = prepared(settings(tmp_path))
    report, expected = gradients_of(run)
    assert report["gradient_norm"] > 0 and all(gradient.any() for gradient in expected.values())
    again = prepared(settings(tmp_path / "again", checkpoint_activations=True))
    for other, chunk in ((run, 1), (run, 3), (again, None)):
        chunked, gradients = gradients_of(other, chunk)
        assert chunked == pytest.approx(report, rel=1e-4)
        torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.usefixtures("no_grad")
def test_a_caption_and_a_part_of_it_count_half_each(settings, tmp_path):
    run = prepared(settings(tmp_path))
    batch = samples(run, 1)
    whole = replace(batch, parts=[None])
    both, once = (run.objective.losses(given)["state_error"] for given in (replace(batch, parts=batch.texts), whole))
    torch.testing.assert_close(both, once)
    assert once > 0.01


# ---- runs


def test_a_run_fits_both_encoders_and_nothing_else(finished, settings):
    config = settings(finished)
    first, second = (load_text_encoder(finished / name)[0] for name in ("encoder", "encoder_2"))
    assert [part.config.max_position_embeddings for part in (first, second)] == [248, 248]
    tower, before = load_two_tower(str(finished)), load_two_tower(config.encoder)
    assert weights_digest(load_text_encoder(str(finished))[0]) == weights_digest(first)
    assert weights_digest(tower.model.visual) == weights_digest(before.model.visual)
    assert weights_digest(tower.text.tower) != weights_digest(before.text.tower)
    steps = [line for line in log(finished) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["step"] for line in steps if "left" in line["seconds"]] == [3]
    for line in steps:
        weighted = 10 * line["denoising_loss"] + line["state_error"] + 10 * line["feature_distance"]
        assert line["loss"] == pytest.approx(weighted, rel=1e-4)


def test_both_encoders_have_seen_what_they_were_fitted_on_and_what_the_first_had(finished, settings, tmp_path):
    config, pairs = settings(finished), 24
    digest = data_digest(config.data, read_captions(config.data))
    for name in ("encoder", "encoder_2", "last"):
        spec = EncoderSpec.parse(finished / name)
        assert read_seen(spec) == {digest: [(config.validation, pairs)], "other data": [(3, 9)]}
    values = dict(base=config.base, output=str(tmp_path), data=config.data, images=config.images, dino="x/x")
    beside = GenerationConfig(["original"], encoder_2=str(finished / "encoder_2"), held_out=True, **values)
    source = read_source(beside, beside.labelled, beside.held_out, beside.second_encoders)
    assert len(source.records) == config.validation


def test_a_killed_run_resumes_bit_identically_with_the_same_checkpoint_alone(finished, settings, copy_of, tmp_path):
    run = killed_copy(finished, tmp_path / "run", step=4)
    shutil.rmtree(run / "encoder"), shutil.rmtree(run / "encoder_2")
    other = copy_of(Path(settings(run).base), tmp_path / "other")
    file = other / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"beta_end": 0.02}))
    with pytest.raises(UserError, match="contents of SDXL checkpoint: "):
        align(settings(run, base=str(other)))
    align(settings(run))
    is_the_same_run(run, finished)
    for name in ("encoder", "encoder_2"):
        assert weights_digest(load_text_encoder(run / name)[0]) == weights_digest(load_text_encoder(finished / name)[0])


def test_bad_images_are_replaced_and_named(settings, world, tmp_path):
    images = shutil.copytree(world[2], tmp_path / "images", copy_function=shutil.copyfile)
    for name in ("9.png", "1.png"):  # trained on, and held out
        (images / name).write_bytes(b"no image")
    align(settings(tmp_path / "run", images=str(images), batch=10, max_steps=2, max_bad=0.1))  # all once
    assert {line["where"] for line in lines_of(tmp_path / "run" / "bad-records.jsonl")} == {"1.png", "9.png"}
    assert [line["pairs"] for line in log(tmp_path / "run") if "pairs" in line] == [3, 3]
