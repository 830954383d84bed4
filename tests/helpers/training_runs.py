"""The smallest training runs, and what they leave."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from debias_diffusion.jobs import Job
from debias_diffusion.training.config import TrainConfig

STEPS = 7


def config(world, output, **settings) -> TrainConfig:
    model, data, images = world
    defaults = dict(validation=6, batch=8, components=3, epochs=50, max_steps=STEPS, warmup=2, learning_rate=1e-3)
    defaults |= dict(workers=0, eval_every=3, checkpoint_every=2, log_every=1, weight_decay=0.1)
    return TrainConfig(data=data, images=images, output=str(output), model=model, **defaults | settings)


def lines_of(file):
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def log(output):
    return lines_of(Path(output) / "log.jsonl")


def without_clock(output):
    return [
        {key: value for key, value in line.items() if key not in ("samples_per_second", "seconds")}
        for line in log(output)
    ]


def losses(output):
    return [line["loss"] for line in log(output) if "loss" in line]


def recalls(output):
    return [line for line in log(output) if "t2i_r1" in line]


def same_weights(one, other):
    one, other = (saved(folder, "last") for folder in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def is_the_same_run(output, other):
    assert same_weights(output, other)
    assert without_clock(output) == without_clock(other)


def killed_copy(finished, output, step=STEPS):
    """A copy of a finished run as a kill in its step `step`, the last one, leaves it."""
    shutil.copytree(finished, output)
    for path in (output, *output.rglob("*")):  # a shared folder is read-only
        path.chmod(path.stat().st_mode | 0o200)
    shutil.rmtree(output / "last")
    (output / f"checkpoint-{step:08}").unlink()
    return output


def checkpoint(run, step):
    return torch.load(Path(run) / f"checkpoint-{step:08}", weights_only=True)


def settings_of(run):
    return Job.read(run).settings


def saved(run, name):
    return load_file(run / name / "open_clip_model.safetensors")
