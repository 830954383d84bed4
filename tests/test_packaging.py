"""The libraries that may be installed."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_oldest_libraries_that_are_tried_are_the_oldest_admitted():
    pins = dict(re.findall(r"^(\w+)==([\d.]+)", (ROOT / ".ci" / "lowest.txt").read_text(), re.MULTILINE))
    core = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[0]
    admitted = dict(re.findall(r'"(\w+)>=([\d.]+)"', core))
    for name in ("diffusers", "huggingface_hub", "transformers"):
        assert pins[name] in (admitted[name], f"{admitted[name]}.0")
