"""The story of the toy world: its numbers, claims and examples, and its page with whatever a name holds."""

import base64
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.html_page import Page
from helpers.story import LABELS, WITH_CHUNKS, generation_report, page_of, results, robustness_report
from PIL import Image

from debias_diffusion.eval import merged_report
from debias_diffusion.eval.story import EDITS, FEW, claims, numbers, tell
from debias_diffusion.eval.story_examples import examples
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import PLACES, Scene, Thing, scene

ROOT = Path(__file__).parent.parent
ENCODERS = ("clip", "long-clip", "debias-clip")
MARKUP = "<script>alert('x')</script> & <img src=http://example.org/x.png>"


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
        "precision": pytest.approx(0.203),
        "f1": pytest.approx(0.256),
        "objects_correct_with_size": pytest.approx(0.3),
        "empty_filled": pytest.approx(0.401),
        "background": pytest.approx(0.567),
        "objects_correct_by_sentence": [None, 0.75, 0.5, 1.0, 0.0],
        "objects_by_sentence": [0, 60, 30, 6, 2],
        "n": 5,
    }
    assert found["short_prompts"]["debias-clip"] == pytest.approx(0.514)
    assert found["bootstrap"]["debias-clip - long-clip"] == pytest.approx(
        {"difference": 0.111, "low": 0.052, "high": 0.163}
    )
    assert found["bootstrap"] is found["differences"]["objects_correct"]
    assert found["differences"]["empty_filled"] == {
        "debias-clip - clip": pytest.approx({"difference": 0.091, "low": 0.055, "high": 0.128})
    }
    # Two encoders that would share a name keep their labels.
    assert list(numbers(generation_report(("toy/clip", "long-clip", "debias-clip", "runs/clip")))["generation"]) == [
        "toy/clip", "long-clip", "debias-clip", "runs/clip"
    ]  # fmt: skip


def test_the_story_is_of_one_folder_and_of_long_captions(tmp_path):
    story = tell(results(tmp_path))
    assert (
        story["retrieval"]["text to image"].keys() == set(ENCODERS)
        and story["objects"]["rows"]["clip"][0]["text"] == "31.4"
    )
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
        "bootstrap": {
            "debias-clip - long-clip": {"difference": 0.1, "low": 0.02, "high": 0.18},
            "debias-clip - clip in chunks": {"difference": 0.05, "low": 0.01, "high": 0.09},
        },
        "differences": {"empty_filled": {"debias-clip - clip": {"difference": -0.02, "low": -0.05, "high": 0.01}}},
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
            "+10.0 points, 95% interval -1.0 to +20.0: could be chance",
        ),
        (
            {"bootstrap/debias-clip - long-clip": {"difference": -0.1, "low": -0.2, "high": -0.01}},
            6,
            False,
            "-10.0 points",
        ),
        (
            {"bootstrap/debias-clip - clip in chunks": {"difference": -0.1, "low": -0.2, "high": -0.01}},
            7,
            False,
            "-10.0 points, 95% interval -20.0 to -1.0",
        ),
        ({"bootstrap/debias-clip - clip in chunks": None}, 7, None, "not measured"),
        (
            {"differences/empty_filled/debias-clip - clip": {"difference": 0.02, "low": -0.01, "high": 0.05}},
            8,
            None,
            "+2.0 points, 95% interval -1.0 to +5.0: could be chance",
        ),
        (
            {"differences/empty_filled/debias-clip - clip": {"difference": 0.09, "low": 0.05, "high": 0.13}},
            8,
            False,
            "+9.0 points, 95% interval +5.0 to +13.0",
        ),
        ({"differences/empty_filled": {}}, 8, None, "not measured"),
    ],
)  # fmt: skip
def test_claims(changes, claim, met, result):
    lines = claims(numbers_with(changes))
    assert [line["met"] for line in lines] == [met if place == claim else True for place in range(9)]
    assert result in lines[claim]["found"] and set(lines[claim]) == {"expectation", "found", "met"}


