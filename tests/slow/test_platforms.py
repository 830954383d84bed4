"""What other systems lack or do otherwise, as far as it can be simulated on Linux."""

import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace

from helpers.modules import ROOT
from helpers.training_runs import config, is_the_same_run

from debias_diffusion.data import workers
from debias_diffusion.training.two_tower import train


def test_spawned_workers_read_what_forked_ones_read(world, finished_run, tmp_path, monkeypatch):
    """As on macOS, where processes that read data are started anew and given all they need as pickles."""
    monkeypatch.setattr(workers, "sys", SimpleNamespace(platform="darwin"))
    context, spawning = multiprocessing.context._default_context, multiprocessing.get_context("spawn")
    monkeypatch.setattr(context, "_actual_context", spawning)
    for name in ("fork", "sched_getaffinity"):
        monkeypatch.delattr(os, name)
    assert workers.usable_cores(tmp_path) == os.cpu_count()
    train(config(world, tmp_path, workers=1))
    is_the_same_run(tmp_path, finished_run)


AS_ON_WINDOWS = """
import multiprocessing, os, signal, sys
from types import SimpleNamespace
import accelerate, filelock, jsonargparse, multiprocessing.popen_spawn_posix, open_clip, psutil, uuid  # not ours: first
from diffusers import StableDiffusionXLPipeline

multiprocessing.set_start_method("spawn")
gone = ("O_NONBLOCK", "O_NOCTTY", "fork", "pread", "sched_getaffinity")
windows = SimpleNamespace(**{name: value for name, value in vars(os).items() if name not in gone})

signals = SimpleNamespace(**{name: getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIG_IGN", "signal")})
sys.modules |= {"os": windows, "signal": signals}
sys.modules |= dict.fromkeys(("fcntl", "resource", "pwd", "termios"))  # importing them fails
from debias_diffusion import files
from debias_diffusion.app import cli
from debias_diffusion.data import json_files, workers
from debias_diffusion.pipelines import with_long_prompts

files.sys = workers.sys = SimpleNamespace(platform="win32")
json_files._IN_MEMORY = -1  # a small file stays on the disk, too
sdxl, model, data, images, output = sys.argv[1:]
pipe = StableDiffusionXLPipeline.from_pretrained(sdxl, add_watermarker=False)
image = with_long_prompts(pipe)("A red cat. " * 60, num_inference_steps=1).images[0]
cli.main(f"shards --data {data} --images {images} --output {output}/shards --workers 0".split())
train = f"train --model {model} --data {output}/shards --output {output} --batch 8 --components 3"
cli.main(f"{train} --max-steps 2 --validation 2 --workers 1".split())
cli.main(["generate", "A red cat.", "--base", sdxl, "--output", f"{output}/cat.png"])
print(image.size)
"""


def test_without_what_windows_lacks_commands_work_and_pipelines_read_long_prompts(sdxl_folder, world, tmp_path):
    command = [sys.executable, "-c", AS_ON_WINDOWS, sdxl_folder, *world, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("\n(64, 64)\n"), done.stdout + done.stderr
    assert (tmp_path / "last").is_dir() and (tmp_path / "cat.png").is_file()
