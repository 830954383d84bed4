"""The story of the toy world: its numbers, claims and examples, and its page with whatever a name holds."""

import base64
import io
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from html_page import Page
from PIL import Image

from debias_diffusion.eval import merged_report
from debias_diffusion.eval.common.pages import write_page
from debias_diffusion.eval.pictures.generation import folder_names
from debias_diffusion.eval.story import EDITS, FEW, SHORT_FOLDER, claims, numbers, tell
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import scene

ROOT = Path(__file__).parent.parent
ENCODERS = ("clip", "long-clip", "debias-clip")
LABELS = ("toy/clip", "long-clip", "debias-clip")
MARKUP = "<script>alert('x')</script> & <img src=http://example.org/x.png>"


def generation_report(labels=LABELS, data="toy/test", objects=(0, 60, 30, 6, 2)) -> dict:
    """Encoder n has 31.4 + 10 n percent of the objects right, FID 12.34 - n, and a DINO score of 0.701 + 0.01 n."""
    values = [None, 75.0, 50.0, 100.0, 0.0]
    by_sentence = [
        {"sentence": number, "objects": count, "value": value}
        for number, (count, value) in enumerate(zip(objects, values, strict=True), 1)
        if count
    ]
    scores = [
        {
            "fid_own": {"value": 12.34 - n},
            "dino_score": {"value": 0.701 + 0.01 * n},
            "objects_right": {"value": 31.4 + 10 * n},
            "objects_right_by_sentence": by_sentence,
        }
        for n in range(len(labels))
    ]
    differences = [("long-clip", labels[0], 10, -1.1, 20.5), ("debias-clip", "long-clip", 11.1, 5.2, 16.3)]
    return {
        "evaluation": "generation",
        "settings": {"data": data},
        "images": 5,
        "encoders": {label: {"scores": its} for label, its in zip(labels, scores, strict=True)},
        "compared": [
            {"a": a, "b": b, "score": "objects_right", "difference": d, "low": low, "high": high, "p": 0.5}
            for a, b, d, low, high in differences
        ],
    }


def robustness_report(labels=LABELS) -> dict:
    recall = {"keep": 90, "move2": 60, "move4": 50, "remove": 40}
    return {
        "evaluation": "robustness",
        "settings": {"data": "toy/test"},
        "encoders": {
            label: {
                "recall_at_1_percent": {
                    edit: {"text_to_image": r1 + n + 0.1, "image_to_text": r1 + n + 0.6} for edit, r1 in recall.items()
                }
            }
            for n, label in enumerate(labels)
        },
    }


def results(folder: Path, labels=LABELS) -> list[tuple[Path, dict]]:
    """As `evaluate all` and the short prompts leave them; the last object of every generated image is missing."""
    for name in folder_names(list(labels)).values():
        (folder / "pictures" / name).mkdir(parents=True)
        for index in range(5):
            shown = scene("test", index)
            render(replace(shown, things=shown.things[:-1])).save(folder / "pictures" / name / f"{index:06}.png")
    short = generation_report(labels, "toy/short-test")
    # The order of a folder's results does not matter, and neither does another folder's.
    elsewhere = folder.parent / "elsewhere"
    return [
        (elsewhere, robustness_report(["toy/clip"])),
        (folder, robustness_report(labels)),
        (folder, generation_report(labels)),
        (folder / SHORT_FOLDER, short),
    ]