def line_of(difference: float, low: float, high: float) -> dict[str, float]:
    return {"difference": difference, "low": low, "high": high}


@pytest.mark.parametrize(
    ("against", "chunks", "filled", "met"),
    [
        (line_of(0.2, 0.1, 0.3), line_of(0.0, -0.1, 0.1), line_of(-0.01, -0.02, 0.01), [True, True, True]),
        (line_of(0.2, -0.1, 0.3), line_of(-0.01, -0.1, 0.0), line_of(0.01, -0.01, 0.02), [None, None, None]),
        (line_of(-0.2, -0.3, -0.1), line_of(-0.1, -0.2, -0.01), line_of(0.02, 0.01, 0.03), [False, False, False]),
        (None, None, None, [None, None, None]),
    ],
)
def test_claims_of_the_encoder_for_sdxl(against, chunks, filled, met):
    found = numbers_with({})
    found["generation"]["debias-clip-sdxl"] = found["generation"]["debias-clip"]
    found["bootstrap"] |= {"debias-clip-sdxl - long-clip": against, "debias-clip-sdxl - clip in chunks": chunks}
    found["differences"]["empty_filled"]["debias-clip-sdxl - clip in chunks"] = filled
    lines = claims(found)
    assert [line["met"] for line in lines[9:]] == met
    assert all("DeBias-CLIP for SDXL" in line["expectation"] for line in lines[9:])
    assert lines[:9] == claims(numbers_with({}))


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
    assert "prefers-color-scheme: dark" in source
    assert page_of(tell(results(tmp_path / "again")), tmp_path / "again").text == page.text


def shown_image(source: str) -> Image.Image:
    kind, data = source.split(",")
    assert kind == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_examples_show_the_reference_and_every_encoder(page):
    images = page.all("img")
    assert [image["alt"].split(":")[0] for image in images] == 2 * [
        "Reference image", "Original CLIP", "Long-CLIP", "DeBias-CLIP"
    ]  # fmt: skip
    for image, index in zip(images[::4], (0, 4), strict=True):  # the first arrangement of each family of scenes
        shown = shown_image(image["src"])
        assert shown.size == (240, 240) == (int(image["width"]), int(image["height"]))
        expected = np.asarray(render(scene("test", index)), np.float32)
        assert np.abs(np.asarray(shown.resize((48, 48), Image.Resampling.BOX), np.float32) - expected).mean() < 2
    shown, mentioned = scene("test", 0), caption("test", 0).first_mentions()
    count, missing = len(shown.things), shown.things[-1]
    scores = [f"{len(scene('test', i).things) - 1} of {len(scene('test', i).things)} right, no extras" for i in (0, 4)]
    assert page.text.count(scores[0]) == 3 * scores.count(scores[0])
    assert f"{count - 1} of {count} right, no extras. Right: {shown.things[0].place}, " in images[1]["alt"]
    assert images[1]["alt"].endswith(f"Wrong or missing: {missing.place}")
    for thing in shown.things:
        asked = f"{thing.size} {thing.colour} {thing.kind}, {thing.place} (sentence {mentioned[thing.place] + 1})"
        assert [asked, *["wrong:missing" if thing is missing else "right"] * 3] in page.rows
    assert [f"{shown.background} background", "right", "right", "right"] in page.rows
    assert all(sentence.text in page.text for sentence in caption("test", 0).sentences)


