"""A run that ends in its warm-up says so, in the plan and at the end."""

import pytest
from helpers.training_runs import config

from debias_diffusion.training import progress
from debias_diffusion.training.two_tower import train


@pytest.mark.parametrize("warmup", [20, 2, 1])
def test_a_run_of_warm_up_alone_is_told(world, tmp_path, capsys, monkeypatch, warmup):
    monkeypatch.setattr(progress, "FEW_STEPS", 2)  # two are many
    train(config(world, tmp_path, max_steps=2, warmup=warmup, eval_every=9, checkpoint_every=9))
    out, line = capsys.readouterr().out, "Every step is warm-up: the learning rate only rises. --warmup 0 is enough."
    assert (f"  {line}\n" in out, f"were replaced. {line} Give it" in out) == (warmup > 1,) * 2
