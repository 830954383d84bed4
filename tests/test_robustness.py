"""Sentence edits, and recall under them."""

import json
from pathlib import Path

import pytest
import skimage
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tiny_clip import save_tiny_clip

from debias_diffusion.data import read_sharegpt4v
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval
from debias_diffusion.eval.robustness import (
    EDITS,
    RobustnessConfig,
    compare,
    edit_caption,
    evaluate_robustness,
    plot,
)
from debias_diffusion.sentences import split_sentences

PHOTOGRAPHS = Path(__file__).parent / "photographs" / "captions.json"


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory) -> str:
    return save_tiny_clip(tmp_path_factory.mktemp("tiny-clip"))


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ("keep", ["1.", "12.", "123.", "1234.", "12345."]),
        ("move2", ["1.", "21.", "213.", "2134.", "21345."]),
        ("move4", ["1.", "21.", "321.", "4231.", "42315."]),
        ("remove", ["1.", "2.", "23.", "234.", "2345."]),
    ],
)
def test_edits_of_one_to_five_sentences(edit, expected):
    sentences = [
        "A cat sits here.",
        "Its fur is red!",
        "Is it asleep?",
        "The wall is 2.5 m high.",
        "No one else is there",
    ]

    def named(digits):
        return " ".join(sentences[int(digit) - 1] for digit in digits.rstrip("."))

    for length, digits in enumerate(expected, 1):
        assert edit_caption(" ".join(sentences[:length]), edit) == named(digits)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=9))
def test_edits_leave_their_input_alone_and_lose_at_most_the_first_sentence(sentences):
    before = list(sentences)
    for name, edit in EDITS.items():
        edited = edit(sentences)
        assert sentences == before and edited is not sentences
        if name == "remove" and len(sentences) > 1:
            assert edited == sentences[1:]
        else:
            assert sorted(edited) == sorted(sentences)
    for name in ("move2", "move4"):  # swaps undo themselves
        assert EDITS[name](EDITS[name](sentences)) == sentences
    if len(sentences) == 2:
        assert EDITS["move2"](sentences) == EDITS["move4"](sentences)


def test_real_captions_change_under_every_edit():
    for record in read_sharegpt4v(PHOTOGRAPHS).records:
        sentences = split_sentences(record.caption)
        assert 6 <= len(sentences) <= 12
        assert edit_caption(record.caption, "keep") == record.caption
        assert edit_caption(record.caption, "move4").startswith(sentences[3])
        assert edit_caption(record.caption, "move2").startswith(sentences[1] + " " + sentences[0])
        assert sentences[0] not in edit_caption(record.caption, "remove")


def test_drops_and_share_kept():
    recall = {
        "keep": {"text_to_image": 80.0, "image_to_text": 0.0},
        "move2": {"text_to_image": 70.0, "image_to_text": 0.0},
        "move4": {"text_to_image": 90.0, "image_to_text": 5.0},
        "remove": {"text_to_image": 20.0, "image_to_text": 0.0},
    }
    compared = compare(recall)
    assert compared["drop_points"]["move2"]["text_to_image"] == 10.0
    assert compared["drop_points"]["move4"] == {"text_to_image": -10.0, "image_to_text": -5.0}
    assert compared["drop_points"]["keep"] == {"text_to_image": 0.0, "image_to_text": 0.0}
    assert compared["kept_without_summary_percent"] == {"text_to_image": 25.0, "image_to_text": None}
    figure = plot(recall)
    assert [[bar.get_height() for bar in axes.patches] for axes in figure.axes] == [[80, 70, 90, 20], [0, 0, 5, 0]]


def test_evaluate_robustness_on_photographs(tiny_clip, tmp_path, capsys):
    settings = {"model": tiny_clip, "data": str(PHOTOGRAPHS), "images": skimage.data_dir, "batch_size": 5}
    report = evaluate_robustness(RobustnessConfig(output=str(tmp_path / "robustness"), **settings))
    assert report == json.loads((tmp_path / "robustness" / "robustness.json").read_text())
    assert report["pairs"] == 12 and report["one_sentence_captions"] == 0 and report["left_out"] == []
    assert list(report["recall_at_1_percent"]) == ["keep", "move2", "move4", "remove"]
    whole = evaluate_retrieval(RetrievalConfig(output=str(tmp_path / "retrieval"), **settings))
    for direction, recalls in whole["recall_percent"].items():
        assert report["recall_at_1_percent"]["keep"][direction] == recalls["R@1"]
    with Image.open(tmp_path / "robustness" / "robustness.png") as image:
        assert image.format == "PNG" and image.width > image.height > 200
        assert len(image.convert("RGB").getcolors(1 << 24)) > 10
    assert "kept without summary" in capsys.readouterr().out


def test_edits_reach_the_encoder(tiny_clip, tmp_path):
    # Captions that agree but for the first sentence are all alike once it is removed: R@1 falls to 0, because ties
    # do not flatter. What the edits do to features is thus seen in the numbers.
    entries = json.loads(PHOTOGRAPHS.read_text())[:4]
    for entry in entries:
        first = split_sentences(entry["conversations"][1]["value"].replace("\n", " "))[0]
        entry["conversations"][1]["value"] = f"{first} It is a photograph."
    data = tmp_path / "data.json"
    data.write_text(json.dumps([*entries, dict(entries[0], conversations=[{}, {"value": "One sentence only."}])]))
    report = evaluate_robustness(
        RobustnessConfig(model=tiny_clip, data=str(data), images=skimage.data_dir, output=str(tmp_path))
    )
    assert report["one_sentence_captions"] == 1
    assert report["recall_at_1_percent"]["move2"] == report["recall_at_1_percent"]["move4"]
    assert report["recall_at_1_percent"]["remove"]["image_to_text"] <= 20.0
