"""The toy models that come with the package have the scores that are said of them."""

import json
import subprocess
import sys
import time

from diffusers import StableDiffusionXLPipeline

from debias_diffusion.app.fine_tuning import RECIPES
from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.toyworld.shipped import shipped
from research.toymodels.scores import score_clip, score_sdxl


def test_stock_diffusers_draws_what_short_prompts_name():
    pipe = StableDiffusionXLPipeline.from_pretrained(shipped("toy/sdxl"), add_watermarker=False)
    assert score_sdxl(pipe, "test", 40)[0]["objects"] > 0.9


def test_the_base_clip_is_shortsighted_and_the_shipped_two_towers_show_the_cure():
    """As in the scores that come with the weights, with fewer scenes, and so with higher numbers."""
    recall = {}
    for name in ("clip", *RECIPES):
        scores = score_clip(load_two_tower(f"toy/{name}"), "test", 400)
        recall[name] = {edit: score["t2i_r1"] for edit, score in scores.items()}
    assert recall["clip"]["keep"] > 30 and all(recall[recipe]["keep"] > 60 for recipe in RECIPES)
    kept = {name: {edit: of[edit] / of["keep"] for edit in ("move4", "remove")} for name, of in recall.items()}
    assert kept["clip"]["move4"] < 0.75 and kept["clip"]["remove"] < 0.5
    for edit in ("move4", "remove"):
        loss = {recipe: recall[recipe]["keep"] - recall[recipe][edit] for recipe in RECIPES}
        assert loss["debias-clip"] < 0.75 * loss["long-clip"]


QUICKSTART = """
import sys
from functools import partial
from debias_diffusion.app import cli, quickstart

quickstart.Setup = partial(quickstart.Setup, pairs=2000, training={"steps": 75, "batch": 64}, denoising_steps=5)
cli.main(["quickstart", "--prompts=4", "--scenes=300", f"--output={sys.argv[1]}"])
"""


def test_what_the_quickstart_trains_is_less_shortsighted_although_it_was_killed(tmp_path):
    """The command with a quarter of the training, killed among images."""
    output, command = tmp_path / "quickstart", [sys.executable, "-c", QUICKSTART, tmp_path / "quickstart"]
    with subprocess.Popen(command) as process:
        while not list(output.glob("evaluation/images/*/*.png")):
            assert process.poll() is None, "it ended before there was an image"
            time.sleep(0.05)
        process.kill()
    subprocess.run(command, check=True)
    assert (output / "report.html").read_text().count("<img") > 5
    encoders = json.loads((output / "evaluation" / "robustness.json").read_text())["encoders"]
    base, trained = (
        {edit: recall["text_to_image"] for edit, recall in encoders[label]["recall_at_1_percent"].items()}
        for label in ("toy/clip", "debias-clip-sdxl")
    )
    assert trained["keep"] > base["keep"]
    for edit in ("move4", "remove"):
        assert 1 - trained[edit] / trained["keep"] < 0.8 * (1 - base[edit] / base["keep"])