def test_an_example_marks_every_place_that_is_right_wrong_or_extra(tmp_path):
    """Of the first object the size is wrong, of the second the colour, the third is missing, and two are extra."""
    asked = scene("test", 0)
    first, second, third, *others = asked.things
    empty = [place for place in PLACES if place not in {thing.place for thing in asked.things}][:2]
    size = "small" if first.size == "large" else "large"
    colour = "green" if second.colour == "red" else "red"
    extra = [Thing("cross", "pink", "large", place) for place in empty]
    drawn = (replace(first, size=size), replace(second, colour=colour), *others, *extra)
    background = "black" if asked.background == "white" else "white"
    for name, shown in (("worse", Scene(background, drawn)), ("same", asked)):
        (tmp_path / name).mkdir()
        render(shown).save(tmp_path / name / "000000.png")
    (example,) = examples("test", 3, {"Worse": tmp_path / "worse", "Same": tmp_path / "same"})
    worse, same = example["drawn"]
    right = 1 + len(others)
    assert worse["score"] == f"{right} of {right + 2} right, 2 that nobody asked for"
    assert worse["alt"].endswith(
        f"Wrong or missing: {second.place}, {third.place}. Nobody asked for: {', '.join(empty)}"
    )
    assert same["score"] == f"{right + 2} of {right + 2} right, no extras"
    verdicts = {(mark["column"], mark["row"]): mark["verdict"] for mark in worse["marks"]}
    expected = {thing.place: "right" for thing in (first, *others)} | dict.fromkeys(empty, "extra")
    expected |= {second.place: "wrong", third.place: "wrong"}
    assert verdicts == {PLACES[place]: verdict for place, verdict in expected.items()}
    cells = {row["text"]: [(cell["verdict"], cell["text"]) for cell in row["cells"]] for row in example["rows"]}
    texts = [f"{thing.size} {thing.colour} {thing.kind}, {thing.place}" for thing in (first, second, third)]
    assert cells[texts[0]] == [("right", f"right, but {size}"), ("right", "right")]
    assert cells[texts[1]] == [("wrong", f"{colour} {second.kind}"), ("right", "right")]
    assert cells[texts[2]] == [("wrong", "missing"), ("right", "right")]
    assert cells[f"nothing, {empty[0]}"] == [("extra", "pink cross"), ("right", "empty")]
    assert cells[f"{asked.background} background"] == [("wrong", "another"), ("right", "right")]
    assert len(cells) == len(asked.things) + 3


def test_examples_of_captions_that_refer_back_show_these(tmp_path):
    render(scene("test", 0)).save(tmp_path / "000000.png")
    (example,) = examples("referring-test", 1, {"Same": tmp_path})
    assert example["sentences"] == [sentence.text for sentence in caption("test", 0, "referring").sentences]
    assert example["drawn"][0]["score"].endswith("right, no extras")


def test_what_is_not_clear_is_named_so(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "000000.png")
    (example,) = examples("test", 1, {"Noise": tmp_path})
    assert {cell["text"] for row in example["rows"][:-1] for cell in row["cells"]} == {"something unclear"}
    assert len(example["drawn"][0]["marks"]) == len(PLACES)


@pytest.mark.parametrize(
    "row",
    [
        ["Original CLIP", "90.1", "60.1", "50.1", "40.1"],
        ["DeBias-CLIP", "92.6", "62.6", "52.6", "42.6"],
        ["Long-CLIP", "41.4", "21.3", "26.6", "41.1"],
        ["Long-CLIP", "41.4", "57.7", "11.34", "0.711"],
        ["DeBias-CLIP minus Long-CLIP", "+11.1", "+5.2", "+16.3", "DeBias-CLIP is better"],
        ["DeBias-CLIP minus Original CLIP", "+9.1", "+5.5", "+12.8", "Original CLIP is better"],
        ["Long-CLIP minus Original CLIP", "+10.0", "-1.1", "+20.5", "could be chance"],
        ["2", "60", "75.0", "75.0", "75.0"],
        # (30 * 50% + 6 * 100% + 2 * 0%) / 38; sentence 1 mentions no object
        ["3 to 5", "38", "55.3", "55.3", "55.3"],
    ],
    ids=lambda row: f"{row[0]} {row[-1]}",
)
def test_the_numbers_stand_in_their_rows(page, row):
    assert row in page.rows


