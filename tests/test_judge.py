"""Judges: a tiny multimodal model on a real server, and the toy world's checker."""

import json
import math

import numpy as np
import pytest
from helpers import openai_server, tiny_llava
from PIL import Image

from debias_diffusion.data.toy_scenes import toy_scene
from debias_diffusion.errors import FailedError, UserError
from debias_diffusion.eval import judge as judges
from debias_diffusion.eval import multimodal
from debias_diffusion.eval.judge import Questioning, ToyJudge, control, corrected, load_judge, object_question
from debias_diffusion.eval.multimodal import ServerModel, p_yes
from debias_diffusion.eval.options import Judging
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import Scene, Thing

QUESTIONS = ["Is there a red star in the top left?", "Is it large?", "Yes?", "Are there no stars, but one ring?"]


@pytest.fixture(scope="module")
def tiny():
    return tiny_llava.judge(QUESTIONS)


def served(url, **options):
    return Judging(judge=openai_server.MODEL, server=url, batch_size=3, **options)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(multimodal, "WAITS", (0, 0, 0))
    monkeypatch.setattr(judges, "CONTROLS", 40)


def choice(*top):
    tokens = [{"token": token, "logprob": value} for token, value in top]
    return {"logprobs": {"content": [{"top_logprobs": tokens}]}}


def test_yes_is_every_token_that_reads_yes_and_less_than_half_of_the_mass_is_no_answer():
    top = [(" Yes.", 0.2), ("YES\n", 0.1), ("ĠYes", 0.1), ("▁no", 0.2), ("maybe", 0.2), ("yesterday", 0.1)]
    assert p_yes(choice(*((token, math.log(p)) for token, p in top))) == pytest.approx(0.4 / 0.6)
    assert p_yes(choice(("<think>", -0.01), ("Yes", -5.0))) is p_yes(choice()) is None


HEAD = b"HTTP/1.1 200 OK\r\n"


def odd(*choices, **content):
    return [HEAD + b"\r\n", json.dumps({"data": [{"id": openai_server.MODEL}], "choices": choices} | content).encode()]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([b"HTTP/1.1 422 No\r\n\r\nUnexpected fields: ", b"logprobs"], "answer: 422, Unexpected fields: logprobs"),
        ([b"HTTP/1.1 500 Broken\r\n\r\n"], "3 tries: 500, Broken. Check that it runs"),
        ([HEAD, b"Content-Length: 99\r\n\r\n{"], "3 tries: .* 99"),
        ([HEAD, b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"], "3 tries: .*chunked"),
        ([b"garbage\r\n\r\n"], "3 tries: .*garbage"),
        ([HEAD, b"\r\n", *[b" " * 10**6] * 20], "3 tries: .*8 MB"),
        ([HEAD, b"\r\n", *[b" "] * 500], "3 tries: .*0.1 seconds"),
        ([HEAD, b"\r\n", b"[" * 200_000], "answer: 200, \\["),
        ([b"HTTP/1.1 302 Found\r\nLocation: http://other/v1/models\r\n\r\n"], "redirects to http://other/v1. Give"),
        (odd(error={"message": "over\x1b[2Jloaded"}), "answer: 200, over\N{REPLACEMENT CHARACTER}.2Jloaded"),
        (odd(data=[{"id": "\x1b"}] * 10**5), "has no model 'tiny'. It has: \N{REPLACEMENT CHARACTER}, [^\x1b]{,310}$"),
        *((odd(each), "needs top_logprobs") for each in (None, "yes", {"logprobs": None}, choice((None, -1.0)))),
        *((odd(choice(("Yes", each))), "needs top_logprobs") for each in (None, math.nan, "x", 1000)),
    ],
)
def test_odd_answers_are_told_in_a_sentence(parts, message, monkeypatch):
    monkeypatch.setattr(multimodal, "PATIENCE", 0.1 if len(parts) > 100 else 9)
    with openai_server.serve_replies(parts=parts) as (url, _), pytest.raises(UserError, match=message):
        ServerModel(url, openai_server.MODEL, 3)(Image.new("RGB", (8, 8)), QUESTIONS)
    with pytest.raises(FailedError, match="refused"):  # it ended
        ServerModel(url, openai_server.MODEL, 1)


def test_a_server_is_asked_by_several_questions_at_once_and_again_where_it_failed(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(judges, "LEAST_GAP", -1.0)  # it is random
    monkeypatch.setattr(multimodal, "LEAST", 1e-9)
    monkeypatch.setattr(judges, "CONTROLS", 2)
    images = [tiny_llava.noise(np.random.default_rng(seed)) for seed in range(2)]
    asked = [(lambda image=image: image, f"{at}", QUESTIONS) for at, image in enumerate(images)]
    with openai_server.serve(*tiny, failures=[503, 429]) as (url, requests):
        alone = ServerModel(url + "/v1/", openai_server.MODEL, 1)
        found = [alone(image, QUESTIONS) for image in images]
        assert len(requests) == 2 * len(QUESTIONS) + 2 and np.ptp(found) > 0.01
        assert all(request["messages"][0]["content"][1]["text"].endswith("yes or no.") for request in requests)
        Questioning(served(url), tmp_path)  # the control's answers are kept too
        requests.clear()
        for _ in range(2):  # the second time from the cache
            assert np.allclose(found, Questioning(served(url), tmp_path).ask(asked, "ask"), atol=1e-5)
        assert len(requests) == 2 * len(QUESTIONS)
        monkeypatch.setattr(judges, "LEAST", 0.4)  # answers that were read by another rule are not taken
        Questioning(served(url), tmp_path).ask(asked, "ask")
        assert len(requests) == 4 * len(QUESTIONS) + 4  # the control's too


def test_judges_that_are_blind_are_refused(tiny, monkeypatch):
    monkeypatch.setattr(multimodal, "LEAST", 1e-9)
    with (
        openai_server.serve(*tiny) as (url, _),
        pytest.raises(UserError, match="does not tell what an image shows"),
    ):
        control(load_judge(served(url)))


def test_the_checker_knows_and_errs_as_its_name_says():
    scene, _ = toy_scene("test/000000")
    questions = [object_question(thing) for thing in scene.things]
    for size, rates, p in ((48, "", 1.0), (300, ":1:1", 0.0)):
        assert ToyJudge(f"toy/checker{rates}")(render(scene, size), questions) == [p] * len(questions)
    star = 'Does this image show "You can see a small star of red colour in the top left."?'
    above = star.replace("in", "above the blue ring in")
    red_star = Scene("white", (Thing("star", "red", "large", "top left"),))
    assert ToyJudge("toy/checker")(render(red_star), [star, star.replace("star", "ring"), above]) == [1.0, 0.0, None]
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
    rates = {"asked": [100, 100], "wrong": [20, 10]}
    few = corrected(15.0, drawn / 62 * 15, rates)  # fewer than the judge's wrong yes alone
    assert few["value"] == few["low"] == 0 < few["high"] < 10
    assert corrected(100.0, np.full(10_000, 100.0), rates) == {"value": 100.0, "low": None, "high": None}
