"""`python -m research evaluate judge`: labels of people, and how well a judge agrees with them."""

import csv
import json

import pytest

from debias_diffusion.errors import UserError
from debias_diffusion.eval import judge as judges
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import Scene, Thing
from research import judge_labels
from research.judge_labels import evaluate_judge
from research.options import JudgeConfig


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(judges, "CONTROLS", 40)
    monkeypatch.setattr(judge_labels, "_SAMPLES", 100)


SHOWN, ABSENT = "Is there a red star in the top?", "Is there a blue ring in the left?"


def write_labels(folder, count, layout):
    """Images of toy scenes, half of them with the red star, and labels of two elements each; the last is bad."""
    (folder / "imgs").mkdir(parents=True)
    (folder / "split").mkdir()
    rows, entries = [], []
    for index in range(count):
        star = Thing("star", "red", "large", "top")
        render(Scene("white", (star,) if index % 2 else ()), 96).save(folder / "imgs" / f"{index}.png")
        for element, label in ((SHOWN, index % 2), (ABSENT, 0)):
            rows.append([f"imgs/{index}.png", f"Prompt {index}.", element, label])
        align = {"align": [SHOWN][: index % 2], "misalign": [ABSENT, *[SHOWN][index % 2 :]]}
        structure = {kind: {"align": [], "misalign": []} for kind in ("attribute_alignment", "relation_alignment")}
        entry = {"img_path": f"imgs/{index}.png", "en_prompt_text": f"Prompt {index}.", "Align ratio": 0.5}
        entries.append(entry | {"en_structured_data": structure | {"entities": [], "entity_alignment": align}})
    rows += [["imgs/none.png", "A.", SHOWN, 1], ["../imgs/0.png", "A.", SHOWN, 1], ["imgs/0.png", "A.", SHOWN, "maybe"]]
    if layout == "csv":
        with open(folder / "labels.csv", "w", newline="") as file:
            csv.writer(file).writerows([["image", "prompt", "element", "label"], *rows])
    else:
        (folder / "split" / "test.json").write_text(json.dumps([*entries, {}, 3, entries[0] | {"img_path": "../x"}]))
    return str(folder)


@pytest.mark.parametrize("layout", ["csv", "longt2ibench"])
def test_a_judge_is_compared_with_people_and_with_clip_score(tmp_path, layout, capsys):
    labels = write_labels(tmp_path / "labels", 16, layout)

    def run(judge, **changes):
        given = {"labels": labels, "output": str(tmp_path / "out"), "clip_score": "toy/clip", "max_bad": 0.2}
        return evaluate_judge(JudgeConfig(judge=judge, device="cpu", **given | changes))

    report = run("toy/checker")
    assert (report["labels"]["asked"], report["labels"]["wrong"]) == ([24, 8], [0, 0])
    assert len(report["left_out"]) == 3 and report["order"]["1-19"]["images"] == 16
    assert report["order"]["all"]["judge"]["value"] == pytest.approx(1) and report["fit"]
    assert "better than CLIPScore." in capsys.readouterr().out
    with pytest.raises(UserError, match="--max-bad"):
        run("toy/checker", max_bad=0)
    if layout == "csv":
        poor = run("toy/checker:0.4:0.4")
        assert not poor["fit"] and sum(poor["labels"]["wrong"]) > 4
        assert "no better than CLIPScore" in capsys.readouterr().out


def write_rows(folder, rows):
    """Labels of one image."""
    render(Scene("white", ()), 96).save(folder / "0.png")
    with open(folder / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([["image", "prompt", "element", "label"], *(["0.png", *row] for row in rows)])
    return folder


def test_labels_of_one_prompt_are_too_few(tmp_path, capsys):
    labels = write_rows(tmp_path, [["A prompt.", SHOWN, 0], ["A prompt.", ABSENT, 0]])
    config = {"labels": str(labels), "output": str(tmp_path / "out"), "device": "cpu", "clip_score": "toy/clip"}
    report = evaluate_judge(JudgeConfig(judge="toy/checker", **config))
    assert report["labels"]["wrong"] == [0, 0] and report["labels"]["interval_percent"] == [[None, None]] * 2
    assert report["fit"] is None and "labels of at least 6 prompts" in capsys.readouterr().out


def test_odd_labels_are_read_and_contradicting_ones_left_out(tmp_path):
    given = {"one?": "1.0", "true?": "True", "zero?": " 0", "false?": "FALSE", "both?": "1", "yes?": "yes"}
    rows = [["A prompt.", *row] for row in [*given.items(), ("both?", "0")]]
    _, [labelled], bad, count = judge_labels.read_labels(write_rows(tmp_path, rows))
    assert labelled.labels == {"one?": True, "true?": True, "zero?": False, "false?": False}
    assert [each.where for each in bad] == ["row 6", "row 7"] and count == 7
    assert "must be 1 or 0" in str(bad[0]) and "both 1 and 0" in str(bad[1])
