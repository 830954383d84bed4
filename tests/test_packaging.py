"""The wheel, in an environment of its own, outside the checkout, and the libraries that may be installed."""

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_oldest_libraries_that_are_tried_are_the_oldest_admitted():
    pins = dict(re.findall(r"^(\w+)==([\d.]+)", (ROOT / ".ci" / "lowest.txt").read_text(), re.MULTILINE))
    core = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[0]
    admitted = dict(re.findall(r'"(\w+)>=([\d.]+)"', core))
    for name in ("diffusers", "huggingface_hub", "transformers"):
        assert pins[name] in (admitted[name], f"{admitted[name]}.0")


@pytest.mark.slow
def test_a_wheel_installs_into_an_empty_environment_and_runs_there(tmp_path):
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"debias_diffusion", f"{wheel.name.split('-py3')[0]}.dist-info"}
    assert {"debias_diffusion/app/cli.py", "debias_diffusion/eval/text_image/retrieval.py"} <= set(names)
    assert {"debias_diffusion/pipelines/long_prompt.py"} <= set(names)

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"{wheel}[eval]"], check=True)

    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    program = tmp_path / "venv" / "bin" / "debias-diffusion"
    assert "evaluate" in run(program, "--help")
    assert "--check-data" in run(program, "train", "--help")
    modules = "debias_diffusion.app.cli as cli, debias_diffusion.eval.text_image.retrieval"
    where = run(python, "-c", f"import {modules}; print(cli.__file__)")
    assert str(tmp_path / "venv") in where

    toy = ("--base", "toy/sdxl", "--encoder", "toy/debias-clip", "--steps", "2", "--output", "toy.png")
    run(program, "generate", "The small object in the centre is a blue star.", *toy)
    assert (tmp_path / "toy.png").stat().st_size > 0
