"""The quickstart's page: complete, self-contained, readable, and safe with whatever a caption holds."""

import base64
import io
import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from debias_diffusion import files
from debias_diffusion.eval import quickstart_report
from debias_diffusion.eval.quickstart_report import (
    DASH,
    ENCODERS,
    SPARSE,
    TEMPLATE,
    Example,
    ExampleThing,
    by_sentence,
    write_report,
)
from debias_diffusion.sentences import split_sentences

ROOT = Path(__file__).parent.parent
MARKUP = "<script>alert('x')</script> & <img src=http://example.org/x.png>"
SHARES = {"clip": 0.314, "long-clip": 0.427, "debias-clip": 0.538}
VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """A page's elements with their attributes and their text; fails where tags do not close in order."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" in self._open:
            return
        self.texts.append(data)
        if {"th", "td"} & set(self._open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]

    def cells(self) -> list[list[str]]:
        return [[" ".join(cell.split()) for cell in row] for row in self.rows]


def full_report() -> dict:
    edits = {"keep": 90, "move2": 60, "move4": 50, "remove": 40}
    return {
        "retrieval": {
            encoder: {edit: {"t2i_r1": r + n + 0.1, "i2t_r1": r + n + 0.6} for edit, r in edits.items()}
            for n, encoder in enumerate(ENCODERS)
        },
        "generation": {
            encoder: {
                "fid": 12.34 - n,
                "dino": 0.701 + 0.01 * n,
                "objects_correct": SHARES[encoder],
                "objects_correct_by_sentence": [None, 0.75, 0.5, 1.0, 0.0],
                "objects_by_sentence": [0, 60, 30, 6, 2],
                "n": 197,
            }
            for n, encoder in enumerate(ENCODERS)
        },
        "seconds": {"fine-tuning": 61.2, "drawing": 3605.0},
        "settings": {"steps": 300, "learning rate": 2e-4},
        "short_prompts": {"clip": 0.911, "long-clip": 0.892, "debias-clip": 0.873},
        "bootstrap": {
            "debias-clip - long-clip": {"difference": 0.111, "low": 0.052, "high": 0.163},
            "debias-clip - clip": {"difference": 0.224, "low": -0.011, "high": 0.305},
        },
        "expectations": [
            {"expectation": "first", "found": "a", "met": True},
            {"expectation": "second", "found": "b", "met": False},
            {"expectation": "third", "found": "c", "met": None},
        ],
        "digests": {"toy/clip": "0123456789abcdef" * 4},
        "versions": {"torch": "2.99.0"},
    }


def picture(number: int) -> Image.Image:
    return Image.new("RGB", (48, 48), (10 * number, 20, 30))


def example(words: str = "A red circle.") -> Example:
    things = [
        ExampleThing("large red circle, top left", 1, {"clip": True, "long-clip": True, "debias-clip": True}),
        ExampleThing("small blue ring, bottom", 2, {"clip": False, "long-clip": False, "debias-clip": True}),
    ]
    generations = {encoder: picture(number) for number, encoder in enumerate(ENCODERS, 1)}
    return Example(["A picture of two things.", words, "A blue ring."], picture(0), generations, things)


def written(folder: Path, report: dict, examples=()) -> Page:
    return Page(write_report(folder, report, examples).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    return written(tmp_path_factory.mktemp("report"), full_report(), [example()])


def test_nothing_is_loaded_from_elsewhere(page):
    loads = [
        value
        for tag, attributes in page.elements
        for name, value in attributes.items()
        if name.split(":")[-1] in ("src", "srcset", "href", "data", "poster", "action") and tag != "a"
    ]
    assert len(loads) > 4
    assert all(value.startswith(("data:", "#")) for value in loads)
    assert not page.all("script")
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_styles_load_nothing_and_know_light_and_dark(tmp_path):
    text = write_report(tmp_path, full_report(), [example()]).read_text(encoding="utf-8")
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)]*)\)", text))
    assert "prefers-color-scheme: dark" in text and "image-rendering: pixelated" in text
    # The plots take their colours from the page, in both modes; only white and black of matplotlib's own are unused.
    assert "#0102" not in text and "var(--debias-clip)" in text.split("<svg", 1)[1]


def test_pictures_are_data_with_words_for_who_cannot_see_them(page):
    images = page.all("img")
    assert len(images) == 4
    assert len({image["src"] for image in images}) == 4
    for number, image in enumerate(images):
        kind, data = image["src"].split(",")
        assert kind == "data:image/png;base64"
        decoded = Image.open(io.BytesIO(base64.b64decode(data)))
        assert (decoded.size, decoded.getpixel((0, 0))) == ((48, 48), (10 * number, 20, 30))
    assert [image["alt"].split(":")[0] for image in images] == [
        "Original picture",
        *(f"Drawn with {quickstart_report.NAMES[encoder]}" for encoder in ENCODERS),
    ]
    plots = page.all("svg")
    assert len(plots) == 2 and all(plot["role"] == "img" and plot["aria-label"] for plot in plots)


def test_table_headers_say_what_they_head(page):
    headers = page.all("th")
    assert len(headers) > 20
    assert all(header.get("scope") in ("col", "row", "rowgroup") for header in headers)


def test_four_sentences_say_what_was_done(tmp_path):
    text = write_report(tmp_path, full_report(), []).read_text(encoding="utf-8")
    said = re.search(r'id="what-was-done">(.*?)</p>', text, re.DOTALL)[1]
    sentences = split_sentences(" ".join(said.split()))
    assert len(sentences) == 4
    assert "the same 197 long" in said


def test_each_object_has_its_verdict_and_its_sentence(page):
    assert "1 of 2 objects right" in page.text and "2 of 2 objects right" in page.text
    assert page.text.count("✓right: large red circle, top left (sentence 2)") == 3
    assert page.text.count("✗wrong: small blue ring, bottom (sentence 3)") == 2
    assert page.text.count("✓right: small blue ring, bottom (sentence 3)") == 1


@pytest.mark.parametrize(
    "row",
    [
        ["Original CLIP (cut at 77 tokens)", "90.1", "60.1", "50.1", "40.1"],
        ["DeBias-CLIP", "92.6", "62.6", "52.6", "42.6"],
        ["Long-CLIP", "42.7", "11.34", "0.711"],
        ["DeBias-CLIP", "87.3"],
        ["DeBias-CLIP minus Long-CLIP", "+11.1", "+5.2", "+16.3", "the first is ahead"],
        ["DeBias-CLIP minus Original CLIP (cut at 77 tokens)", "+22.4", "-1.1", "+30.5", "could be chance"],
        ["first", "a", "✓ met"],
        ["second", "b", "✗ not met"],
        ["third", "c", "? open"],
        ["fine-tuning", "1 min 01 s"],
        ["Total", "1 h 01 min"],
        ["toy/clip", "0123456789abcdef" * 4],
        ["learning rate", "0.0002"],
        ["torch", "2.99.0"],
    ],
    ids=lambda row: row[0],
)
def test_the_numbers_stand_in_their_rows(page, row):
    assert row in page.cells()


def test_the_best_of_a_column_is_bold_whichever_way_is_better(tmp_path):
    report = full_report()
    report["generation"]["clip"]["fid"] = 1.5
    report["generation"]["clip"]["dino"] = report["generation"]["debias-clip"]["dino"]  # two are best alike
    text = write_report(tmp_path, report, []).read_text(encoding="utf-8")
    assert "<strong>1.50</strong>" in text and "<strong>10.34</strong>" not in text
    assert text.count("<strong>0.721</strong>") == 2 and "<strong>0.711</strong>" not in text


def test_the_last_sentences_are_joined_until_they_tell_enough():
    report = full_report()["generation"]
    positions = by_sentence(report)
    assert [(p.label, p.objects) for p in positions] == [("1", 0), ("2", 60), ("3–5", 38)]
    assert positions[-1].shares["clip"] == pytest.approx((30 * 0.5 + 6 * 1.0 + 2 * 0.0) / 38)
    assert positions[0].shares["clip"] is None
    for scores in report.values():
        scores["objects_by_sentence"] = [0, 60, 30, SPARSE, SPARSE]
    assert [p.label for p in by_sentence(report)] == ["1", "2", "3", "4", "5"]


def test_few_objects_in_all_are_one_row_that_says_so(tmp_path):
    report = full_report()
    for scores in report["generation"].values():
        scores["objects_by_sentence"] = [0, 3, 2, 1, 0]
    page = written(tmp_path, report)
    assert [p.objects for p in by_sentence(report["generation"])][-1] == 6
    assert len([row for row in page.all("tr") if row.get("class") == "sparse"]) >= 1


def test_markup_stays_text(tmp_path):
    report = full_report()
    for part in ("seconds", "settings", "digests", "versions"):
        report[part] = {MARKUP: 1.0 if part == "seconds" else MARKUP}
    report["expectations"] = [{"expectation": MARKUP, "found": MARKUP, "met": None}]
    report["bootstrap"] = {MARKUP: None}
    odd = example(MARKUP)
    odd.things.append(ExampleThing(f'"{MARKUP}', 0, {}))
    page = written(tmp_path, report, [odd])
    assert not page.all("script")
    assert len(page.all("img")) == 4 and all(image["src"].startswith("data:") for image in page.all("img"))
    # The prompt, 3 lists of objects, 1 stage, 3 x 2 cells of pairs, 2 of the expectation, 1 comparison.
    assert page.text.count(MARKUP) == 14
    assert MARKUP in page.all("img")[0]["alt"]


def without_numbers(value):
    if isinstance(value, dict):
        return {key: without_numbers(part) for key, part in value.items()}
    return [without_numbers(part) for part in value] if isinstance(value, list) else None


def test_missing_numbers_are_dashes(tmp_path):
    page = written(tmp_path, without_numbers(full_report()), [example()])
    rows = page.cells()
    assert rows.count(["Long-CLIP", DASH, DASH, DASH, DASH]) == 2
    assert ["Long-CLIP", DASH, DASH, DASH] in rows and ["Long-CLIP", DASH] in rows
    assert ["DeBias-CLIP minus Long-CLIP", DASH, DASH, DASH, DASH] in rows
    assert "None" not in page.text and "nan" not in page.text.lower()


def test_not_a_number_is_a_dash_too(tmp_path):
    report = full_report()
    report["generation"]["long-clip"]["fid"] = float("nan")
    assert ["Long-CLIP", "42.7", DASH, "0.711"] in written(tmp_path, report).cells()


@pytest.mark.parametrize("missing", [*full_report()])
def test_any_part_may_be_missing(tmp_path, missing):
    report = full_report()
    del report[missing]
    page = written(tmp_path, report, [example()])
    assert "What to run next" in page.text and "None" not in page.text


def test_an_empty_report_is_a_page(tmp_path):
    page = written(tmp_path, {})
    assert DASH in page.text and "None" not in page.text and len(page.all("h2")) >= 5


def test_an_example_without_a_picture_or_a_verdict_has_dashes(tmp_path):
    partial = example()
    del partial.generations["long-clip"], partial.things[0].right["long-clip"]
    page = written(tmp_path, full_report(), [partial])
    assert len(page.all("img")) == 3
    assert f"{DASH}large red circle, top left (sentence 2)" in page.text


def test_the_file_is_whole_or_not_there(tmp_path, monkeypatch):
    path = write_report(tmp_path, full_report(), [])
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(files.os, "replace", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_report(tmp_path, {}, [])
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert path.read_bytes() == before


def test_the_same_numbers_make_the_same_page(tmp_path):
    one, two = (write_report(tmp_path / name, full_report(), [example()]) for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_the_commands_are_those_of_the_readme(tmp_path):
    text = write_report(tmp_path, {}, []).read_text(encoding="utf-8")
    blocks = re.findall(r"<pre[^>]*><code>(.*?)</code>", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) >= 4
    readme = re.sub(" +", " ", (ROOT / "README.md").read_text())
    assert [line for line in lines if line not in readme] == []
    for config in re.findall(r"configs/[\w.-]+", text):
        assert (ROOT / config).is_file()


def test_the_template_is_package_data():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["debias_diffusion.eval"]
    folder = Path(quickstart_report.__file__).parent
    assert folder / TEMPLATE in [file for pattern in patterns for file in folder.glob(pattern)]
    assert any(re.match(r"jinja2\b", name) for name in project["project"]["dependencies"])


@pytest.mark.slow
def test_the_wheel_holds_the_template(tmp_path):
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert f"debias_diffusion/eval/{TEMPLATE}" in zipfile.ZipFile(wheel).namelist()
