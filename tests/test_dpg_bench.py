"""DPG-Bench: the published layout, the rules of the score, the position of a proposition, and runs with tiny models."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.memory import Watched
from helpers.reports import check_report
from helpers.vocabulary import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import (
    BertTokenizer,
    BlipConfig,
    BlipForQuestionAnswering,
    BlipImageProcessor,
    BlipProcessor,
    ViltConfig,
    ViltForQuestionAnswering,
    ViltImageProcessor,
    ViltProcessor,
)

from debias_diffusion.errors import UserError
from debias_diffusion.eval.images import dpg_bench
from debias_diffusion.eval.images.dpg_bench import (
    DpgBenchConfig,
    VqaModel,
    evaluate_dpg_bench,
    find_images,
    load_image,
    tables,
)
from debias_diffusion.eval.images.dpg_questions import (
    COLUMNS,
    Proposition,
    band,
    parse_rows,
    proposition_words,
    read_dpg_bench,
    token_position,
)
from debias_diffusion.eval.images.dpg_scores import compare_outcomes, holds, outcomes, score
from debias_diffusion.eval.images.rendered import folder_names

CPU = torch.device("cpu")
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] is there a the truck red cat ? yes no".split()
PROMPTS = {"0": "A red truck stands in front of a tree.", "drawtext1": "Two cats, both black, sleep on a sofa."}
ROWS = [
    ("0", 1, "0", "entity", "whole", "entity - whole (truck)", "Is there a truck?"),
    ("0", 2, "1", "attribute", "color", "attribute - color (truck, red)", "Is the truck red?"),
    ("0", 3, "0", "entity", "whole", "entity - whole (tree)", "Is there a tree?"),
    ("0", 4, "1,3", "relation", "spatial", "relation - spatial (truck, tree, in front of)", "Is it in front?"),
    ("drawtext1", 1, "0", "entity", "whole", "entity - whole (cats)", "Are there cats?"),
    ("drawtext1", 2, "1", "other", "count", "other - count (cats, ==2)", "Are there two cats?"),
]


def csv_row(item, *values, keywords=""):
    return dict(zip(COLUMNS, map(str, (item, PROMPTS.get(item, ""), keywords, *values)), strict=True))


def write_bench(root, rows=ROWS, prompts=PROMPTS):
    (root / "prompts").mkdir(parents=True)
    for item, text in prompts.items():
        (root / "prompts" / f"{item}.txt").write_text(text)
    with open(root / "dpg_bench.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(csv_row(*row) for row in rows)
    return str(root)


def noise(seed, side=32):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def write_images(root):
    """A grid for the one prompt, separate files for the other."""
    (root / "drawtext1").mkdir(parents=True)
    noise(0, 64).save(root / "0.png")
    for index in range(4):
        noise(1 + index).save(root / "drawtext1" / f"{index}.png")
    return str(root)


SIZE = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 2}
TEXT = SIZE | {"vocab_size": len(WORDS), "initializer_range": 0.4}
VISION = {"image_size": 32, "patch_size": 16}


def save_vqa(folder, model, images, processor):
    model.save_pretrained(folder)
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)}, model_max_length=40)
    processor(images, tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def vilt(tmp_path_factory):
    torch.manual_seed(0)
    config = ViltConfig(**TEXT, **VISION, id2label={0: "yes", 1: "no"}, label2id={"yes": 0, "no": 1})
    images = ViltImageProcessor(size={"shortest_edge": 32}, size_divisor=16)
    return save_vqa(tmp_path_factory.mktemp("vilt"), ViltForQuestionAnswering(config), images, ViltProcessor)


@pytest.fixture(scope="module")
def blip(tmp_path_factory):
    torch.manual_seed(0)
    special = {"bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3, "pad_token_id": 0}
    config = BlipConfig(text_config=TEXT | special | {"encoder_hidden_size": 32}, vision_config=SIZE | VISION)
    images = BlipImageProcessor(size={"height": 32, "width": 32})
    return save_vqa(tmp_path_factory.mktemp("blip"), BlipForQuestionAnswering(config), images, BlipProcessor)


def chain(*parents, category="entity"):
    """Propositions 1, 2, ... with these parents."""
    return [Proposition(n, above, category, "whole", f"{n}?", ()) for n, above in enumerate(parents, 1)]


# ---- the published layout


def test_bad_rows_are_named_with_what_depends_on_them(tmp_path):
    rows = [
        (5, "none", "Is there nothing?"),
        (6, "5", "Is it on nothing?"),
        (7, "6", "Is that on it?"),
        (8, "9", "Round?"),
        (9, "8", "And round?"),
        (4, "0", "Twice?"),
        (10, "0", " "),
    ]
    rows = [("0", number, parents, "entity", "whole", "", question) for number, parents, question in rows]
    rows = [*ROWS, *rows, ("nowhere", 1, "0", "entity", "whole", "", "Is there a prompt?")]
    prompts = PROMPTS | {"unasked": "A sea.", "empty": " \n", "long": "a" * 20_001}
    bench = read_dpg_bench(write_bench(tmp_path, rows, prompts))
    assert bench.prompts == PROMPTS
    first, second, _, fourth = bench.propositions["0"]  # the first row too, which the published script skips
    assert (first.number, first.question, first.parents) == (1, "Is there a truck?", ())
    assert (second.words, fourth.parents) == (("truck", "red"), (1, 3)) and len(bench.propositions["drawtext1"]) == 2
    named = [f"row {number}" for number in range(7, 15)]
    named += [f"prompts/{name}.txt" for name in ("unasked", "empty", "long")]
    assert sorted(record.where for record in bench.bad) == sorted(named)


def test_a_folder_of_another_kind_is_refused(tmp_path):
    with pytest.raises(UserError, match="dpg_bench.csv' is not there"):
        read_dpg_bench(str(tmp_path))
    (tmp_path / "prompts").mkdir()
    (tmp_path / "dpg_bench.csv").write_text("item_id,text\n0,A red truck\n")
    with pytest.raises(UserError, match="lacks the column keywords"):
        read_dpg_bench(str(tmp_path))


def test_keywords_name_a_proposition_unless_they_are_the_whole_prompts():
    def words(*keywords):
        rows = [csv_row(*row, keywords=of_row) for row, of_row in zip(ROWS, keywords, strict=False)]
        return [proposition.words for proposition in parse_rows(rows, PROMPTS)[0]["0"]]

    assert words("a truck", "red") == [("a", "truck"), ("red",)]
    assert words("truck red", "truck red") == [("truck",), ("truck", "red")]
    assert proposition_words("", "no brackets") == ()
    assert proposition_words("", "entity - part (Lion\u2019s mane)") == ("lion", "mane")


def test_images_in_folders_and_in_grids(tmp_path):
    root = write_images(tmp_path)
    files, grid = find_images(root, PROMPTS, 4), np.asarray(noise(0, 64))
    for index, (top, left) in enumerate([(0, 0), (0, 32), (32, 0), (32, 32)]):
        assert np.array_equal(load_image(files["0"], index, 4), grid[top : top + 32, left : left + 32])
        assert np.array_equal(load_image(files["drawtext1"], index, 4), noise(1 + index))
    assert load_image(find_images(root, ["0"], 1)["0"], 0, 1).size == (64, 64)  # one image is no grid
    (tmp_path / "drawtext1" / "3.png").unlink()
    with pytest.raises(UserError, match="images of 2 prompts: the folder drawtext1 holds 3 files.*grid of 2 x 2"):
        find_images(root, [*PROMPTS, "7"], 4)
    noise(0, 63).save(tmp_path / "0.png")
    with pytest.raises(UserError, match="63 x 63 pixels are no grid"):
        load_image(files["0"], 0, 4)


# ---- positions and scores


def test_position_is_that_of_the_last_word_read():
    tokenizer, prompt = tiny_tokenizer(77), "A dog, low-flat and Red, near two birds and a dog of snow."
    ids = tokenizer(prompt.lower())["input_ids"]

    def at(*words):
        return token_position(words, prompt, tokenizer)

    def decoded(position):
        return tokenizer.decode([ids[position]]).strip()

    assert at("dog") == 2 and decoded(2) == "dog"  # its first time; SOT is 0
    assert decoded(at("red")) == "red" and at("dog", "red") == at("red") == at("RED", "dog")
    assert (decoded(at("flat")), decoded(at("bird"))) == ("flat", "birds")
    assert at("now") is None and at("fla") is None and at() is None  # not inside snow or flat
    assert at("now", "dog") == 2
    assert token_position(["red"], "a cat, " * 100 + "a red dog", tokenizer) > 200
    names = {
        1: "1-19",
        19: "1-19",
        20: "20-39",
        75: "60-75",
        76: "76-111",
        400: "112 and on",
        None: "not in the prompt",
    }
    assert {position: band(position) for position in names} == names


def test_scores_in_a_closed_form():
    bench = {"p": [*chain((), (1,)), Proposition(3, (), "global", "style", "?", ())], "q": chain(())}
    yes = {("p", 0, 1): False, ("p", 0, 2): True, ("p", 0, 3): True}  # 1 of 3: the second's parent is missing
    yes |= {("p", 1, 1): True, ("p", 1, 2): True, ("p", 1, 3): False}  # 2 of 3
    yes |= {("q", 0, 1): True, ("q", 1, 1): True}
    bands = {("p", 1): "1-19", ("p", 2): "76-111", ("p", 3): "not in the prompt", ("q", 1): "1-19"}
    numbers = score(*outcomes(bench, yes, 2, bands), 2)
    assert numbers["score_percent"] == pytest.approx(100 * ((1 / 3 + 2 / 3) / 2 + 1) / 2)
    assert numbers["interval_percent"] == pytest.approx([50, 100])  # both draws the one prompt, or the other
    assert numbers["by_category"]["entity"] == {
        "propositions": 3,
        "holds_percent": pytest.approx(100 * 4 / 6),
        "interval_percent": pytest.approx([50, 100]),  # of two prompts, 2 of 4 and 2 of 2
        "yes_percent": pytest.approx(100 * 5 / 6),
    }
    assert numbers["by_category"]["global"]["holds_percent"] == pytest.approx(50)
    assert list(numbers["by_detail"]) == ["entity - whole", "global - style"]
    assert list(numbers["by_position"]) == ["1-19", "76-111", "not in the prompt"]
    assert numbers["by_position"]["76-111"]["holds_percent"] == pytest.approx(50)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sets(st.integers(1, 5), max_size=2), st.booleans()), min_size=1, max_size=6), st.randoms())
def test_what_holds_is_answered_yes_and_so_are_its_parents_in_any_order(drawn, random):
    propositions = chain(*(tuple(parent for parent in above if parent < n) for n, (above, _) in enumerate(drawn, 1)))
    answers = {n: answer for n, (_, answer) in enumerate(drawn, 1)}
    holding = holds(random.sample(propositions, len(propositions)), answers)
    for proposition in propositions:
        expected = answers[proposition.number] and all(holding[parent] for parent in proposition.parents)
        assert holding[proposition.number] == expected


def test_encoders_are_compared_prompt_by_prompt():
    bench = {item: chain((), ()) for item in "pqrs"}
    bands = {(item, number): ("1-19", "76-111")[number - 1] for item in bench for number in (1, 2)}
    keys, results = [(item, 0, number) for item in bench for number in (1, 2)], {}
    for label, late in (("cut", False), ("whole", True)):
        results[label], groups = outcomes(bench, {key: key[2] == 1 or late for key in keys}, 1, bands)
    compared = {line["score"]: line for line in compare_outcomes(results, groups)}
    assert all((line["a"], line["b"]) == ("whole", "cut") for line in compared.values())
    differences = {name: line["difference"] for name, line in compared.items()}
    assert differences == {"score": 50, "holds, 1-19": 0, "holds, 76-111": 100}
    assert [compared["score"][end] for end in ("low", "high")] == [50, 50]  # every prompt says the same


# ---- whole runs


@pytest.mark.parametrize("kind", ["vilt", "blip"])
def test_a_model_answers_each_question_as_if_it_were_alone(kind, request):
    ask = VqaModel(request.getfixturevalue(kind), CPU)
    questions = ["Is there a truck?", "Is the truck red?", "Is there a cat?", "cat?", "red red red truck no?"]
    answers = [ask(noise(seed), questions) for seed in range(6)]
    assert answers == [[ask(noise(seed), [question])[0] for question in questions] for seed in range(6)]
    assert len({answer for row in answers for answer in row}) > 1  # weights tell questions or images apart


def run(tmp_path, vqa, **changes):
    places = {"data": tmp_path / "bench", "images": tmp_path / "images", "output": tmp_path / "out"}
    config = {name: str(path) for name, path in places.items()} | {"vqa": vqa, "device": "cpu"} | changes
    return evaluate_dpg_bench(DpgBenchConfig(**config))


@pytest.fixture
def folder(tmp_path):
    write_bench(tmp_path / "bench")
    write_images(tmp_path / "images")
    return tmp_path


def test_a_run_equals_one_made_by_hand_and_says_whose_answers_they_are(vilt, folder, capsys):
    report = run(folder, vilt, batch_size=3)
    bench, ask = read_dpg_bench(str(folder / "bench")), VqaModel(vilt, CPU)
    files, means = find_images(str(folder / "images"), PROMPTS, 4), []
    for item, propositions in bench.propositions.items():
        for index in range(4):
            image = load_image(files[item], index, 4)
            yes = {proposition.number: ask(image, [proposition.question]) == ["yes"] for proposition in propositions}
            means.append(sum(holds(propositions, yes).values()) / len(propositions))
    assert 0 < np.mean(means) < 1  # neither all nor none, or nothing is shown
    assert report["encoders"]["images"]["score_percent"] == pytest.approx(100 * np.mean(means))
    assert (report["prompts"], report["propositions"], report["compared"]) == (2, 6, [])
    assert json.loads((folder / "out" / "dpg_bench.json").read_text()) == report
    printed = capsys.readouterr().out
    assert f"Answers are by {Path(vilt).name}" in printed and "mPLUG" in printed and "script skips the first" in printed
    (folder / "images" / "drawtext1" / "1.png").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"drawtext1.1.png' cannot be used"):
        run(folder, vilt)


@pytest.mark.usefixtures("blank_figures")
def test_a_killed_run_asks_only_what_has_no_answers_and_ends_the_same(vilt, blip, folder, monkeypatch):
    asked, ask = [], VqaModel.__call__
    before = run(folder, vilt)["encoders"]
    (lines,) = (folder / "out").glob("items-*.jsonl")
    whole = lines.read_bytes().splitlines(keepends=True)
    assert len(whole) == 2 * 4
    monkeypatch.setattr(VqaModel, "__call__", lambda *given: asked.append(len(given[2])) or ask(*given))
    # Killed within the sixth image; and somebody has changed the answers about the first.
    changed = whole[0].replace(b'"no"', b'"yes"') if b'"no"' in whole[0] else whole[0].replace(b'"yes"', b'"no"')
    lines.write_bytes(changed + b"".join(whole[1:5]) + whole[5][:-9])
    assert run(folder, vilt)["encoders"] == before and asked == [4, 2, 2, 2]
    # Another image, and another model, are asked about again; a whole run needs no model any more.
    noise(9).save(folder / "images" / "drawtext1" / "2.png")
    run(folder, vilt)
    run(folder, blip)
    assert asked[4:] == [2] + 4 * [4] + 4 * [2]
    monkeypatch.setattr(dpg_bench, "VqaModel", None)
    run(folder, vilt)


@pytest.mark.usefixtures("blank_figures")
def test_images_are_generated_with_each_encoder(vilt, sdxl_folder, long_clip_folder, folder, monkeypatch):
    given = {"images": None, "base": str(sdxl_folder), "steps": 1, "images_per_prompt": 2}
    given |= {"encoders": ["cut:original", str(long_clip_folder)]}
    with monkeypatch.context() as patch:
        watched = Watched(patch, VqaModel)
        report = run(folder, vilt, **given)
    assert (watched.generators, watched.networks) == (1, 2)
    check_report(report)
    cut, long = report["encoders"]
    folders = {label: folder / "out" / "images" / name for label, name in folder_names([cut, long]).items()}
    for images in folders.values():
        names = sorted(path.relative_to(images).as_posix() for path in images.rglob("*.png"))
        assert names == ["0/0.png", "0/1.png", "drawtext1/0.png", "drawtext1/1.png"]
        assert len({(images / name).read_bytes() for name in names}) == 4
    # The same numbers as of images that are there.
    there = run(folder, vilt, images=str(folders[long]), output=str(folder / "there"), images_per_prompt=2)
    (numbers,) = there["encoders"].values()
    assert numbers.items() <= report["encoders"][long].items()
    first, scores = report["compared"][0], [numbers["score_percent"] for numbers in report["encoders"].values()]
    assert (first["a"], first["b"], first["score"]) == (long, cut, "score")
    assert first["difference"] == pytest.approx(scores[1] - scores[0]) and f"{long}: hold" in str(tables(report)[0])
    # Image i of each prompt starts from seed + i. What is missing is rendered, and what is finished is not asked again.
    run(folder, vilt, **given | {"encoders": ["cut:original"], "seed": 1, "output": str(folder / "moved")})
    moved = folder / "moved" / "images" / folders[cut].name / "0" / "0.png"
    assert moved.read_bytes() == (folders[cut] / "0" / "1.png").read_bytes()
    missing = folders[long] / "0" / "1.png"
    content = missing.read_bytes()
    missing.unlink()
    monkeypatch.setattr(dpg_bench, "VqaModel", None)
    assert run(folder, vilt, **given)["encoders"][long]["by_position"] == report["encoders"][long]["by_position"]
    assert missing.read_bytes() == content


def test_what_cannot_be_evaluated_is_refused_first(vilt, sdxl_folder, folder):
    given = {"vqa": vilt, "images": None, "base": str(sdxl_folder), "encoders": ["cut:original"]}
    for changes, message in (
        ({"base": None}, "Give either --images"),
        ({"encoders": []}, "Give either --images"),
        ({"vqa": "no/such/model"}, "no/such/model.*could not be loaded.*ViLT or BLIP"),
    ):
        with pytest.raises(UserError, match=message):
            run(folder, **given | changes)
    assert not (folder / "out").exists()
