"""Judges: a tiny multimodal model in process and on a real server, the toy world's checker, and labels of people."""

import csv
import json
import math
import weakref

import numpy as np
import pytest
import torch
from helpers import openai_server, tiny_llava
from PIL import Image

from debias_diffusion.data.toy_scenes import toy_scene
from debias_diffusion.errors import FailedError, UserError
from debias_diffusion.eval import judge as judges
from debias_diffusion.eval import multimodal
from debias_diffusion.eval.judge import ToyJudge, ask_all, control, corrected, load_judge, object_question, p_yes
from debias_diffusion.eval.judge_labels import JudgeConfig, evaluate_judge
from debias_diffusion.eval.multimodal import ServerModel
from debias_diffusion.eval.session import ResultCache
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import Scene, Thing

CPU = torch.device("cpu")
QUESTIONS = ["Is there a red star in the top left?", "Is it large?", "Yes?", "Are there no stars, but one ring?"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return str(folder), *tiny_llava.save_judge(folder, QUESTIONS)


def load(name, batch=3, server=None):
    given = {"judge": name, "server": server, "batch_size": batch, "labels": "l", "output": "o", "precision": "fp32"}
    return load_judge(JudgeConfig(**given), CPU)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(multimodal, "WAITS", (0, 0, 0))
    monkeypatch.setattr(judges, "CONTROLS", 40)


def test_yes_is_every_token_that_reads_yes_and_neither_is_no_answer():
    top = [(" Yes", 0.4), ("YES\n", 0.1), ("no", 0.2), ("maybe", 0.2), ("yesterday", 0.1)]
    assert p_yes([(token, math.log(p)) for token, p in top]) == pytest.approx(0.5 / 0.7)
    assert p_yes([("maybe", 0.0), ("", -1.0)]) is None


def test_a_model_gives_the_same_in_batches_alone_and_on_a_server(tiny, tmp_path):
    folder, model, processor = tiny
    batched, single = (load(folder, batch) for batch in (3, 1))
    images = [tiny_llava.noise(np.random.default_rng(seed)) for seed in range(2)]
    found = [batched(image, QUESTIONS) for image in images]
    assert np.allclose(found, [single(image, QUESTIONS) for image in images], atol=1e-5)
    assert np.ptp(found) > 0.01  # or nothing is shown
    alive = weakref.ref(batched.model.model)
    del batched
    assert alive() is None  # at once: images are generated next
    with openai_server.serve(model, processor, failures=[503, 429]) as (url, requests):
        served = load(openai_server.MODEL, server=url + "/v1/")
        asked = [(lambda image=image: image, f"{at}", QUESTIONS) for at, image in enumerate(images)]
        for _ in range(2):  # the second time from the cache
            there = ask_all(ResultCache(tmp_path), lambda: served, {"judge": "tiny"}, asked, "ask")
            assert np.allclose(found, there, atol=1e-5)
        assert len(requests) == 2 * len(QUESTIONS) + 2  # two failed


@pytest.mark.parametrize(
    ("served", "error", "message"),
    [
        ({"logprobs": False}, UserError, "top_logprobs"),
        ({"failures": [422]}, UserError, "refuses the request: 422"),
        ({"failures": [500] * 9}, FailedError, "after 3 tries: 500"),
    ],
)
def test_servers_that_cannot_judge_are_refused(tiny, served, error, message):
    with openai_server.serve(*tiny[1:], **served) as (url, _):
        with pytest.raises(UserError, match="has no model 'other'. It has: tiny"):
            ServerModel(url, "other", 1)
        with pytest.raises(error, match=message):
            load(openai_server.MODEL, server=url)(Image.new("RGB", (40, 40)), QUESTIONS)
    with pytest.raises(FailedError, match="Start it"):
        ServerModel(url, openai_server.MODEL, 1)


def test_judges_that_are_blind_are_refused(tiny):
    with pytest.raises(UserError, match="does not tell what an image shows"):
        control(load(tiny[0]))


def test_the_checker_knows_and_errs_as_its_name_says():
    scene, _ = toy_scene("test/000000")
    questions = [object_question(thing) for thing in scene.things]
    for size, rates, p in ((48, "", 1.0), (300, ":1:1", 0.0)):
        assert ToyJudge(f"toy/checker{rates}")(render(scene, size), questions) == [p] * len(questions)
    numbers = control(ToyJudge("toy/checker:0.3:0.1"))
    for percent, (low, high) in zip((30, 10), numbers["interval_percent"], strict=True):
        assert low < percent < high
    with pytest.raises(UserError, match="no usable rates"):
        ToyJudge("toy/checker:2:0")


def test_known_errors_are_taken_out_of_a_share_and_widen_its_interval():
    drawn = np.random.default_rng(0).normal(62, 2, 10_000)  # 60% are true: 0.9 * 60 + 0.2 * 40

    def found(asked):
        return corrected(62.0, drawn, {"asked": [asked] * 2, "wrong": [asked // 5, asked // 10]})

    number = found(10**9)
    assert number["value"] == pytest.approx(60)
    assert number["high"] - number["low"] == pytest.approx(2 * 1.96 * 2 / 0.7, rel=0.05)
    assert found(100)["high"] - found(100)["low"] > 1.5 * (number["high"] - number["low"])  # the rates are uncertain


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
