"""Which sentences are in the image: the sets of prompts, the scores, and runs with the toy world's checker."""

import csv
import json

import numpy as np
import pytest
from helpers import openai_server
from helpers.reports import check_report

from debias_diffusion.data.toy_scenes import toy_scene
from debias_diffusion.errors import UserError
from debias_diffusion.eval import judge as judges
from debias_diffusion.eval.images.following import Answers, FollowingConfig, compare, evaluate_following, score, shown
from debias_diffusion.eval.images.generation import GenerationConfig, evaluate_generation
from debias_diffusion.eval.images.prompt_sets import Places, Prompt, Question, band, read_prompt_set, statement
from debias_diffusion.toyworld.render import render

PROMPTS = {"0": "A red truck stands in front of a tree.", "drawtext1": "Two cats, both black. They sleep on a sofa."}
ROWS = [
    ("0", 1, "0", "entity", "entity - whole (truck)", "Is there a truck?"),
    ("0", 2, "1", "attribute", "attribute - color (truck, red)", "Is the truck red?"),
    ("0", 4, "1,2", "relation", "relation - spatial (truck, tree, in front of)", "Is it in front?"),
    ("drawtext1", 1, "0", "entity", "entity - whole (cats)", "Are there cats?"),
    ("drawtext1", 2, "1", "other", "other - count (sofa, ==1)", "Is there one sofa?"),
]
BAD_ROWS = [
    ("0", 5, "none", "entity", "", "Nothing?"),
    ("0", 1, "0", "entity", "", "The first again?"),
    ("0", 8, "0", "entity", "", " "),
    ("nowhere", 1, "0", "entity", "", "Is there a prompt?"),
]
DPG_COLUMNS = "item_id proposition_id dependency category_broad tuple question_natural_language".split()


def write_sets(folder):
    """Each published layout, of entries written for this test, with bad ones. Returns {set: its name}."""
    (folder / "dpg" / "prompts").mkdir(parents=True)
    for name, text in (PROMPTS | {"empty": " \n", "unasked": "A sea."}).items():
        (folder / "dpg" / "prompts" / f"{name}.txt").write_text(text)
    with open(folder / "dpg" / "dpg_bench.csv", "w", newline="") as file:
        csv.writer(file).writerows([DPG_COLUMNS, *ROWS, *BAD_ROWS])
    (folder / "core").mkdir()
    entry = {"Main Class": "Composition", "Sub Class": "Multi-Instance", "Prompt": "A hall. It holds two lamps."}
    entry["Checklist"] = [{"question": "Are there two lamps?", "tags": ["0-hop"]}, {"question": "Is it a hall?"}]
    bad = {"C-MI-002": {"Prompt": "A hall."}, "C-MI-003": 3}
    (folder / "core" / "C-MI.json").write_text(json.dumps({"C-MI-001": entry} | bad))
    gen = {"prompt": "four white bicycles", "atom_count": 2, "skills": ["count", "attribute"]}
    gen["vqa_list"] = [["How many bicycles are in the image?", "four"], ["Are the bicycles white?", "Yes"]]
    lines = [json.dumps(gen), json.dumps(gen | {"skills": ["count"]}), "{"]
    (folder / "geneval2.jsonl").write_text("\n".join(lines))
    (folder / "uni").mkdir()
    long, short = "A quiet, wide lawn. A dog sleeps, and red kites fly above it.", "A dog sleeps below two kites."
    points = {"Testpoints": ["Action", "Color"], "Testpoint Description": ["A dog sleeps", "(red) kites in the sky"]}
    missing_comma = json.dumps(points).replace('", "', '" "', 1)
    for ending, text, of_second in (("_long", long, missing_comma), ("", short, json.dumps(points))):
        rows = [("index", "prompt_en", "sub_dims_en"), (0, text, json.dumps(points)), (1, text, of_second)]
        with open(folder / "uni" / f"test_prompts_en{ending}.csv", "w", newline="") as file:
            csv.writer(file).writerows(rows)
    long = {"instruction": "A porch at dusk. A cat sits on it.", "label": [{"Object": "A porch and a cat."}]}
    (folder / "longbench.jsonl").write_text(json.dumps(long))
    mine = [{"prompt": "A cat. A dog.", "questions": ["Is there a dog?"]}, {"prompt": 3}, {"prompt": "a" * 20_001}]
    mine += [{"prompt": "A cat.", "questions": "Is there?"}, {"prompt": "A cat.", "questions": [" "]}]
    mine += [{"prompt": "A cat\ud83d."}, {"prompt": "A cat\0."}, {"prompt": "A cat.", "questions": ["\ud83d?"]}]
    (folder / "mine.jsonl").write_text("\n".join(map(json.dumps, mine)))
    (folder / "mine.txt").write_bytes(b"A cat. A dog sits.\n\n\xff\n")
    files = {"dpg": "dpg", "corebench": "core", "geneval2": "geneval2.jsonl", "longbench": "longbench.jsonl"}
    files["unigenbench"] = "uni"
    names = {name: f"{name}:{folder / file}" for name, file in files.items()}
    return names | {file: str(folder / file) for file in ("mine.jsonl", "mine.txt")}


