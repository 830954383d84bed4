"""What every evaluation has: its report, a cache of what is finished, a place on the page and in `evaluate all`."""

import json
import shutil
from pathlib import Path

import pytest
import skimage
from helpers.html_page import Page
from helpers.reports import check_report
from helpers.tiny_clip import save_tiny_clip

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.errors import UserError
from debias_diffusion.eval import session
from debias_diffusion.eval.all_options import AllConfig, ReportConfig
from debias_diffusion.eval.page import evaluate_all, evaluate_report, grouped, merged, read_results, settings_of_all
from debias_diffusion.eval.registry import EVALUATIONS
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval
from debias_diffusion.eval.session import ResultCache
from debias_diffusion.jobs import JOB
from debias_diffusion.pipelines.rendering.checkpoints import Checkpoint, Defaults

pytestmark = pytest.mark.usefixtures("coarse_results")
PHOTOGRAPHS = Path(__file__).parent / "photographs" / "captions.json"
DATA = {"data": str(PHOTOGRAPHS), "images": skimage.data_dir}


def check_all(config: AllConfig, monkeypatch) -> dict[str, dict]:
    """The reports of all evaluations, whose numbers a second run has from the cache."""

    def reports() -> dict[str, dict]:
        assert evaluate_all(config) == Path(config.output, "report.html")
        files = Path(config.output).glob("*.json")
        return {file.stem: json.loads(file.read_text()) for file in files if file.name != JOB}

    first = reports()
    with monkeypatch.context() as patch:
        for name in ("encode_image", "encode_text"):
            patch.setattr(Backbone, name, lambda *_, **__: pytest.fail("encoded again"))
        again = reports()
    for name, report in first.items():
        check_report(report)
        assert (report["encoders"], report["compared"]) == (again[name]["encoders"], again[name]["compared"]), name
    return first


def test_the_toy_world_is_evaluated_without_any_settings_and_once(tmp_path, monkeypatch):
    toys = ["cut:toy/clip", "toy/clip", "toy/long-clip", "toy/debias-clip", "toy/debias-clip-sdxl"]
    assert AllConfig().encoders == toys
    monkeypatch.setattr(Checkpoint, "defaults", Defaults(steps=1, guidance_scale=3.0))
    config = AllConfig([toys[0], toys[3]], str(tmp_path), limit=2, images_per_encoder=2)
    reports = check_all(config, monkeypatch)
    labels = {name: list(report["encoders"]) for name, report in reports.items()}
    assert labels.pop("drift") == ["toy/debias-clip"]  # toy/clip is the base's own
    assert labels.pop("generation") == ["SDXL's own, cut at 77 tokens", "toy/debias-clip"]
    assert labels == {key: ["toy/clip", "toy/debias-clip"] for key in ("robustness", "retrieval", "attention")}
    page = (tmp_path / "report.html").read_text()
    assert "FID (toy/features)" in page and "Does it read to the end?" in page  # the story of the toy world


def test_the_settings_decide_what_takes_part_and_with_what(tmp_path, sdxl_folder):
    clip, toy = save_tiny_clip(tmp_path / "clip"), {"output": str(tmp_path)}

    def chosen(**settings):
        return settings_of_all(AllConfig(**settings))

    bench = chosen(encoders=["toy/clip"], prompts="dpg:bench", judge="qwen", server="http://localhost", **toy)
    assert (bench["following"].prompts, bench["following"].encoders) == ("dpg:bench", ["original"])
    assert list(bench) == ["robustness", "retrieval", "attention", "generation", "following"]  # as on the page
    real = toy | DATA | {"base": str(sdxl_folder), "own_features": "toy/features"}
    real["encoders"] = ["cut:original", "original", f"separate:{clip}"]
    settings = chosen(**real)
    assert settings["generation"].encoders == real["encoders"]  # SDXL's own is for images alone
    assert all(config.encoders == [clip] for name, config in settings.items() if name != "generation")
    # Batches are each evaluation's own unless one number is given.
    assert {name: config.batch_size for name, config in bench.items()} == {
        name: EVALUATIONS[name].options.batch_size for name in bench
    }
    assert {config.batch_size for config in chosen(**toy, batch_size=5).values()} == {5}


