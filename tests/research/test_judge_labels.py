"""`python -m research evaluate judge`: labels of people, and how well a judge agrees with them."""

import csv
import json

import pytest

from debias_diffusion.errors import UserError
from debias_diffusion.eval import judge as judges
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import Scene, Thing
from research.judge_labels import evaluate_judge
from research.options import JudgeConfig


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(judges, "CONTROLS", 40)


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
    poor = run("toy/checker:0.4:0.4")
    assert not poor["fit"] and sum(poor["labels"]["wrong"]) > 4
    assert "no better than CLIPScore" in capsys.readouterr().out