def test_published_sets_are_read_and_their_bad_entries_named(tmp_path):
    found = {name: read_prompt_set(place) for name, place in write_sets(tmp_path).items()}
    asked = {
        name: [(q.text, q.sentence, q.category) for prompt in each.prompts for q in prompt.questions]
        for name, each in found.items()
    }
    how_many = 'How many bicycles are in the image? Is the answer "four"?'
    assert asked == {
        "dpg": [
            *(("Is there a truck?", 1, "entity"), ("Is the truck red?", 1, "attribute")),
            *(("Is it in front?", 1, "relation"), ("Are there cats?", 1, "entity"), ("Is there one sofa?", 2, "other")),
        ],
        "corebench": [("Are there two lamps?", 2, "Multi-Instance"), ("Is it a hall?", 1, "Multi-Instance")],
        "geneval2": [(how_many, 1, "count"), ("Are the bicycles white?", 1, "attribute")],
        "longbench": [(statement("A porch at dusk."), 1, ""), (statement("A cat sits on it."), 2, "")],
        "unigenbench": [(statement("A dog sleeps"), 2, "Action"), (statement("(red) kites in the sky"), 2, "Color")],
        "mine.jsonl": [("Is there a dog?", 2, "")],
        "mine.txt": [(statement("A cat."), 1, ""), (statement("A dog sits."), 2, "")],
    }
    # The empty prompt, that without rows, and that of a row without a prompt are bad too.
    assert [len(each.bad) for each in found.values()] == [len(BAD_ROWS) + 2, 2, 2, 0, 1, 7, 1]
    _, red, front = found["dpg"].prompts[0].questions
    assert (red.position, front.position, front.parents) == (3, 9, (1, 2))  # the last of its words
    told = found["unigenbench"]
    assert str(told.bad[0]).startswith("index 1: unusable prompt (bad JSON: Expecting ',' delimiter")
    ((long,), (short,)) = told.prompts, told.short  # of the scene whose rows are both usable
    assert [one.position for one in long.questions] == [9, 13] and [one.position for one in short.questions] == [3, 6]
    (tmp_path / "dpg" / "dpg_bench.csv").write_text("item_id,text\n0,A red truck\n")
    for name, message in (("dpg", "Give a file"), ("gone.txt", "no prompt set"), (f"dpg:{tmp_path}/dpg", "lacks")):
        with pytest.raises(UserError, match=message):
            read_prompt_set(name)


