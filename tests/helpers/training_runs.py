"""The smallest training runs, what they leave, and runs in processes of their own."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from helpers.processes import as_options, start
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
    return [{key: value for key, value in line.items() if key != "samples_per_second"} for line in log(output)]


def losses(output):
    return [line["loss"] for line in log(output) if "loss" in line]


def recalls(output):
    """The lines of the measurements on held-out pairs."""
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
    return load_file(Path(run) / name / "open_clip_model.safetensors")


def _train(settings: TrainConfig) -> list[str]:
    options = {name: value for name, value in vars(settings).items() if name != "betas"}
    return ["-m", "debias_diffusion.app.cli", "train", *as_options(options)]


def run_in_a_process(settings: TrainConfig, **environment: str) -> subprocess.Popen:
    return start([sys.executable, *_train(settings)], **environment)


def wait_for_step(output, step, process, patience=120):
    started = time.monotonic()
    file = Path(output) / "log.jsonl"
    while time.monotonic() - started < patience and process.poll() is None:
        if file.exists() and f'{{"step": {step},' in file.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached: {process.communicate()[0][-2000:]}")


def command_of_two_processes(settings: TrainConfig) -> list[str]:
    # accelerate's own launcher starts several processes on GPUs only; underneath it is this one.
    launch = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    return [sys.executable, *launch, *_train(settings)]


def run_in_two_processes(settings: TrainConfig) -> str:
    process = start(command_of_two_processes(settings))
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and "2 x cpu" in printed, printed[-3000:]
    return printed
