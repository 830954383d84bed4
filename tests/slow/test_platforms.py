"""What other systems lack or do otherwise, as far as it can be simulated on Linux."""

import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers.modules import ROOT
from helpers.training_runs import config, is_the_same_run

from debias_diffusion.data import workers
from debias_diffusion.training.loop import train


@pytest.fixture
def as_on_macos(monkeypatch):
    """Processes that read data are not forked: they are started anew and given all they need as pickles."""
    monkeypatch.setattr(workers, "sys", SimpleNamespace(platform="darwin"))
    for name in ("fork", "sched_getaffinity"):
        monkeypatch.delattr(os, name)
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def test_spawned_workers_read_what_forked_ones_read(world, finished_run, tmp_path, as_on_macos):
    assert workers.usable_cores(tmp_path) == os.cpu_count()
    train(config(world, tmp_path, workers=1))
    is_the_same_run(tmp_path, finished_run)


AS_ON_WINDOWS = """
import os, signal, sys
import psutil  # the libraries come first: their branches are not ours
from diffusers import StableDiffusionXLPipeline

for name in ("O_NONBLOCK", "O_NOCTTY", "pread", "fork", "sched_getaffinity", "getuid", "geteuid"):
    delattr(os, name)
del signal.pthread_sigmask, signal.SIGKILL
sys.modules |= dict.fromkeys(("fcntl", "resource", "pwd", "termios"))  # importing them fails
from debias_diffusion.app import cli
from debias_diffusion.pipelines import with_long_prompts

pipe = StableDiffusionXLPipeline.from_pretrained(sys.argv[1], add_watermarker=False)
image = with_long_prompts(pipe)("A red cat. " * 60, num_inference_steps=1).images[0]
print(image.size)
"""


def test_without_what_unix_alone_has_pipelines_read_long_prompts(sdxl_folder):
    command = [sys.executable, "-c", AS_ON_WINDOWS, sdxl_folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "(64, 64)\n", done.stderr
