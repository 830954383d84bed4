"""The program in an interpreter of its own: as people start it, what it imports, and where its output is closed."""

import json
import os
import pickle
import subprocess
import sys

import pytest
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


@pytest.mark.parametrize("closing", ["2>&1 | head -1", ">&- 2>&-", "| true"])
def test_help_ends_quietly_when_nobody_reads(closing):
    command = f"{sys.executable} -m debias_diffusion.app.cli --help {closing}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stderr == "" and done.stdout in ("", "usage: debias-diffusion COMMAND [options]\n")


def test_a_list_of_commands_imports_no_large_library():
    """Neither does any command's help: torch alone takes seconds."""
    code = """
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
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=120)


@pytest.mark.parametrize("module", ["debias_diffusion", "debias_diffusion.app.cli"])
def test_python_m(module):
    command = [sys.executable, "-m", module, "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("debias-diffusion 0")


def test_accelerate_launch_m():
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1"]
    launch += ["--mixed_precision=no", "--dynamo_backend=no", "-m", "debias_diffusion", "--version"]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("debias-diffusion "), done.stderr


def test_only_pages_import_matplotlib():
    code = (
        "import atexit, runpy, sys; import debias_diffusion.app.generate, debias_diffusion.training.loop; "
        "atexit.register(lambda: print('matplotlib.figure' in sys.modules)); sys.argv = ['build', '--help']; "
        "runpy.run_module('debias_diffusion.toymodels.build', run_name='__main__')"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "--weights" in printed and printed.endswith("\nFalse\n")


def test_a_worker_that_is_not_forked_maps_the_data_file(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "_IN_MEMORY", -1)
    lines = [{"image": f"{number}.jpg", "caption": f"Number {number}. " + "x " * 500} for number in range(300)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    records = read_captions(tmp_path / "d.jsonl").records
    assert len(pickle.dumps(records)) < 50 * len(records)
    assert list(DataLoader(records, None, num_workers=1, multiprocessing_context="spawn")) == list(records)


def test_the_list_of_reproduce_needs_no_large_library():
    code = (
        "import sys; from debias_diffusion.app.cli import main\n"
        "main(['reproduce', '--list', '--papers', sys.argv[1]])\n"
        "assert not {'torch', 'open_clip', 'matplotlib'} & sys.modules.keys()"
    )
    listed = subprocess.run([sys.executable, "-c", code, PAPERS], check=True, capture_output=True, text=True).stdout
    assert "table-S4" in listed