def test_unusable_settings_are_refused_before_anything_is_encoded(tmp_path, monkeypatch):
    monkeypatch.setattr(Backbone, "encode_text", lambda *_, **__: pytest.fail("it evaluates"))
    no_base = {"data": "toy/test", "base": None, "prompts": "p.txt", "judge": "qwen"}
    for change, message in ((no_base, "prompts need a base"), ({"base": "nowhere"}, "'nowhere' is not there")):
        with pytest.raises(UserError, match=message):
            evaluate_all(AllConfig(**({"output": str(tmp_path)} | change)))


def test_what_is_computed_is_kept_by_its_key_and_again_where_damaged(tmp_path):
    def result(number: float, **depends) -> float:
        return ResultCache(tmp_path).result("part", depends, lambda: {"number": number})["number"]

    assert [result(1.5, a=1), result(2.5, a=1), result(3.5, a=2)] == [1.5, 1.5, 3.5]
    file = next(file for file in (tmp_path / "cache").iterdir() if "1.5" in file.read_text())
    whole = file.read_bytes()
    for number, damaged in enumerate((b"", b"[]", whole[:-3], whole.replace(b"1.5", b"1.6"), None)):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        assert result(number, a=1) == number


def test_another_version_of_a_library_is_another_key(tmp_path, monkeypatch):
    def result(number: float, **libraries: str) -> float:
        monkeypatch.setattr(session, "versions", lambda: libraries)
        return ResultCache(tmp_path).result("part", {"a": 1}, lambda: {"number": number})["number"]

    assert [result(1, torch="2.11.0"), result(2, torch="2.12.0"), result(3, torch="2.11.0")] == [1, 2, 1]


def retrieve(output: Path, *encoders: str, **changes) -> dict:
    return evaluate_retrieval(RetrievalConfig(list(encoders), str(output), **(DATA | {"limit": 6} | changes)))


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> list[str]:
    """Three tiny two-towers: "one", "<b>two|", and another of the name "one"."""
    folder = tmp_path_factory.mktemp("clips")
    return [save_tiny_clip(folder / name, seed=seed) for seed, name in enumerate(("a/one", "a/<b>two|", "b/one"))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, clips, coarse_results) -> Path:
    """Four results, of three runs on the same data and one on other data."""
    folder = tmp_path_factory.mktemp("results")
    retrieve(folder / "first", *clips[:2])
    retrieve(folder / "deep" / "second", clips[2])
    retrieve(folder / "third", clips[0], limit=5)
    shutil.copytree(folder / "first", folder / "again")
    return folder


@pytest.fixture
def report(runs) -> dict:
    return json.loads((runs / "first" / "retrieval.json").read_text())


def save(report: dict, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "retrieval.json").write_text(json.dumps(report))


def test_results_on_the_same_data_stand_in_one_table(runs, report, tmp_path):
    page = Page(evaluate_report(ReportConfig(str(runs), str(tmp_path))).read_text())
    page.check_is_self_contained()
    second = json.loads((runs / "deep" / "second" / "retrieval.json").read_text())
    numbers = report["encoders"] | {"one (second)": second["encoders"]["one"]}
    start = next(n for n, row in enumerate(page.rows) if row[0].endswith("image to text"))
    for row, label in zip(page.rows[start + 1 :], numbers, strict=False):
        recalls = numbers[label]["recall_percent"]["image_to_text"].values()
        assert [row[0], *(text.split(" (")[0] for text in row[2:])] == [label, *(f"{r:.1f}" for r in recalls)]
    assert r"| \<b\>two\| |" in (tmp_path / "report.md").read_text()
    assert len(page.all("img")) == 2 and not page.all("b")
    groups = grouped(read_results(runs)[0])
    assert [len(group) for group in groups] == [3, 1]
    compared = merged(groups[0])["compared"]
    assert [(line["a"], line["b"]) for line in compared] == [("<b>two|", "one")] * 2  # of the latest run


def test_what_is_no_result_is_named_and_left_out(runs, report, tmp_path, capsys):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "retrieval.json").write_text("{")
    with pytest.raises(UserError, match="first that cannot be used: bad/retrieval.json"):
        evaluate_report(ReportConfig(str(tmp_path)))
    del report["encoders"]
    save(report, tmp_path / "old")
    shutil.copytree(runs / "third", tmp_path / "good")
    evaluate_report(ReportConfig(str(tmp_path)))
    printed = capsys.readouterr().out
    assert all(f"Left out: {name}/retrieval.json" in printed for name in ("bad", "old"))
    assert "1 results in 1 sections" in printed