def test_overlapping_chunks_are_a_row_and_take_no_claim_away(tmp_path):
    story = results(tmp_path, ("toy/clip", "toy/clip in overlapping chunks", *LABELS[1:]))
    story[1] = (tmp_path, robustness_report())
    content = tell(story)
    page = page_of(content, tmp_path)
    assert ["Original CLIP in overlapping chunks", "41.4", "21.3", "26.6", "41.1"] in page.rows
    assert "reads each chunk but the first together with" in page.text and content["claims"]


def test_the_original_in_chunks_is_a_row_wherever_images_are_and_no_row_of_retrieval(tmp_path):
    story = results(tmp_path, WITH_CHUNKS)
    story[1] = (tmp_path, robustness_report())
    page = page_of(tell(story), tmp_path)
    assert [image["alt"].split(":")[0] for image in page.all("img")[:5]] == [
        "Reference image", "Original CLIP", "Original CLIP in chunks", "Long-CLIP", "DeBias-CLIP"
    ]  # fmt: skip
    assert ["Original CLIP in chunks", "41.4", "21.3", "26.6", "41.1"] in page.rows
    assert ["Original CLIP in chunks", "41.4", "57.7", "11.34", "0.711"] in page.rows
    assert ["2", "60", *["75.0"] * 4] in page.rows
    in_retrieval = [row for row in page.rows if row[0] == "Original CLIP in chunks" and row[1] in ("90.1", "91.1")]
    assert not in_retrieval and ["Long-CLIP", "91.1", "61.1", "51.1", "41.1"] in page.rows
    without = page_of(tell(results(tmp_path / "without")), tmp_path)
    assert "let the original CLIP read each chunk" in page.text and "read each chunk" not in without.text


def test_the_best_of_a_column_is_bold_whichever_way_is_better(tmp_path):
    report = generation_report()
    scores = [its["scores"] for its in report["encoders"].values()]
    scores[0]["dino_score"] = scores[2]["dino_score"]  # two are best alike
    source = page_of(tell([(tmp_path, report)]), tmp_path) and (tmp_path / "report.html").read_text()
    assert "<strong>10.34</strong>" in source and "<strong>12.34</strong>" not in source
    assert source.count("<strong>0.721</strong>") == 2 and "<strong>0.711</strong>" not in source
    assert "<strong>75.0</strong>" not in source  # all alike
    assert "<strong>40.1</strong>" in source and "<strong>42.1</strong>" not in source  # few empty places are filled


def test_last_sentences_with_enough_objects_stand_alone(tmp_path):
    rows = tell([(tmp_path, generation_report(objects=(0, 60, 30, FEW, FEW)))])["sentences"]
    assert [row["label"] for row in rows] == ["2", "3", "4", "5"]


def test_missing_parts_are_left_out_or_dashes(tmp_path):
    report = generation_report()
    del report["encoders"]["long-clip"]["scores"]["fid_own"], report["encoders"]["long-clip"]["scores"]["dino_score"]
    for its in report["encoders"].values():  # an earlier release's
        del its["scores"]["objects_precision"], its["scores"]["objects_f1"], its["scores"]["empty_filled"]
    page = page_of(tell([(tmp_path, report)]), tmp_path)  # no robustness, no short prompts, no images
    assert ["Long-CLIP", "–", "57.7", "–", "–"] in page.rows and ["Long-CLIP", "41.4", "–", "–", "–"] in page.rows
    assert "none are shown" in page.text and "R@1" not in page.text and "promises" not in page.text
    assert "None" not in page.text and "nan" not in page.text.lower()


def test_markup_stays_text(tmp_path):
    folder = tmp_path / "results"
    page = page_of(tell(results(folder, (MARKUP, "long-clip", "debias-clip"))), tmp_path)
    page.check_is_self_contained()
    assert len(page.all("img")) == 8
    # Of two examples an image's caption and a column; a column of the sentences, a row of each direction and of both
    # tables of scores, two differences and who is better in one.
    assert page.text.count(MARKUP) == 2 * 2 + 1 + 2 + 2 + 3


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
