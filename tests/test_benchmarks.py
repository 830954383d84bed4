"""benchmarks/: what all share."""

import importlib
from pathlib import Path

from helpers.modules import ROOT


def test_options_have_the_types_of_their_defaults(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    harness = importlib.import_module("harness")
    words = "x --short-prompts 3 --rates 1 2 --seeds 7 --precision bf16 --more --peer a --output b"
    monkeypatch.setattr("sys.argv", words.split())
    defaults = dict(rates=[0.5], seeds=[], precision=("fp32", "bf16"), more=False, peer=None, output=Path("runs"))
    options = vars(harness.read_options("", short_prompts=1, **defaults))
    assert options.pop("output") == Path("b") and options.pop("rates") == [1.0, 2.0]
    assert options == {"short_prompts": 3, "seeds": [7], "precision": "bf16", "more": True, "peer": "a"}
