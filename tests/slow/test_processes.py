"""Training in processes of its own: killed at any moment, and shared by the two that a launcher starts."""

import random
import signal
import time

import pytest
import torch
from helpers.processes import as_options, run_in_processes
from helpers.training_runs import (
    checkpoint,
    config,
    is_the_same_run,
    log,
    losses,
    run_in_a_process,
    run_in_two_processes,
    wait_for_step,
)

from debias_diffusion.app.align.command import align
from debias_diffusion.app.options import AlignConfig
from debias_diffusion.training.loop import train


def test_a_killed_run_continues_bit_identically(world, tmp_path):
    # Far from its end, so that no kill comes too late on a busy machine.
    settings = dict(max_steps=60, checkpoint_every=5, eval_every=1000)
    train(config(world, tmp_path / "alone", **settings))
    # Before the first checkpoint, and between two: a kill right after a checkpoint would prove less.
    for step in (1, 8):
        process = run_in_a_process(config(world, tmp_path / "run", **settings))
        wait_for_step(tmp_path / "run", step, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "run" / "last").exists()
    train(config(world, tmp_path / "run", workers=2, **settings))
    is_the_same_run(tmp_path / "run", tmp_path / "alone")


def test_killed_at_random_moments_it_still_ends_the_same(world, tmp_path):
    # 8 kills, in turn at a moment drawn from the next step on and inside the write of a checkpoint.
    settings = dict(checkpoint_every=1, max_steps=200, eval_every=1000)
    train(config(world, tmp_path / "alone", **settings))
    rng, output, inside = random.Random(0), tmp_path / "killed", 0

    def writes() -> bool:
        return any(output.glob(".*.tmp"))

    for kill in range(8):
        process = run_in_a_process(config(world, output, **settings))
        before = len(log(output)) if (output / "log.jsonl").exists() else 0
        while process.poll() is None and (not (output / "log.jsonl").exists() or len(log(output)) <= before):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        while kill % 2 and process.poll() is None and not writes():
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        inside += writes()
    assert not (output / "last").exists(), "all kills came too late"
    assert inside, "no kill fell inside a write"
    train(config(world, output, **settings))
    is_the_same_run(output, tmp_path / "alone")


# AdamW divides by the size of a gradient, so rounding of one near 0 could become a whole step. Not with this `eps`.
EPS = 1e-2


def test_two_processes_train_a_method_of_a_users_file(world, extended, tmp_path):
    settings = dict(recipe="predicting", method={"alpha": 0.75}, max_steps=5, eps=EPS)
    settings["import_file"] = str(extended / "predicting.py")
    train(config(world, tmp_path / "alone", **settings))
    out = run_in_two_processes(config(world, tmp_path / "run", workers=1, trackers=["tensorboard"], **settings))
    assert "long captions predicted with weight 0.75" in out and out.count("Done: 5 steps") == 1
    for one, other in zip(log(tmp_path / "alone"), log(tmp_path / "run"), strict=True):
        assert one["step"] == other["step"]
        assert other.get("loss", 0) == pytest.approx(one.get("loss", 0), rel=1e-5)
    for part in ("model", "modules"):
        one, other = (checkpoint(tmp_path / run, 5)[part] for run in ("alone", "run"))
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5)


def test_two_processes_align_as_one(world, sdxl_folder, long_clip_folder, tmp_path):
    _, data, images = world
    settings = dict(base=str(sdxl_folder), data=data, images=images, encoder=str(long_clip_folder), encoder_2="stretch")
    settings |= dict(validation=4, batch=4, epochs=9, max_steps=4, learning_rate=1e-3, warmup=1, workers=0, eps=EPS)
    settings |= dict(checkpoint_every=2, eval_every=4, log_every=1, latent_cache=str(tmp_path / "latents"))
    align(AlignConfig(output=str(tmp_path / "alone"), **settings))
    options = as_options(settings | {"output": tmp_path / "run"})
    output = run_in_processes(2, "-m", "debias_diffusion.app.cli", "align", *options)
    assert "2 x cpu" in output
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