def test_a_question_stands_where_the_last_of_its_words_is_first_read():
    places = Places("A dog, low-flat and Red. Near two birds and a dog of snow.")
    words = {"dog": (1, 2), "RED": (1, 8), "flat": (1, 6), "bird": (2, 12), "dogs": (1, 2), "Is the dog red?": (1, 8)}
    words |= {"snow": (2, 17), "a dog of snow": (2, 17), "two BIRDS and a dog": (2, 15)}  # the last two word for word
    words |= dict.fromkeys(("now fla", "", "is there a"), (None, None))  # not inside snow or flat
    assert {text: places.of_words(text) for text in words} == words
    assert [band(position) for position in (1, 19, 20, 75, 76, 400)][1:5] == ["1-19", "20-39", "60-75", "76-111"]


def question(sentence, number=0, parents=(), position=5):
    return Question("?", sentence, position, "", number, parents)


def test_scores_in_a_closed_form():
    chain = (question(1, 1), question(2, 2, (1,)), question(2, 3, (2,), 80))
    assert shown(chain, [False, True, True]) == [False] * 3 and shown(chain[::-1], [True] * 3) == [True] * 3
    prompts = [
        Prompt(f"{name}{number}", "", questions, f"{name}{number}")
        for number in range(3)
        for name, questions in (("p", chain), ("q", (question(1, 1),)))
    ]
    # Two images of each prompt; one question of each p has no answer.
    answers = Answers.of(prompts, [[0.9, 0.4, 0.9], [0.8, 0.8, None], [1.0], [0.25]] * 3, 2)
    numbers = score(answers)
    means = {name: number["value"] for name, number in numbers["scores"].items()}
    assert means["mean_p"] == pytest.approx(100 * np.mean([2.2 / 3, 2.1 / 3, 1, 0.25]))
    assert means["geometric_mean"] == pytest.approx(100 * np.mean([0.324 ** (1 / 3), 0.32 ** (1 / 3), 1, 0.25]))
    assert means["shown"] == pytest.approx(100 * np.mean([1 / 3, 2 / 3, 1, 0]))
    by_sentence = {name: (line["questions"], line["value"]) for name, line in numbers["by_sentence"].items()}
    assert by_sentence == {"1": (12, 75), "2": (12, 25)}
    assert numbers["by_sentence"]["1"]["low"] == pytest.approx(50 + 50 / 6)  # of one p and five q
    assert [line["value"] for line in numbers["by_position"].values()] == [pytest.approx(400 / 6), 0]
    every = Answers.of(prompts, ([[1.0] * 3] * 2 + [[1.0]] * 2) * 3, 2)
    (first, *lines) = compare({"some": answers, "all": every})
    assert (first["a"], first["b"], first["difference"]) == ("all", "some", pytest.approx(100 - means["mean_p"]))
    assert {line["score"]: line["difference"] for line in lines}["shown, sentence 2"] == pytest.approx(75)


TOY = {"prompts": "toy/test", "judge": "toy/checker", "base": "toy/sdxl", "device": "cpu", "steps": 2, "limit": 6}


def test_the_curve_by_sentence_is_that_of_the_toy_worlds_own_scores(tmp_path, monkeypatch, coarse_results, capsys):
    monkeypatch.setattr(judges, "CONTROLS", 20)
    given = {"encoders": ["original"], "output": str(tmp_path)}
    report = evaluate_following(FollowingConfig(**given, **TOY))
    check_report(report)
    assert "unanswered questions, on all images" in capsys.readouterr().out
    same = {name: TOY[name] for name in ("base", "device", "steps", "limit")} | {"data": "toy/test"}
    truth = evaluate_generation(GenerationConfig(**given, **same))
    [found], [expected] = (list(one["encoders"].values()) for one in (report, truth))
    lines = expected["scores"]["objects_right_by_sentence"]
    assert [*found["by_sentence"]] == [str(line["sentence"]) for line in lines]
    for number, line in zip(found["by_sentence"].values(), lines, strict=True):
        names = ("value", "low", "high")
        assert [number[name] for name in names] == pytest.approx([line[name] for name in names], nan_ok=True)
        assert number["questions"] == line["objects"]
    assert (tmp_path / "following.html").read_text().count("<img ") == 6
    asked = [question["sentence"] for prompt in report["records"] for question in prompt["questions"]]
    answers = [p for of_image in found["answers"] for p in of_image]
    for name, number in found["by_sentence"].items():  # which anyone can compute again
        yes = [p > 0.5 for p, sentence in zip(answers, asked, strict=True) if str(sentence) == name]
        assert number["value"] == pytest.approx(100 * np.mean(yes))


