"""A plain install: long prompts in a pipeline, loading, export of text encoders; other commands say what they lack."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.modules import ROOT

from debias_diffusion.errors import EXTRAS

TESTS = ROOT / "tests"


def run(code: str, folder: Path) -> str:
    """What the code prints in a process without the optional libraries, in `folder`."""
    code = f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n{code}"
    command = [sys.executable, TESTS / "helpers" / "without_extras.py"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("light")


@pytest.fixture(scope="module")
def printed(folder):
    return run(
        """
import contextlib, io, json
import diffusers, torch, transformers
from helpers import tiny_sdxl
from debias_diffusion import load_text_encoder
from debias_diffusion.app.cli import main
from debias_diffusion.errors import UserError
from debias_diffusion.pipelines import with_long_prompts
from debias_diffusion.tokens import clip_tokenizer

base = str(tiny_sdxl.build_tiny_sdxl("base", vocabulary=clip_tokenizer))
pipe = with_long_prompts(diffusers.DiffusionPipeline.from_pretrained(base))
pipe.set_progress_bar_config(disable=True)
LONG = "A red cat sleeps on a blue sofa, next to a window. " * 12
print("positions", pipe.encode_prompt(LONG)[0].shape[1])
print("side", pipe(LONG, num_inference_steps=1).images[0].width)

encoder, tokenizer = load_text_encoder(f"{base}/text_encoder")
print("loaded", type(encoder).__name__, tokenizer.model_max_length)

def command(*arguments):
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            main(list(arguments))
    except SystemExit as stopped:
        print("exit", arguments[:2], stopped.code, errors.getvalue().strip())

command("export", "--model", f"{base}/text_encoder", "--output", "folder")
command("export", "--model", f"{base}/text_encoder", "--output", "file.safetensors", "--to", "comfyui")
for place in ("folder", "file.safetensors"):
    again, _ = load_text_encoder(place)
    equal = all(map(torch.equal, again.state_dict().values(), encoder.state_dict().values()))
    print("again", place, type(again).__name__, equal)
command("generate", LONG, "--base", base, "--encoder", "folder", "--steps", "1", "--output", "a.png")
try:
    load_text_encoder("toy/clip")
except UserError as error:
    print("toy", error)
command("export", "--model", "toy/clip", "--output", "toy")
command("train", "--data=toy/train", "--model=toy/clip", "--output=run")
command("evaluate", "attention", "--encoders=toy/clip", "--prompt=a", "--output=scores")
command("app")
print("hidden", sorted({name.partition(".")[0] for name in sys.modules} & set(json.loads('LIBRARIES'))))
""".replace("LIBRARIES", str(list(EXTRAS)).replace("'", '"')),
        folder,
    )


def test_a_pipeline_reads_long_prompts(printed):
    assert "positions 227\n" in printed and re.search(r"side \d\d", printed)
    assert "hidden []\n" in printed


def test_text_encoders_are_loaded_exported_and_used(printed, folder):
    assert "loaded CLIPTextModel 77\n" in printed
    assert "again folder CLIPTextModel True\n" in printed and "again file.safetensors CLIPTextModel True\n" in printed
    assert (folder / "folder" / "README.md").is_file() and (folder / "a.png").stat().st_size > 0


def test_what_needs_an_extra_names_it(printed):
    install = ' is not installed: run `pip install "debias-diffusion[{}]"`.'
    assert f"toy The text encoder 'toy/clip' could not be loaded: open_clip{install.format('train')}" in printed
    stopped = [line for line in printed.splitlines() if line.startswith("exit")]
    assert [line.partition(") ")[0].removeprefix("exit (") for line in stopped] == [
        "'export', '--model'",
        "'train', '--data=toy/train'",
        "'evaluate', 'attention'",
        "'app',",
    ]
    for line, extra in zip(stopped, ("train", "train", "eval", "app"), strict=True):
        assert ") 2 error: " in line and line.endswith(install.format(extra))
