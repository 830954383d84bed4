"""The wheel: what it holds, and that it runs in an environment of its own, outside the checkout."""

import subprocess
import sys
import venv
import zipfile

from helpers.modules import ROOT


def test_a_wheel_installs_into_an_empty_environment_and_runs_there(tmp_path):
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"debias_diffusion", f"{wheel.name.split('-py3')[0]}.dist-info"}
    assert {"debias_diffusion/app/cli.py", "debias_diffusion/eval/retrieval.py"} <= set(names)
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
    modules = "debias_diffusion.app.cli as cli, debias_diffusion.eval.retrieval"
    where = run(python, "-c", f"import {modules}; print(cli.__file__)")
    assert str(tmp_path / "venv") in where

    toy = ("--base", "toy/sdxl", "--encoder", "toy/debias-clip", "--steps", "2", "--output", "toy.png")
    run(program, "generate", "The small object in the centre is a blue star.", *toy)
    assert (tmp_path / "toy.png").stat().st_size > 0


def test_the_wheel_holds_the_templates(tmp_path):
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    templates = {f"debias_diffusion/eval/{file.name}" for file in (ROOT / "eval").glob("*.j2")}
    assert templates and templates <= set(zipfile.ZipFile(wheel).namelist())
