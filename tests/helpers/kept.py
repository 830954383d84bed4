"""What this version leaves on a disk, kept for later ones: a run killed after four steps of six, a folder of images
killed after two of three, and an image.

    PYTHONPATH=tests python tests/helpers/kept.py

writes tests/data/kept-VERSION.zip. The models are of a few thousand weights, or toy/sdxl. A checkpoint is torch's file,
read with `weights_only`; nothing else in it could run code.
"""

import json
import os
import shutil
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import open_clip
import torch
from helpers.tiny_clip import everyday, without_weights
from helpers.tiny_data import make_tiny_data
from helpers.training_runs import config, killed_copy, without_clock

from debias_diffusion.app.generate import generate
from debias_diffusion.app.prompt_options import GenerateConfig
from debias_diffusion.training.config import TrainConfig
from debias_diffusion.training.two_tower import train

DATA = Path(__file__).resolve().parents[1] / "data"
SMALL = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 8, "layers": 1, "width": 8, "head_width": 4, "patch_size": 4},
    "text_cfg": {"context_length": 77, "vocab_size": 514, "width": 4, "heads": 2, "layers": 1},
}
PROMPTS = ["A red star.", "A (large:1.2) blue ring. " * 30, "Two green squares above a circle."]
PICTURE = {"negative_prompt": "grey", "seed": 5, "steps": 2, "guidance_scale": 4.0, "sharpen": 1.5, "karras": True}
PICTURE |= {"scheduler": "DPMSolverMultistepScheduler", "clip_skip": 3, "reading": "a1111", "emphasis": "no_norm"}
TOY = {"base": "toy/sdxl", "device": "cpu"}


def training() -> TrainConfig:
    settings = {"max_steps": 6, "checkpoint_every": 4, "batch": 4, "components": 1, "validation": 2}
    return config(("base", "data.json", "images"), "run", **settings)


def images() -> GenerateConfig:
    return GenerateConfig(None, prompts="prompts.txt", output="drawn", steps=1, **TOY)


def make() -> None:
    """In the working directory, so that no name of a folder of this machine is kept."""
    torch.manual_seed(0)
    without_weights(everyday(open_clip.CLIP(**deepcopy(SMALL))), SMALL).save(Path("base"))
    make_tiny_data(Path(), count=10)
    train(training())
    Path("expected.jsonl").write_text("\n".join(map(json.dumps, without_clock("run"))))
    killed_copy(Path("run").rename("whole"), Path("run"), 6)
    shutil.rmtree("whole")
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    drawn = generate(images())
    for path in (drawn / "index.jsonl", drawn / "contact-sheet.png", *drawn.glob("00002-*")):
        path.unlink()
    lines = (drawn / "items.jsonl").read_text().splitlines(keepends=True)
    (drawn / "items.jsonl").write_text("".join(line for line in lines if '"00002-' not in line))
    generate(GenerateConfig("a (red:1.3) ring", output="picture.png", **TOY, **PICTURE))


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        make()
        shutil.make_archive(str(DATA / f"kept-{version('debias-diffusion')}"), "zip", folder)
        os.chdir(DATA)
