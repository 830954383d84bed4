"""The program in an interpreter of its own: as people start it, what it imports, where its output is closed, installed
from a wheel."""

import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import httpx
import pytest
from gradio_client import Client
from helpers.demo_clients import wait_until
from helpers.modules import ROOT
from packaging.requirements import Requirement
from PIL import Image

from conformance.check import FILES, HERE

SPACE = ROOT / "app" / "space"
CLI = [sys.executable, "-m", "debias_diffusion.app.cli"]
RESEARCH = [sys.executable, "-m", "research"]


@pytest.mark.parametrize("command", [[*CLI, "--help"], [*RESEARCH, "reproduce", "--list"]])
def test_a_command_ends_quietly_when_nobody_reads(command):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writer)
    assert done.returncode == 1 and done.stderr == ""


IMPORTS = """
import sys
from contextlib import suppress
from debias_diffusion.app.cli import COMMANDS, evaluations, main
from research.__main__ import COMMANDS as RESEARCH
main(["evaluate"])
assert "jsonargparse" not in sys.modules
for command in [*([name] for name in COMMANDS), *(["evaluate", name] for name in evaluations())]:
    with suppress(SystemExit):
        main([*command, "--help"])
for command in RESEARCH:
    with suppress(SystemExit):
        main([command, "--help"], commands=RESEARCH)
for missing in ["tokens", "a", "--base=/no"], ["app", "--base=/no"], ["generate", "--base=toy/sdxl", "--prompts=/no"]:
    with suppress(SystemExit):
        main(missing)
large = {"torch", "numpy", "PIL", "transformers", "matplotlib", "scipy", "gradio"} & set(sys.modules)
assert not large, large
main(["reproduce", "--list"], commands=RESEARCH)
assert not {"torch", "open_clip"} & sys.modules.keys()
main(["tokens", "a", "--base=toy/sdxl"])
assert not {"diffusers", "transformers.modeling_utils", "torch._dynamo", "open_clip"} & sys.modules.keys()
import debias_diffusion.app.generate, debias_diffusion.training.loop, research.toymodels.build
assert "matplotlib.figure" not in sys.modules
"""


def test_help_and_lists_import_no_large_library_and_only_pages_import_matplotlib():
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, check=True, capture_output=True, text=True)
    assert "table-S4" in done.stdout


def test_the_conformance_checker_needs_no_library_and_the_second_reader_passes():
    command = ["-IS", HERE / "check.py", "--", sys.executable, ROOT / "tests" / "helpers" / "second_reader.py"]
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(FILES), done.stdout


# ---- a wheel


def link_requirements(site: Path, needed: str) -> None:
    """Puts links to the distributions of this environment that `needed` requires, and to no others, beside a wheel."""
    wanted, linked = [Requirement(needed)], set()
    while wanted:
        requirement = wanted.pop()
        found = next(iter(distributions(name=requirement.name, path=[str(site), *sys.path])))  # the wheel itself first
        assert found.version in requirement.specifier, f"{requirement}: {found.version} is installed"
        if str(requirement) in linked:
            continue
        linked.add(str(requirement))
        for line in map(Requirement, found.requires or []):
            if not line.marker or any(line.marker.evaluate({"extra": extra}) for extra in requirement.extras or [""]):
                wanted.append(line)
        for name in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(found.locate_file(name))


def test_a_wheel_runs_with_what_it_requires_and_nothing_else(tmp_path):
    """The wheel is built from the source distribution, so that holds all it needs; no stale build folder gets in."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *tmp_path.glob("debias*")], check=True)
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"debias_diffusion", f"{wheel.name.split('-py3')[0]}.dist-info"}
    assert sum(name.endswith(("LICENSE", "NOTICE")) for name in names) == 2
    for room in ("debias_diffusion", "app", "eval", "pipelines"):  # no folder was forgotten
        for path in (path for kind in ("py", "j2") for path in (ROOT / room).rglob(f"*.{kind}")):
            place = path.relative_to(ROOT / "debias_diffusion" if room == "debias_diffusion" else ROOT)
            assert f"debias_diffusion/{place}" in names or SPACE in path.parents, path

    venv.create(tmp_path / "venv")
    python, program = (tmp_path / "venv" / "bin" / name for name in ("python", "debias-diffusion"))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    [needed] = (line for line in (SPACE / "requirements.txt").read_text().splitlines() if not line.startswith("#"))
    assert needed.startswith("debias-diffusion[app]>=")
    [site] = (tmp_path / "venv").glob("lib/*/site-packages")
    link_requirements(site, needed)

    def run(*command):
        return subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True).stdout

    assert "evaluate" in run(program, "--help") and "--check-data" in run(program, "train", "--help")
    modules = "debias_diffusion.app.cli as cli, debias_diffusion.eval.retrieval"
    assert str(tmp_path / "venv") in run(python, "-c", f"import {modules}; print(cli.__file__)")
    toy = ("--base", "toy/sdxl", "--encoder", "toy/debias-clip", "--steps", "2", "--output", "toy.png")
    run(program, "generate", "The small object in the centre is a blue star.", *toy)
    assert (tmp_path / "toy.png").stat().st_size > 0
    run(program, "comfyui", "--output", "node")
    assert (tmp_path / "node" / "LICENSE").is_file() and any((tmp_path / "node" / "example_workflows").iterdir())

    # What a Space runs, with what it installs.
    with subprocess.Popen([python, SPACE / "app.py"], cwd=tmp_path) as space:
        try:
            wait_until(lambda: space.poll() is not None or answers("http://127.0.0.1:7860"), 120)
            assert space.poll() is None  # it is the one that answers
            client = Client("http://127.0.0.1:7860", verbose=False, download_files=tmp_path)
            shown = client.predict("The small object in the centre is a blue star.", steps=2, api_name="/generate")
            assert shown and all(Image.open(image["image"]).size == (48, 48) for image in shown)
        finally:
            space.kill()


def answers(url):
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False
