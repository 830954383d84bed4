"""The quickstart: after a change of its settings."""

import json
from pathlib import Path

import pytest
from helpers.untrained_toys import save_untrained_toys

from debias_diffusion.app.quickstart import QuickstartConfig, quickstart
from debias_diffusion.models.backbone import Backbone
from debias_diffusion.toymodels.fine_tuning import RECIPES

pytestmark = pytest.mark.usefixtures("coarse_results")
TINY = {"scenes": 3, "prompts": 4, "trained_on": 16, "steps": 2, "batch": 8, "drawing_steps": 1, "split": "development"}
COMMANDS = ["data-training", *(f"{work}-{recipe}" for work in ("train", "export") for recipe in RECIPES)]
COMMANDS += ["retrieval", "robustness", "attention", "generation", "short-prompts"]


def made(output: Path) -> dict[str, int]:
    """When each file was written that takes work: data, checkpoints and generated images."""
    files = [
        output / "data" / "data.json",
        *output.glob("training/*/checkpoints/*"),
        *output.glob("evaluation/**/*.png"),
    ]
    drawn = [file for file in files if "pictures" in file.parts or file.suffix != ".png"]
    return {file.relative_to(output).as_posix(): file.stat().st_mtime_ns for file in drawn}


def report_of(output: Path) -> dict:
    return json.loads((output / "report.json").read_text())


def test_a_change_redoes_what_depends_on_it_and_nothing_else(tmp_path, monkeypatch, capsys):
    output, models = tmp_path / "output", save_untrained_toys(tmp_path / "models")
    quickstart(QuickstartConfig(**TINY, output=str(output)), models)
    before, report = made(output), report_of(output)
    assert len(before) > 10
    for name in ("encode_image", "encode_text"):
        monkeypatch.setattr(Backbone, name, lambda *_, **__: pytest.fail("encoded again"))
    quickstart(QuickstartConfig(**TINY | {"drawing_steps": 2}, output=str(output)), models)
    after, changed = made(output), report_of(output)
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {name for name in before if "pictures" in name}
    assert changed["settings"]["drawing_steps"] == 2 and changed["generation"] != report["generation"]
    for name in ("retrieval", "digests"):
        assert changed[name] == report[name]
    for name in COMMANDS[:-2]:  # the time of the run that did the work
        assert changed["seconds"][name] == report["seconds"][name]
    out = capsys.readouterr().out
    assert "made anew: evaluation/pictures, evaluation/short-prompts/pictures\n" in out
    assert out.endswith(f"Report: {output / 'report.html'}\n")
