"""benchmarks/harness.py, and the studies that are settings of `reproduce`."""

import importlib
import json
from pathlib import Path

import pytest

from debias_diffusion.app.options import ReproduceConfig
from debias_diffusion.app.reproduce.listing import reproduce
from debias_diffusion.app.reproduce.papers import Claims, find_papers, read_tables, read_yaml
from debias_diffusion.eval.report import Table

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "configs" / "studies"


@pytest.fixture(scope="module")
def harness():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("harness")


def test_options_have_the_types_of_their_defaults(harness, monkeypatch):
    words = "x --short-prompts 3 --rates 1 2 --seeds 7 --precision bf16 --more --peer a --output b"
    monkeypatch.setattr("sys.argv", words.split())
    defaults = dict(rates=[0.5], seeds=[], precision=("fp32", "bf16"), more=False, peer=None, output=Path("runs"))
    options = vars(harness.read_options("", short_prompts=1, **defaults))
    assert options.pop("output") == Path("b") and options.pop("rates") == [1.0, 2.0]
    assert options == {"short_prompts": 3, "seeds": [7], "precision": "bf16", "more": True, "peer": "a"}
    monkeypatch.setattr("sys.argv", ["x"])
    assert vars(harness.read_options("", **defaults)) == defaults | {"precision": "fp32"}


def test_variants_take_turns_and_the_first_round_does_not_count(harness):
    order = []
    measured = harness.by_turns(lambda number: {"a": number, "b": -number}, 2, lambda run: order.append(run) or run)
    assert order == [0, 0, 1, -1, 2, -2] and measured == {"a": [1, 2], "b": [-1, -2]}


def test_results_are_printed_and_written_beside_the_machine(harness, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    harness.publish("small", {"rows": [1]}, "A title", Table(["x", "y"], [["z", 1.0]]))
    written = json.loads((tmp_path / "results" / "small.json").read_text())
    assert list(written) == ["machine", "versions", "rows"] and written["rows"] == [1]
    text = (tmp_path / "results" / "small.md").read_text()
    assert text == "A title\n\n| x | y |\n| --- | --: |\n| z | 1.00 |\n" and text in capsys.readouterr().out


def test_results_that_claims_read_are_here():
    """That each number is in them: test_reproduce."""
    groups = read_yaml(find_papers("configs/papers") / "claims.yaml", Claims).claims.values()
    files = {part.file for group in groups for claim in group for part in claim.recorded}
    assert len(files) > 4 and all((ROOT / file).is_file() for file in files)


def test_every_study_has_settings_that_can_be_used(tmp_path, capsys):
    settings = dict(world="toy", papers=str(STUDIES), output=str(tmp_path / "new"), plan=True)
    reproduce(ReproduceConfig([*read_tables(STUDIES)], **settings))
    assert "to do: 6 trainings, 21 other pieces" in capsys.readouterr().out
