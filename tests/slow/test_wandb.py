"""Weights & Biases without a network."""

import json

import pytest
from helpers.training_runs import config, losses

from debias_diffusion.training.two_tower import train


@pytest.mark.needs("wandb")
def test_its_own_file_of_an_offline_run_has_what_the_log_has(world, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(config(world, tmp_path, trackers=["wandb"]))
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert len(losses(tmp_path)) == 7 and all(json.dumps(loss).encode() in content for loss in losses(tmp_path))
