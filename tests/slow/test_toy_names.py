"""A misspelt model is answered before any library that takes seconds is imported."""

import subprocess
import sys

import pytest

CODE = """
import sys
from debias_diffusion.app.cli import main
try:
    main(sys.argv[1:])
finally:
    assert not {"torch", "diffusers", "gradio"} & sys.modules.keys()
"""


@pytest.mark.parametrize(
    "command",
    [
        "generate star --base toy/sdlx",
        "generate star --base toy/sdxl --encoder toy/debias-clp",
        "app --encoders toy/debias-clp",
        "app --base toy/sdlx",
        "export --model toy/debias-clp --output never",
        "evaluate all --encoders toy/debias-clp --output never",
        "evaluate generation --encoders toy/clip --base toy/sdlx --data toy/test --output never",
    ],
)
def test_a_misspelt_toy_model(command):
    ended = subprocess.run([sys.executable, "-c", CODE, *command.split()], capture_output=True, text=True)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    wrong, right = ("toy/sdlx", "toy/sdxl") if "sdlx" in command else ("toy/debias-clp", "toy/debias-clip")
    assert f"error: Unknown toy model '{wrong}'. Did you mean {right}" in ended.stderr
