"""The page that merges results: what stands in one table, what is told apart, and that nothing in it is HTML."""

import json
import shutil
from pathlib import Path

import pytest
import skimage
from helpers.html_page import Page
from helpers.tiny_clip import save_tiny_clip
from PIL import Image

from debias_diffusion.errors import UserError
from debias_diffusion.eval.page import ReportConfig, evaluate_report, grouped, merged, read_results, section
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval

pytestmark = pytest.mark.usefixtures("coarse_results")
PHOTOGRAPHS = Path(__file__).parent / "photographs" / "captions.json"


def retrieve(output: Path, *encoders: str, **changes) -> dict:
    settings = {"data": str(PHOTOGRAPHS), "images": skimage.data_dir, "limit": 6}
    return evaluate_retrieval(RetrievalConfig(list(encoders), str(output), **(settings | changes)))


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> list[str]:
    """Three tiny two-towers: "one", "<b>two|", and another of the name "one"."""
    folder = tmp_path_factory.mktemp("clips")
    names = ["a/one", "a/<b>two|", "b/one"]
    return [save_tiny_clip(folder / name, seed=seed) for seed, name in enumerate(names)]


@pytest.fixture(scope="module")
def results(tmp_path_factory, clips, coarse_results) -> Path:
    """Four results, of three runs on the same data and one on other data."""
    folder = tmp_path_factory.mktemp("results")
    retrieve(folder / "first", *clips[:2])
    retrieve(folder / "deep" / "second", clips[2])
    retrieve(folder / "third", clips[0], limit=5)
    shutil.copytree(folder / "first", folder / "again")
    return folder


def test_results_on_the_same_data_stand_in_one_table(results, clips, tmp_path, capsys):
    page_file = evaluate_report(ReportConfig(str(results), str(tmp_path / "page")))
    assert "4 results in 2 sections" in capsys.readouterr().out
    page = Page(page_file.read_text())
    page.check_is_self_contained()
    labels = ["one", "<b>two|", "one (second)"]
    reports = [retrieve(results / "first", *clips[:2]), retrieve(results / "deep" / "second", clips[2])]
    numbers = reports[0]["encoders"] | {"one (second)": reports[1]["encoders"]["one"]}
    for direction in ("text_to_image", "image_to_text"):
        start = next(n for n, row in enumerate(page.rows) if row[0].endswith(direction.replace("_", " ")))
        for row, label in zip(page.rows[start + 1 :], labels, strict=False):
            recalls = numbers[label]["recall_percent"][direction].values()
            assert [row[0], *(text.split(" (")[0] for text in row[2:])] == [label, *(f"{r:.1f}" for r in recalls)]
    markdown = (tmp_path / "page" / "report.md").read_text()
    assert r"| \<b\>two\| |" in markdown and markdown.count("\n## ") == 2
    figures = sorted((tmp_path / "page" / "report").iterdir())
    assert [path.name for path in figures] == ["1-retrieval.png", "2-retrieval.png"]
    assert all(f"(report/{path.name})" in markdown for path in figures)
    with Image.open(figures[0]) as image:
        assert image.format == "PNG"
    assert len(page.all("img")) == 2 and not page.all("b")
    assert len(page.all("details")) == 1 and "Encoders compared, pairwise" in page.text  # one run has two encoders
    assert "Evaluation" in page.text and "toy world" not in page.text


def test_merging_keeps_comparisons_and_the_latest_run(results):
    groups = grouped(read_results(results)[0])
    assert [len(group) for group in groups] == [3, 1]
    report = merged(groups[0])
    assert list(report["encoders"]) == ["one", "<b>two|", "one (second)"]
    assert [(line["a"], line["b"]) for line in report["compared"]] == [("<b>two|", "one")] * 2
    assert len(section(groups[0]).about) == 4  # three runs and the data


def save(report: dict, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "retrieval.json").write_text(json.dumps(report))


def test_as_many_weights_of_one_name_as_there_are_stand_apart(results, tmp_path):
    report = json.loads((results / "first" / "retrieval.json").read_text())
    for index, name in enumerate("abc"):
        report["digests"]["encoders"]["one"] = f"{index}"
        save(report, tmp_path / name / "scores")
    (group,) = grouped(read_results(tmp_path)[0])
    labels = [label for label in merged(group)["encoders"] if label.startswith("one")]
    assert labels[:2] == ["one", "one (scores)"] and labels[2] == f"one ({tmp_path / 'c' / 'scores'})"


def test_numbers_of_fewer_images_stand_apart(results, tmp_path):
    report = json.loads((results / "first" / "retrieval.json").read_text())
    for images in (6, 5):
        save(report | {"images": images}, tmp_path / f"{images}")
    assert [len(group) for group in grouped(read_results(tmp_path)[0])] == [1, 1]


def test_one_checkpoint_under_two_names_is_one(results, tmp_path):
    report = json.loads((results / "first" / "retrieval.json").read_text())
    digests = report["digests"] | {"base": "ab", "dino": "cd"}
    for number, base in enumerate(("sdxl", "/models/sdxl")):
        settings = report["settings"] | {"base": base, "dino": f"{base}/dino"}
        save(report | {"settings": settings, "digests": digests}, tmp_path / f"{number}")
    assert [len(group) for group in grouped(read_results(tmp_path)[0])] == [2]


def test_what_is_no_result_is_named_and_left_out(results, tmp_path, capsys):
    shutil.copytree(results / "third", tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "retrieval.json").write_text("{")
    old = json.loads((results / "third" / "retrieval.json").read_text())
    del old["encoders"]
    save(old, tmp_path / "old")
    evaluate_report(ReportConfig(str(tmp_path)))
    printed = capsys.readouterr().out
    assert "Left out: bad/retrieval.json" in printed and "Left out: old/retrieval.json" in printed
    assert "1 results in 1 sections" in printed and (tmp_path / "report.html").is_file()


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(UserError, match="There is no folder"):
        evaluate_report(ReportConfig(str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match="holds no results.*retrieval.json"):
        evaluate_report(ReportConfig(str(tmp_path)))
    (tmp_path / "retrieval.json").write_text("[]")
    with pytest.raises(UserError, match="first that cannot be used: retrieval.json"):
        evaluate_report(ReportConfig(str(tmp_path)))