def page_of(story: dict, folder: Path) -> Page:
    write_page(folder / "report.html", merged_report.TEMPLATE, sections=[], has_story=True, **story)
    return Page((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    folder = tmp_path_factory.mktemp("results")
    return page_of(tell(results(folder)), folder)


# ---- numbers


def test_numbers_come_from_the_evaluations():
    found = numbers(generation_report(), robustness_report(), generation_report(data="toy/short-test"))
    assert list(found["retrieval"]) == list(found["generation"]) == list(found["short_prompts"]) == list(ENCODERS)
    assert found["retrieval"]["long-clip"]["move2"] == {"t2i_r1": 61.1, "i2t_r1": 61.6}
    assert found["generation"]["clip"] == {
        "fid": 12.34,
        "dino": 0.701,
        "objects_correct": pytest.approx(0.314),
        "objects_correct_by_sentence": [None, 0.75, 0.5, 1.0, 0.0],
        "objects_by_sentence": [0, 60, 30, 6, 2],
        "n": 5,
    }
    assert found["short_prompts"]["debias-clip"] == pytest.approx(0.514)
    assert found["bootstrap"]["debias-clip - long-clip"] == pytest.approx(
        {"difference": 0.111, "low": 0.052, "high": 0.163}
    )
    # Two encoders that would share a name keep their labels.
    assert list(numbers(generation_report(("toy/clip", "long-clip", "debias-clip", "runs/clip")))["generation"]) == [
        "toy/clip", "long-clip", "debias-clip", "runs/clip"
    ]  # fmt: skip


def test_the_story_is_of_one_folder_and_of_long_captions(tmp_path):
    story = tell(results(tmp_path))
    assert story["retrieval"]["text to image"].keys() == set(ENCODERS) and story["images"]["clip"][1]["text"] == "31.4"
    assert tell([(tmp_path, robustness_report()), (tmp_path, generation_report(data="toy/short-test"))]) is None
    photographs = generation_report(data="captions.json")
    for its in photographs["encoders"].values():
        del its["scores"]["objects_right"]
    assert tell([(tmp_path, photographs)]) is None
    other_scenes = robustness_report() | {"settings": {"data": "toy/test-2"}}
    assert not tell([(tmp_path, other_scenes), (tmp_path, generation_report())])["retrieval"]["text to image"]


# ---- claims


def numbers_with(changes: dict) -> dict:
    """Numbers with which every claim holds, but for `changes` by path."""
    recall = {
        "keep": {"clip": 90.0, "long-clip": 95.0, "debias-clip": 94.0},
        "move4": {"clip": 15.0, "long-clip": 25.0, "debias-clip": 53.0},
        "remove": {"clip": 5.0, "long-clip": 15.0, "debias-clip": 27.0},
    }
    found = {
        "retrieval": {e: {edit: {"t2i_r1": r1[e], "i2t_r1": r1[e]} for edit, r1 in recall.items()} for e in ENCODERS},
        "generation": {
            e: {
                "objects_correct": sum(shares) / 2,
                "objects_by_sentence": [0, 30, 0, 0, 0, 20, 10],
                "objects_correct_by_sentence": [None, shares[0], None, None, None, shares[1], shares[1]],
            }
            for e, shares in {"clip": (0.6, 0.1), "long-clip": (0.6, 0.4), "debias-clip": (0.7, 0.5)}.items()
        },
        "bootstrap": {"debias-clip - long-clip": {"difference": 0.1, "low": 0.02, "high": 0.18}},
    }
    for path, value in changes.items():
        *parents, last = path.split("/")
        branch = found
        for name in parents:
            branch = branch[name]
        branch[last] = value
    return found


@pytest.mark.parametrize(
    ("changes", "claim", "met", "result"),
    [
        ({}, 5, True, "+40.0 points, and +10.0"),
        ({"retrieval/debias-clip/keep/t2i_r1": 93.9}, 0, False, "93.9% against 95"),
        ({"retrieval/debias-clip/keep/i2t_r1": 93.9}, 1, False, "93.9% against 95"),
        # At most 0.6 of 70 points: 94 - 52 = 42 is just allowed, in floating point too.
        ({"retrieval/debias-clip/move4/t2i_r1": 52.0}, 2, True, "42.0 points against 70.0: 0.60"),
        ({"retrieval/debias-clip/move4/t2i_r1": 51.9}, 2, False, "42.1 points"),
        ({"retrieval/long-clip/move4/t2i_r1": 96.0}, 2, None, "from 95.0% to 96.0%"),
        ({"retrieval/debias-clip/remove/t2i_r1": 25.9}, 3, False, "68.1 points"),
        ({"generation/clip/objects_correct": 0.6}, 4, False, "60.0% against 60.0%"),
        (
            {"generation/clip/objects_correct_by_sentence": [None, 0.1, None, None, None, 0.1, 0.5]},
            5,
            False,
            "+26.7 points, and +60.0",
        ),
        (
            {f"generation/{e}/objects_by_sentence": [0, 30, 0, 0, 0, 0, 0] for e in ENCODERS},
            5,
            None,
            "no objects on one side",
        ),
        (
            {"bootstrap/debias-clip - long-clip": {"difference": 0.1, "low": -0.01, "high": 0.2}},
            6,
            None,
            "+10.0 points, 95% interval -1.0 to +20.0: no difference shown",
        ),
        (
            {"bootstrap/debias-clip - long-clip": {"difference": -0.1, "low": -0.2, "high": -0.01}},
            6,
            False,
            "-10.0 points",
        ),
    ],
)  # fmt: skip
def test_claims(changes, claim, met, result):
    lines = claims(numbers_with(changes))
    assert [line["met"] for line in lines] == [met if place == claim else True for place in range(7)]
    assert result in lines[claim]["found"] and set(lines[claim]) == {"expectation", "found", "met"}


def test_nothing_is_claimed_of_other_encoders():
    found = numbers_with({})
    del found["retrieval"]["clip"]
    assert claims(found) == []
    assert claims(numbers_with({"bootstrap": {}})) == []


# ---- the page


def test_the_page_is_self_contained_and_knows_light_and_dark(page, tmp_path):
    page.check_is_self_contained()
    source = page_of(tell(results(tmp_path)), tmp_path) and (tmp_path / "report.html").read_text()
    assert "@import" not in source and "url(" not in source
    assert "prefers-color-scheme: dark" in source and "image-rendering: pixelated" in source
    assert page_of(tell(results(tmp_path / "again")), tmp_path / "again").text == page.text


def test_examples_show_the_reference_and_every_encoder(page):
    images = page.all("img")
    assert [image["alt"].split(":")[0] for image in images] == 2 * [
        "Reference image", "Original CLIP", "Long-CLIP", "DeBias-CLIP"
    ]  # fmt: skip
    for image, index in zip(images[::4], (0, 4), strict=True):  # the first arrangement of each family of scenes
        kind, data = image["src"].split(",")
        assert kind == "data:image/png;base64"
        assert Image.open(io.BytesIO(base64.b64decode(data))).tobytes() == render(scene("test", index)).tobytes()
    shown, mentioned = scene("test", 0), caption("test", 0).first_mentions()
    count = len(shown.things)
    assert f"{count - 1} of {count} objects right" in page.text
    for thing in shown.things:
        verdict = "✗wrong:" if thing is shown.things[-1] else "✓right:"
        line = (
            f"{verdict} {thing.size} {thing.colour} {thing.kind}, {thing.place} (sentence {mentioned[thing.place] + 1})"
        )
        assert page.text.count(line) == 3
    assert all(sentence.text in page.text for sentence in caption("test", 0).sentences)


@pytest.mark.parametrize(
    "row",
    [
        ["Original CLIP", "90.1", "60.1", "50.1", "40.1"],
        ["DeBias-CLIP", "92.6", "62.6", "52.6", "42.6"],
        ["Long-CLIP", "41.4", "41.4", "11.34", "0.711"],
        ["DeBias-CLIP minus Long-CLIP", "+11.1", "+5.2", "+16.3", "DeBias-CLIP draws more"],
        ["Long-CLIP minus Original CLIP", "+10.0", "-1.1", "+20.5", "could be chance"],
        ["2", "60", "75.0", "75.0", "75.0"],
        # (30 * 50% + 6 * 100% + 2 * 0%) / 38; sentence 1 mentions no object
        ["3 to 5", "38", "55.3", "55.3", "55.3"],
    ],
    ids=lambda row: row[0],
)
def test_the_numbers_stand_in_their_rows(page, row):
    assert row in page.rows


def test_the_best_of_a_column_is_bold_whichever_way_is_better(tmp_path):
    report = generation_report()
    scores = [its["scores"] for its in report["encoders"].values()]
    scores[0]["dino_score"] = scores[2]["dino_score"]  # two are best alike
    source = page_of(tell([(tmp_path, report)]), tmp_path) and (tmp_path / "report.html").read_text()
    assert "<strong>10.34</strong>" in source and "<strong>12.34</strong>" not in source
    assert source.count("<strong>0.721</strong>") == 2 and "<strong>0.711</strong>" not in source
    assert "<strong>75.0</strong>" not in source  # all alike


def test_last_sentences_with_enough_objects_stand_alone(tmp_path):
    rows = tell([(tmp_path, generation_report(objects=(0, 60, 30, FEW, FEW)))])["sentences"]
    assert [row["label"] for row in rows] == ["2", "3", "4", "5"]


def test_missing_parts_are_left_out_or_dashes(tmp_path):
    report = generation_report()
    del report["encoders"]["long-clip"]["scores"]["fid_own"], report["encoders"]["long-clip"]["scores"]["dino_score"]
    page = page_of(tell([(tmp_path, report)]), tmp_path)  # no robustness, no short prompts, no images
    assert ["Long-CLIP", "41.4", "–", "–", "–"] in page.rows
    assert "none are shown" in page.text and "R@1" not in page.text and "promises" not in page.text
    assert "None" not in page.text and "nan" not in page.text.lower()


def test_markup_stays_text(tmp_path):
    folder = tmp_path / "results"
    page = page_of(tell(results(folder, (MARKUP, "long-clip", "debias-clip"))), tmp_path)
    page.check_is_self_contained()
    assert len(page.all("img")) == 8
    # The captions of two images, a column of the sentences, a row of each direction and of the scores, a difference.
    assert page.text.count(MARKUP) == 7


def test_claims_have_their_verdict(tmp_path):
    story = tell(results(tmp_path)) | {
        "claims": [{"expectation": "x", "found": "y", "met": m} for m in (True, False, None)]
    }
    rows = page_of(story, tmp_path).rows
    assert [row for row in rows if row[0] == "x"] == [
        ["x", "y", "✓ met"],
        ["x", "y", "✗ not met"],
        ["x", "y", "? open"],
    ]


def test_the_commands_are_those_of_the_readme():
    source = (Path(merged_report.__file__).parent / "story.html.j2").read_text(encoding="utf-8")
    lines = [
        line for block in re.findall(r"<pre[^>]*><code>(.*?)</code>", source, re.DOTALL) for line in block.splitlines()
    ]
    assert len(lines) >= 4
    readme = re.sub(" +", " ", (ROOT / "README.md").read_text())
    assert [line for line in lines if line not in readme] == []
    assert all((ROOT / config).is_file() for config in re.findall(r"configs/[\w.-]+", source))


def test_the_edits_are_those_of_the_robustness_evaluation():
    assert EDITS.keys() <= merged_report.robustness.EDITS.keys()


@pytest.mark.slow
def test_the_wheel_holds_the_templates(tmp_path):
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    templates = {f"debias_diffusion/eval/{file.name}" for file in (ROOT / "eval").glob("*.j2")}
    assert templates and templates <= set(zipfile.ZipFile(wheel).namelist())
