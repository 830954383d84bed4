"""The studies on the shipped models, with few prompts: edits of hidden states, and settings of `reproduce`."""

import importlib
from pathlib import Path

import pytest
import yaml
from helpers.small_papers import STUDIES

from debias_diffusion.app.options import ReproduceConfig
from debias_diffusion.app.reproduce.listing import reproduce
from debias_diffusion.files import read_json_object


@pytest.fixture
def states(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    module = importlib.import_module("studies.states")
    monkeypatch.setattr(module, "STEPS", 1)
    return module


def test_rows_are_drawn_once_scored_and_compared(states, tmp_path):
    images, encoders = states.Images("development", 2, tmp_path), {"Long-CLIP": "toy/long-clip"}
    encoders |= {"DeBias-CLIP": "toy/debias-clip"}
    rows = states.draw_rows(images, encoders, fitted_on=20)
    assert len(rows) == len(set(rows)) == 3 + 2 * (len(states.CHANGES) + 1)
    written = {file: file.stat().st_mtime_ns for row in rows for file in images.files(row)}
    assert len(written) == 2 * len(rows)
    before = {row: [file.read_bytes() for file in images.files(row)] for row in rows}
    assert before["Long-CLIP: less one shift"] != before["Long-CLIP: as they are"] != before[states.ORIGINAL]
    gone = images.files("DeBias-CLIP: less one shift")[1]
    gone.unlink()
    states.draw_rows(images, encoders, fitted_on=20)
    assert gone.read_bytes() == before["DeBias-CLIP: less one shift"][1]
    assert all(file.stat().st_mtime_ns == time for file, time in written.items() if file != gone)

    scored = images.score(rows)
    debias = scored["DeBias-CLIP: less one shift"]
    for other, name in (("original", states.ORIGINAL), ("Long-CLIP", "Long-CLIP: less one shift")):
        difference = debias["scores"]["fid_own"]["value"] - scored[name]["scores"]["fid_own"]["value"]
        assert debias[f"minus {other}"]["fid_own"]["difference"] == pytest.approx(difference)
    assert "minus original" not in scored[states.ORIGINAL]
    parts = states.tables({"seed-1": scored, "seed-2": scored})
    shown = "\n".join(part if isinstance(part, str) else part.markdown() for part in parts)
    value = debias["scores"]["dino_score"]["value"]
    assert f"{value:.3f}, {value:.3f}" in shown
    assert shown.count("\n| Long-CLIP: less a linear map |") == 5  # one of scores, and two seeds compared twice


def test_a_study_trains_aligns_and_draws(tmp_path):
    """The trained and aligned encoder differs from the trained one, and readings from each other."""
    world = yaml.safe_load((STUDIES / "world-toy-test.yaml").read_text())
    world |= {"pairs": 16, "steps_per_epoch": 1}
    world["training"] |= {"batch": 8, "components": 2, "epochs": 1}
    few = {"batch": 8, "max_steps": 1, "epochs": 1, "warmup": 0, "eval_every": 1, "precision": "fp32"}
    world["alignment"] |= few
    world["evaluations"]["long"] |= {"limit": 2, "steps": 1}
    (tmp_path / "world-toy-test.yaml").write_text(yaml.safe_dump(world))
    (tmp_path / "toy-world-long.yaml").write_text((STUDIES / "toy-world-long.yaml").read_text())
    settings = {"world": "toy-test", "papers": str(tmp_path), "output": str(tmp_path / "output"), "device": "cpu"}
    reproduce(ReproduceConfig(["toy-world-long"], seeds=[7], **settings))
    rows = read_json_object(tmp_path / "output" / "toy-test" / "toy-world-long.json")["rows"]
    second = "debias-clip-sdxl, the second in overlapping chunks"
    different = ["clip", "clip in chunks", "clip in overlapping chunks", "long-clip", "debias-clip"]
    different += [second, "clip in overlapping chunks, aligned", f"{second}, aligned"]
    assert len(rows) == 11 and len({rows[name]["FID"]["ours"] for name in different}) == len(different)
