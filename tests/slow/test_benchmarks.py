"""The benchmarks of the toy world end to end, with the smallest of settings."""

import importlib
import json
from pathlib import Path

import pytest
from helpers.untrained_toys import save_untrained_toys

from debias_diffusion.app.quickstart import QuickstartConfig, quickstart
from debias_diffusion.toymodels.fine_tuning import RECIPES

pytestmark = pytest.mark.usefixtures("coarse_results")
ENCODERS = ("clip", *RECIPES)
ROWS = ("clip", "clip in overlapping chunks", *RECIPES)  # of images
TINY = {"scenes": 3, "prompts": 4, "split": "development", "train": "all"}


def markdown(parts: list) -> str:
    return "\n".join(part if isinstance(part, str) else part.markdown() for part in parts)


@pytest.fixture
def benchmark(request, monkeypatch):
    """The module of this name."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module(request.param)


@pytest.mark.parametrize("benchmark", ["toy_world"], indirect=True)
def test_several_seeds_stand_in_one_table(benchmark, tmp_path, monkeypatch):
    """Beside the quickstart's own images, those of further encoders, and of captions that refer back."""
    models, finished = save_untrained_toys(tmp_path / "models"), tmp_path / "quickstart"
    kinds = {kind: data for kind, data in benchmark.DATA.items() if kind.startswith("long")}
    monkeypatch.setattr(benchmark, "DATA", kinds)  # short prompts go the same way
    monkeypatch.setattr(benchmark, "PRECISION", "fp32")  # faster than bf16 on most CPUs
    config = QuickstartConfig(**TINY, output=str(finished))
    quickstart(config, models)
    trained = [*finished.glob("training/*/checkpoint-*"), *finished.glob("evaluation/**/images/**/*.png")]
    before = {file: file.stat().st_mtime_ns for file in trained}
    assert len(before) > 10
    result = benchmark.run_seed(config, {"plain UNet": models.sdxl}, models, steps=2)
    assert {file: file.stat().st_mtime_ns for file in trained} == before
    aligned = {f"{row}, plain-UNet" for row in (benchmark.ALIGNED, benchmark.ALIGNED_BOTH)}
    assert result["retrieval"].keys() == {*ENCODERS, benchmark.LIGHT} | aligned
    assert list(result["drawn"]) == [f"plain UNet, {kind}" for kind in kinds]
    own = json.loads((finished / "evaluation" / "generation.json").read_text())
    first, referring = result["drawn"].values()
    assert len(first["encoders"]) == 11 and first["encoders"].keys() > set(ROWS) and not first["ceilings"]
    # Those of the trained encoders have a second encoder that reads in other chunks.
    for row, entry in list(zip(ROWS, own["encoders"].values(), strict=True))[:2]:
        scores = first["encoders"][row]
        assert set(scores) >= {"objects_right", "fid_own"} and scores.items() <= entry["scores"].items()
    images = (finished / "evaluation", finished.parent / "plain-UNet-long-prompts")  # the same, not rendered again
    first_image = "images/SDXL-s-own-cut-at-77-tokens/000000.png"
    assert len({(folder / first_image).stat().st_mtime_ns for folder in images}) == 1
    told = [line["told"] for line in referring["ceilings"]]
    tables = markdown(benchmark.tables({4: result, 5: result}))
    shown = first["encoders"]["debias-clip"]
    assert tables.count("| 4 | debias-clip |") == tables.count("| 5 | debias-clip |") == 3  # retrieval, two conditions
    assert f"| 4 | debias-clip | {shown['objects_right']['value']:.1f} |" in tables
    assert all(f"| 5 | {way} |" in tables for way in told if way != benchmark.ALL)


@pytest.mark.parametrize("benchmark", ["studies.states"], indirect=True)
def test_rows_are_drawn_once_scored_and_compared(benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "STEPS", 1)
    images = benchmark.Images("development", 2, tmp_path)
    rows = benchmark.rows_of(images, {"Long-CLIP": "toy/long-clip", "DeBias-CLIP": "toy/debias-clip"}, fitted_on=20)
    assert len(rows) == len(set(rows)) == 3 + 2 * (len(benchmark.CHANGES) + 1)
    written = {file: file.stat().st_mtime_ns for row in rows for file in images.files(row)}
    assert len(written) == 2 * len(rows)
    before = {row: [file.read_bytes() for file in images.files(row)] for row in rows}
    assert before["Long-CLIP: less one shift"] != before["Long-CLIP: as they are"] != before[benchmark.ORIGINAL]
    gone = images.files("DeBias-CLIP: less one shift")[1]
    gone.unlink()
    benchmark.rows_of(images, {"Long-CLIP": "toy/long-clip", "DeBias-CLIP": "toy/debias-clip"}, fitted_on=20)
    assert gone.read_bytes() == before["DeBias-CLIP: less one shift"][1]
    assert all(file.stat().st_mtime_ns == time for file, time in written.items() if file != gone)

    scored = benchmark.score(images, rows)
    debias = scored["DeBias-CLIP: less one shift"]
    for other, name in (("original", benchmark.ORIGINAL), ("Long-CLIP", "Long-CLIP: less one shift")):
        difference = debias["scores"]["fid_own"]["value"] - scored[name]["scores"]["fid_own"]["value"]
        assert debias[f"minus {other}"]["fid_own"]["difference"] == pytest.approx(difference)
    assert "minus original" not in scored[benchmark.ORIGINAL]
    shown = markdown(benchmark.tables({"seed-1": scored, "seed-2": scored}))
    value = debias["scores"]["dino_score"]["value"]
    assert f"{value:.3f}, {value:.3f}" in shown
    assert shown.count("\n| Long-CLIP: less a linear map |") == 5  # one of scores, and two seeds compared twice
