"""The smallest training runs, and what they leave."""

import json
import shutil
from pathlib import Path

import torch
from helpers.tiny_data import make_tiny_data
from safetensors.torch import load_file

from debias_diffusion.jobs import Job
from debias_diffusion.training.config import TrainConfig

STEPS = 7


def config(world, output, **settings) -> TrainConfig:
    model, data, images = world
    defaults = dict(validation=6, batch=8, components=3, epochs=50, max_steps=STEPS, warmup=2, learning_rate=1e-3)
    defaults |= dict(workers=0, eval_every=3, checkpoint_every=2, log_every=1, weight_decay=0.1)
    return TrainConfig(data=data, images=images, output=str(output), model=model, **defaults | settings)


def data_with_a_dragon(folder: Path) -> tuple[str, str]:
    """(data file, image folder): the sixteenth caption has the word, which is one token."""
    data, images = make_tiny_data(folder)
    entries = json.loads(Path(data).read_text())
    entries[15]["conversations"][1]["value"] += " It is a dragon."
    Path(data).write_text(json.dumps(entries))
    return data, images


def log(output):
    return [json.loads(line) for line in (Path(output) / "log.jsonl").read_text().splitlines()]


def without_clock(lines):
    return [{key: value for key, value in line.items() if key != "samples_per_second"} for line in lines]


def losses(output):
    return [line["loss"] for line in log(output) if "loss" in line]


def recalls(output):
    """The lines of the measurements on held-out pairs."""
    return [line for line in log(output) if "t2i_r1" in line]


def same_weights(one, other):
    one, other = (load_file(Path(f) / "last" / "open_clip_model.safetensors") for f in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def is_the_same_run(output, other):
    assert same_weights(output, other)
    assert without_clock(log(output)) == without_clock(log(other))


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
