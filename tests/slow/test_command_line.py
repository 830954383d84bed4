"""The program in an interpreter of its own: as people start it, what it imports, where its output is closed, installed
from a wheel."""

import json
import os
import pickle
import subprocess
import sys
import venv
import zipfile

import pytest
from helpers.modules import ROOT
from helpers.small_papers import PAPERS
from torch.utils.data import DataLoader

from debias_diffusion.data import json_files
from debias_diffusion.data.sources import read_captions


def test_a_closed_pipe_ends_the_command_quietly(tmp_path):
    """As `debias-diffusion ... | head -1`: the command's output is closed after its first words."""
    script = tmp_path / "work.py"
    script.write_text(
        """
import sys, time
from dataclasses import dataclass
from pathlib import Path
from debias_diffusion.app import cli

@dataclass
class Settings:
    '''Settings.'''
    folder: str

def work(settings):
    print("Started", flush=True)
    while not Path(settings.folder, "closed").exists():
        time.sleep(0.01)
    for line in range(10_000):
        print(line)

sys.modules["debias_diffusion.work"] = sys.modules["__main__"]
cli.COMMANDS["work"] = cli.Command("work", "work:Settings", "work:work", "")
cli.main()
"""
    )
    reader, writer = os.pipe()
    command = [sys.executable, script, "work", tmp_path]
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert os.read(reader, 7) == b"Started"
    os.close(reader)
    (tmp_path / "closed").touch()
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 1 and errors == ""


@pytest.mark.parametrize("closing", ["2>&1 | head -1", ">&- 2>&-"])
def test_help_ends_quietly_when_nobody_reads(closing):
    command = f"{sys.executable} -m debias_diffusion.app.cli --help {closing}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stderr == "" and done.stdout in ("", "usage: debias-diffusion COMMAND [options]\n")


@pytest.mark.parametrize(
    "start",
    [
        ["debias_diffusion"],
        ["debias_diffusion.app.cli"],
        "accelerate.commands.launch --cpu --num_processes=1 --num_machines=1 --mixed_precision=no --dynamo_backend=no "
        "-m debias_diffusion".split(),
    ],
)
def test_python_m(start):
    command = [sys.executable, "-m", *start, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("debias-diffusion 0"), done.stderr


# ---- what is imported


def printed(code: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True, timeout=120
    ).stdout


def test_a_list_of_commands_imports_no_large_library():
    """Neither does any command's help, nor the list of tables: torch alone takes seconds."""
    listed = printed(
        """
import sys
from contextlib import suppress
from debias_diffusion.app.cli import COMMANDS, EVALUATIONS, main
main(["evaluate"])
assert "jsonargparse" not in sys.modules
for command in [*([name] for name in COMMANDS), *(["evaluate", name] for name in EVALUATIONS)]:
    with suppress(SystemExit):
        main([*command, "--help"])
large = {"torch", "numpy", "PIL", "transformers", "matplotlib", "scipy", "gradio"} & set(sys.modules)
assert not large, large
main(["reproduce", "--list", "--papers", sys.argv[1]])
assert not {"torch", "open_clip", "matplotlib"} & sys.modules.keys()
""",
        str(PAPERS),
    )
    assert "table-S4" in listed


def test_only_pages_import_matplotlib():
    modules = ("debias_diffusion.app.generate", "debias_diffusion.training.loop", "debias_diffusion.toymodels.build")
    assert printed(f"import sys, {', '.join(modules)}; print('matplotlib.figure' in sys.modules)") == "False\n"


def test_a_misspelt_toy_model_is_answered_before_any_library_that_takes_seconds():
    commands = [
        "generate star --base toy/sdlx",
        "generate star --base toy/sdxl --encoder toy/debias-clp",
        "app --encoders toy/debias-clp",
        "app --base toy/sdlx",
        "export --model toy/debias-clp --output never",
        "evaluate all --encoders toy/debias-clp --output never",
        "evaluate generation --encoders toy/clip --base toy/sdlx --data toy/test --output never",
    ]
    answers = printed(
        """
import sys
from debias_diffusion.app.cli import main
sys.stderr = sys.stdout
for command in sys.argv[1:]:
    try:
        main(command.split())
    except SystemExit as ended:
        assert ended.code == 2
    assert not {"torch", "diffusers", "gradio"} & sys.modules.keys()
""",
        *commands,
    ).splitlines()
    for command, answer in zip(commands, answers, strict=True):
        wrong, right = ("toy/sdlx", "toy/sdxl") if "sdlx" in command else ("toy/debias-clp", "toy/debias-clip")
        assert f"error: Unknown toy model '{wrong}'. Did you mean {right}" in answer


def test_a_worker_that_is_not_forked_maps_the_data_file(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "_IN_MEMORY", -1)
    lines = [{"image": f"{number}.jpg", "caption": f"Number {number}. " + "x " * 500} for number in range(300)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    records = read_captions(tmp_path / "d.jsonl").records
    assert len(pickle.dumps(records)) < 50 * len(records)
    assert list(DataLoader(records, None, num_workers=1, multiprocessing_context="spawn")) == list(records)


# ---- a wheel


def test_a_wheel_installs_into_an_empty_environment_and_runs_there(tmp_path):
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"debias_diffusion", f"{wheel.name.split('-py3')[0]}.dist-info"}
    templates = [path for room in ("app", "eval") for path in (ROOT / room).rglob("*.j2")]
    files = [ROOT / "app" / "cli.py", ROOT / "eval" / "retrieval.py", ROOT / "pipelines" / "long_prompt.py", *templates]
    assert len(templates) > 3 and {f"debias_diffusion/{file.relative_to(ROOT)}" for file in files} <= set(names)

    venv.create(tmp_path / "venv", with_pip=True)
    python, program = (tmp_path / "venv" / "bin" / name for name in ("python", "debias-diffusion"))
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"{wheel}[eval]"], check=True)

    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "evaluate" in run(program, "--help") and "--check-data" in run(program, "train", "--help")
    modules = "debias_diffusion.app.cli as cli, debias_diffusion.eval.retrieval"
    assert str(tmp_path / "venv") in run(python, "-c", f"import {modules}; print(cli.__file__)")
    toy = ("--base", "toy/sdxl", "--encoder", "toy/debias-clip", "--steps", "2", "--output", "toy.png")
    run(program, "generate", "The small object in the centre is a blue star.", *toy)
    assert (tmp_path / "toy.png").stat().st_size > 0
