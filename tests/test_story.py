"""The story of the toy world: its scores and examples, and its page with whatever a name holds."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
from helpers.html_page import Page
from helpers.story import CUT, WHOLE, generation_report, page_of, results
from PIL import Image

from debias_diffusion.eval.story import examples, tell
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import PLACES, Scene, Thing, scene

NAMES = (CUT, WHOLE, "Long-CLIP", "DeBias-CLIP", "DeBias-CLIP for SDXL")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    folder = tmp_path_factory.mktemp("results")
    return page_of(tell(results(folder)), folder)


def test_it_begins_with_what_reading_whole_gains(tmp_path):
    lead = tell(results(tmp_path))["lead"]
    assert "5 long prompts" in lead and lead.index("41%") < lead.index("31%")


def test_the_story_is_of_long_captions_and_of_any_encoders(tmp_path):
    assert tell([(tmp_path, generation_report(data="toy/short-test"))]) is None
    # Without images, short prompts and the encoders of the lead.
    page = page_of(tell([(tmp_path, generation_report(("long-clip", "runs/b")))]), tmp_path)
    assert ["runs/b", "41.4 (40.4 to 43.4)", "85.0", "10.0", "41.1", "-"] in page.rows
    assert "none are shown" in page.text and "stock SDXL does" not in page.text


def test_the_page_has_scores_and_examples_with_their_reference(page):
    page.check_is_self_contained()
    # (20 * 45% + 10 * 0%) / 30 of the later objects; short prompts have the same scores here
    assert [row[0] for row in page.rows[1:6]] == list(NAMES)
    assert ["DeBias-CLIP", "61.4 (60.4 to 63.4)", "75.0", "30.0", "43.1", "61.4"] in page.rows
    images = page.all("img")
    assert [image["alt"].split(":")[0] for image in images] == 2 * ["Reference image", *NAMES]
    source = images[6]["src"].removeprefix("data:image/png;base64,")  # the first arrangement of the next family
    shown = Image.open(io.BytesIO(base64.b64decode(source))).resize((48, 48), Image.Resampling.BOX)
    assert np.abs(np.asarray(shown, np.float32) - np.asarray(render(scene("test", 4)), np.float32)).mean() < 2
    assert all(sentence.text in page.text for sentence in caption("test", 0).sentences)


def test_an_example_marks_every_place_that_is_right_wrong_or_extra(tmp_path):
    """Of the first object the size is wrong, of the second the colour, the third is missing, and one is extra."""
    asked = scene("test", 0)
    first, second, third, *others = asked.things
    empty = next(place for place in PLACES if place not in {thing.place for thing in asked.things})
    size = "small" if first.size == "large" else "large"
    colour = "green" if second.colour == "red" else "red"
    drawn = (replace(first, size=size), replace(second, colour=colour), *others, Thing("cross", "pink", "large", empty))
    render(Scene("black" if asked.background == "white" else "white", drawn)).save(tmp_path / "000000.png")
    (example,) = examples({"image": ["test/000000"], "group": ["test/000000"]}, {"Worse": tmp_path})
    (worse,) = example["generated"]
    assert worse["score"] == f"{1 + len(others)} of {3 + len(others)} objects right"
    words = {first.place: f"right, but {size}", second.place: f"{colour} {second.kind}", third.place: "missing"}
    words |= {empty: "pink cross, for which nobody asked", "background": "another"}
    text = " ".join(f"{place.capitalize()}: {text}." for place, text in words.items())
    assert worse["alt"] == f"Worse: {worse['score']}. {text}"
    verdicts = {(mark["column"], mark["row"]): mark["verdict"] for mark in worse["marks"]}
    expected = {thing.place: "right" for thing in (first, *others)} | {empty: "extra"}
    expected |= {second.place: "wrong", third.place: "wrong"}
    assert verdicts == {PLACES[place]: verdict for place, verdict in expected.items()}