def test_scenes_told_twice_are_asked_the_same_and_compared_by_scene(tmp_path, monkeypatch, coarse_results, capsys):
    monkeypatch.setattr(judges, "CONTROLS", 20)
    given = TOY | {"prompts": "toy/long-test", "limit": 3, "steps": 5, "encoders": ["cut:original", "original"]}
    report = evaluate_following(FollowingConfig(**given, output=str(tmp_path)))
    asked = [len(prompt["questions"]) for prompt in report["records"]]
    assert asked[:3] == asked[3:] and "long - short" in capsys.readouterr().out
    shares = {}
    for label, numbers in report["encoders"].items():
        of_long, again, of_short = (numbers["answers"][at : at + 3] for at in (0, 3, 6))
        assert again == of_long  # in the toy world both prompts have the same questions
        shares[label] = [100 * np.mean([np.mean(image) for image in each]) for each in (of_short, of_long)]
        (short, long), twins = shares[label], numbers["twins"]
        assert [twins[name]["value"] for name in ("short prompts", "long prompts")] == pytest.approx([short, long])
        assert twins["long - short"]["difference"] == pytest.approx(long - short)
        assert numbers["scores"]["shown"]["value"] == pytest.approx(long)
    (cut, (short, whole)) = shares.values()
    assert short == cut[0] > 0 and cut[1] != whole  # a short prompt is read alike, from the same noise
    assert twins[f"long - long of {next(iter(shares))}"]["difference"] == pytest.approx(whole - cut[1])


def test_one_image_is_asked_about_each_sentence_of_its_prompt(tmp_path, capsys):
    scene, _ = toy_scene("short-test/000002")
    render(scene, 192).save(tmp_path / "image.png")
    there = scene.things[0]
    sentences = [f"The {there.place} holds a {there.kind} that is small and {there.colour}.", "A lamp. It is lit"]
    config = {"image": str(tmp_path / "image.png"), "prompt": " ".join(sentences)}

    def reply(image, question, request):
        p = 0.75 if there.place in question else 0.2
        assert image.size == (192, 192)
        yes, no = ({"token": word, "logprob": float(np.log(share))} for word, share in (("Yes", p), ("No", 1 - p)))
        return [{"token": "I", "logprob": 0.0}] if "lit" in question else [yes, no]

    with openai_server.serve_replies(reply) as (url, requests):
        found = evaluate_following(FollowingConfig(**config, judge=openai_server.MODEL, server=url))
        assert len(requests) == 3  # and no questions about other images
    p, q = pytest.approx(0.75), pytest.approx(0.2)
    assert found["sentences"] == [(sentences[0], p), ("A lamp.", q), ("It is lit", None)]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["p(yes)", "0.75", "0.20", "-"] and lines[2].startswith("2. A lamp.")
    checked = evaluate_following(FollowingConfig(**config, judge="toy/checker"))
    assert [p for _, p in checked["sentences"]] == [1.0, None, None]
    assert [file.name for file in tmp_path.iterdir()] == ["image.png"]  # nothing is written
    for change, message in (({"image": "no.png"}, "image 'no.png' cannot be"), ({"prompt": " "}, "it is empty")):
        with pytest.raises(UserError, match=message):
            evaluate_following(FollowingConfig(**config | change, judge="toy/checker"))
