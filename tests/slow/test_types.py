"""What a type checker says of code that uses the package."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.modules import ROOT

CODE = """
from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import StableDiffusionXLPipeline
from debias_diffusion import load_text_encoder, split_sentences
from debias_diffusion.pipelines import LongPromptOptions, SDXLLongPromptMixin, sharpened, with_long_prompts


def use(stock: StableDiffusionXLPipeline) -> StableDiffusionXLPipeline:
    encoder, tokenizer = load_text_encoder("folder")
    positions: int = encoder.config.max_position_embeddings
    sentences: list[str] = split_sentences("One. Two.")
    LongPromptOptions(reading="a1111", sharpen=1.5)
    SDXLLongPromptMixin().set_long_prompt(reading="a1111", sharpen=1.5)
    with sharpened(stock.unet, 1.5):
        return with_long_prompts(stock)
"""
WRONG = {
    "split_sentences(3)": "Expected `str`",
    'LongPromptOptions(reading="a111")': 'Expected `Literal["overlap"',
    'SDXLLongPromptMixin().set_long_prompt(reading="a111")': 'Expected `Literal["overlap"',
    "SDXLLongPromptMixin().set_long_prompt(sharpness=1.5)": "`sharpness` does not match",
    'sharpened("unet", 1.5)': "Expected `Module`",
    'load_text_encoder("folder").eval()': "no attribute `eval`",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package as it lies when it is installed."""
    folder = tmp_path_factory.mktemp("installed")
    for room in ("debias_diffusion", "pipelines", "eval", "app"):
        place = folder / "debias_diffusion" / ("" if room == "debias_diffusion" else room)
        shutil.copytree(ROOT / room, place, ignore=shutil.ignore_patterns("weights", "__pycache__"), dirs_exist_ok=True)
    return folder


def check(folder, code):
    (folder / "code.py").write_text(code)
    program = [Path(sys.executable).with_name("ty"), "check", "--project", folder, "--python", sys.prefix]
    return subprocess.run([*program, folder / "code.py"], capture_output=True, text=True)


def test_right_calls_pass_and_wrong_ones_do_not(installed):
    done = check(installed, CODE)
    assert done.returncode == 0, done.stdout
    for call, problem in WRONG.items():
        done = check(installed, f"{CODE}\n{call}\n")
        assert done.returncode == 1 and problem in done.stdout, (call, done.stdout)
