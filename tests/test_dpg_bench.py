"""DPG-Bench: the published layout, the rules of the score, the position of a proposition, and runs with tiny models."""

import csv
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.memory import Watched
from helpers.reports import check_report
from helpers.tiny_clip import save_tiny_clip
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
PROMPTS = {
    "0": "A red truck stands in front of a tree.",
    "drawtext1": "Two cats, both black, sleep on a sofa.",
}
ROWS = [
    ("0", 1, "0", "entity", "whole", "entity - whole (truck)", "Is there a truck?"),
    ("0", 2, "1", "attribute", "color", "attribute - color (truck, red)", "Is the truck red?"),
    ("0", 3, "0", "entity", "whole", "entity - whole (tree)", "Is there a tree?"),
    ("0", 4, "1,3", "relation", "spatial", "relation - spatial (truck, tree, in front of)", "Is it in front?"),
    ("drawtext1", 1, "0", "entity", "whole", "entity - whole (cats)", "Are there cats?"),
    ("drawtext1", 2, "1", "other", "count", "other - count (cats, ==2)", "Are there two cats?"),
]


def csv_row(item, number, dependency, category, detail, published_tuple, question, keywords="") -> dict[str, str]:
    values = (item, PROMPTS.get(item, ""), keywords, number, dependency, category, detail, published_tuple, question)
    return dict(zip(COLUMNS, map(str, values), strict=True))


def write_bench(root: Path, rows=ROWS, prompts=PROMPTS) -> Path:
    (root / "prompts").mkdir(parents=True)
    for item, text in prompts.items():
        (root / "prompts" / f"{item}.txt").write_text(text)
    with open(root / "dpg_bench.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(csv_row(*row) for row in rows)
    return root


def noise(seed: int, side: int = 32) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def write_pictures(root: Path) -> Path:
    """A grid for the one prompt, separate files for the other."""
    (root / "drawtext1").mkdir(parents=True)
    noise(0, 64).save(root / "0.png")
    for index in range(4):
        noise(1 + index).save(root / "drawtext1" / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def vilt(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("vilt"))
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    labels = {"id2label": {0: "yes", 1: "no"}, "label2id": {"yes": 0, "no": 1}}
    config = ViltConfig(vocab_size=len(WORDS), image_size=32, patch_size=16, initializer_range=0.4, **size, **labels)
    ViltForQuestionAnswering(config).save_pretrained(folder)
    images = ViltImageProcessor(size={"shortest_edge": 32}, size_divisor=16)
    ViltProcessor(images, word_tokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def blip(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("blip"))
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    special = {"bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3, "pad_token_id": 0}
    text = {**size, **special, "vocab_size": len(WORDS), "encoder_hidden_size": 32, "initializer_range": 0.4}
    vision = {**size, "image_size": 32, "patch_size": 16}
    BlipForQuestionAnswering(BlipConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
    BlipProcessor(BlipImageProcessor(size={"height": 32, "width": 32}), word_tokenizer()).save_pretrained(folder)
    return folder


def word_tokenizer() -> BertTokenizer:
    return BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)}, model_max_length=40)


def chain(*parents: tuple[int, ...], category: str = "entity") -> list[Proposition]:
    """Propositions 1, 2, ... with these parents."""
    return [Proposition(n, above, category, "whole", f"{n}?", ()) for n, above in enumerate(parents, 1)]


# The published layout ------------------------------------------------------------------------------------------------


def test_every_row_is_read_the_first_too(tmp_path):
    bench = read_dpg_bench(str(write_bench(tmp_path)))
    assert bench.prompts == PROMPTS and bench.bad == []
    assert [proposition.number for proposition in bench.propositions["0"]] == [1, 2, 3, 4]
    assert bench.propositions["0"][0].question == "Is there a truck?"
    assert bench.propositions["0"][3].parents == (1, 3) and bench.propositions["0"][0].parents == ()
    assert bench.propositions["0"][1].words == ("truck", "red")


def test_bad_rows_are_named_with_what_depends_on_them(tmp_path):
    rows = [
        *ROWS,
        ("0", 5, "none", "entity", "whole", "", "Is there nothing?"),
        ("0", 6, "5", "entity", "whole", "", "Is it on nothing?"),
        ("0", 7, "6", "entity", "whole", "", "Is that on it?"),
        ("0", 8, "9", "entity", "whole", "", "Round?"),
        ("0", 9, "8", "entity", "whole", "", "And round?"),
        ("0", 4, "0", "entity", "whole", "", "Twice?"),
        ("0", 10, "0", "entity", "whole", "", " "),
        ("nowhere", 1, "0", "entity", "whole", "", "Is there a prompt?"),
    ]
    prompts = PROMPTS | {"unasked": "A sea.", "empty": " \n"}
    (write_bench(tmp_path, rows, prompts) / "prompts" / "folder.txt").mkdir()
    bench = read_dpg_bench(str(tmp_path))
    assert {item: len(own) for item, own in bench.propositions.items()} == {"0": 4, "drawtext1": 2}
    assert list(bench.prompts) == list(PROMPTS)
    wheres = [record.where for record in bench.bad]
    rows_named = [f"row {number}" for number in range(7, 15)]
    assert sorted(wheres) == sorted([*rows_named, "prompts/unasked.txt", "prompts/empty.txt", "prompts/folder.txt"])


def test_a_folder_of_another_kind_is_told(tmp_path):
    with pytest.raises(UserError, match="dpg_bench.csv' is not there"):
        read_dpg_bench(str(tmp_path))
    root = write_bench(tmp_path / "bench")
    (root / "dpg_bench.csv").write_text("item_id,text\n0,A red truck\n")
    with pytest.raises(UserError, match="lacks the column keywords"):
        read_dpg_bench(str(root))


def test_keywords_name_a_proposition_unless_they_are_the_whole_prompts():
    def words(*keywords):
        rows = [csv_row(*row, keywords=own) for row, own in zip(ROWS, keywords, strict=False)]
        return [proposition.words for proposition in parse_rows(rows, PROMPTS)[0]["0"]]

    assert words("a truck", "red") == [("a", "truck"), ("red",)]
    assert words("truck red", "truck red") == [("truck",), ("truck", "red")]
    assert words("red") == [("red",)]
    assert proposition_words("", "no brackets") == ()
    assert proposition_words("", "entity - part (Lion\u2019s mane)") == ("lion", "mane")


def test_pictures_in_folders_and_in_grids(tmp_path):
    root = write_pictures(tmp_path)
    found = find_images(str(root), PROMPTS, 4)
    grid = np.asarray(noise(0, 64))
    for index, (top, left) in enumerate([(0, 0), (0, 32), (32, 0), (32, 32)]):
        quarter = np.asarray(load_image(found["0"], index, 4))
        assert np.array_equal(quarter, grid[top : top + 32, left : left + 32])
        assert np.array_equal(np.asarray(load_image(found["drawtext1"], index, 4)), np.asarray(noise(1 + index)))
    assert load_image(find_images(str(root), ["0"], 1)["0"], 0, 1).size == (64, 64)  # one picture is no grid
    (root / "drawtext1" / "3.png").unlink()
    with pytest.raises(UserError, match="images of 2 prompts: the folder drawtext1 holds 3 files.*grid of 2 x 2"):
        find_images(str(root), [*PROMPTS, "7"], 4)
    noise(0, 63).save(root / "0.png")
    with pytest.raises(UserError, match="63 x 63 pixels are no grid"):
        load_image(found["0"], 0, 4)


# Positions -----------------------------------------------------------------------------------------------------------


def test_position_is_that_of_the_last_word_read():
    tokenizer = tiny_tokenizer(77)
    prompt = "A dog, low-flat and Red, near two birds and a dog of snow."
    ids = tokenizer(prompt.lower())["input_ids"]

    def at(*words):
        return token_position(words, prompt, tokenizer)

    def decoded(position):
        return tokenizer.decode([ids[position]]).strip()

    assert at("dog") == 2 and decoded(2) == "dog"  # its first time; SOT is 0
    assert decoded(at("red")) == "red" and at("dog", "red") == at("red") == at("RED", "dog")
    assert decoded(at("flat")) == "flat"
    assert decoded(at("bird")) == "birds"
    assert at("now") is None and at("fla") is None and at() is None  # not inside snow or flat
    assert at("now", "dog") == 2


def test_bands_cover_every_position():
    names = {1: "1-19", 19: "1-19", 20: "20-39", 75: "60-75", 76: "76-111", 111: "76-111", 112: "112 and on"}
    assert {position: band(position) for position in names} == names
    assert band(400) == "112 and on" and band(None) == "not in the prompt"


# Scores --------------------------------------------------------------------------------------------------------------


def scored(bench, yes, pictures, bands) -> dict:
    return score(*outcomes(bench, yes, pictures, bands), pictures)


def test_scores_in_a_closed_form():
    bench = {
        "p": [*chain((), (1,)), Proposition(3, (), "global", "style", "?", ())],
        "q": chain(()),
    }
    yes = {("p", 0, 1): False, ("p", 0, 2): True, ("p", 0, 3): True}  # 1 of 3: the second's parent is missing
    yes |= {("p", 1, 1): True, ("p", 1, 2): True, ("p", 1, 3): False}  # 2 of 3
    yes |= {("q", 0, 1): True, ("q", 1, 1): True}
    bands = {("p", 1): "1-19", ("p", 2): "76-111", ("p", 3): "not in the prompt", ("q", 1): "1-19"}
    numbers = scored(bench, yes, 2, bands)
    assert numbers["score_percent"] == pytest.approx(100 * ((1 / 3 + 2 / 3) / 2 + 1) / 2)
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
    low, high = numbers["interval_percent"]
    assert low == pytest.approx(50) and high == pytest.approx(100)  # two prompts: both draws the one, or the other


@st.composite
def answered(draw):
    """(propositions of prompts, answers to two pictures of each): a parent has a lower number."""
    bench, yes = {}, {}
    for item in "ab"[: draw(st.integers(1, 2))]:
        count = draw(st.integers(1, 5))
        parents = [
            tuple(draw(st.sets(st.integers(1, n - 1), max_size=2))) if n > 1 else () for n in range(1, count + 1)
        ]
        bench[item] = chain(*parents, category=draw(st.sampled_from(["entity", "other"])))
        yes |= {(item, picture, n): draw(st.booleans()) for picture in range(2) for n in range(1, count + 1)}
    return bench, yes


def flat(numbers: dict) -> list[float]:
    groups = [numbers[group] for group in ("by_category", "by_detail", "by_position")]
    names = ("propositions", "holds_percent", "yes_percent")
    return [numbers["score_percent"], *(row[name] for group in groups for row in group.values() for name in names)]


@settings(max_examples=60)
@given(answered(), st.data())
def test_a_yes_more_never_lowers_a_score(case, data):
    bench, yes = case
    bands = {(item, own.number): band(own.number * 10) for item, rows in bench.items() for own in rows}
    before = flat(scored(bench, yes, 2, bands))
    more = yes | {data.draw(st.sampled_from(sorted(yes))): True}
    after = flat(scored(bench, more, 2, bands))
    assert all(0 <= value <= 100 for value in [before[0], after[0]])
    assert all(new >= old for old, new in zip(before, after, strict=True))


@settings(max_examples=60)
@given(answered(), st.randoms())
def test_what_holds_is_answered_yes_and_so_are_its_parents_in_any_order(case, random):
    bench, yes = case
    for item, own in bench.items():
        answers = {proposition.number: yes[item, 0, proposition.number] for proposition in own}
        holding = holds(random.sample(own, len(own)), answers)
        for proposition in own:
            expected = answers[proposition.number] and all(holding[parent] for parent in proposition.parents)
            assert holding[proposition.number] == expected


# Whole runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vilt", "blip"])
def test_a_model_answers_each_question_as_if_it_were_alone(kind, request):
    ask = VqaModel(request.getfixturevalue(kind), CPU)
    questions = ["Is there a truck?", "Is the truck red?", "Is there a cat?", "cat?", "red red red truck no?"]
    answers = {}
    for seed in range(6):
        together = ask(noise(seed), questions)
        assert together == [ask(noise(seed), [question])[0] for question in questions]
        answers[seed] = tuple(together)
    assert all(answer == answer.strip().lower() for row in answers.values() for answer in row)
    assert len({answer for row in answers.values() for answer in row}) > 1  # weights tell questions or images apart
    assert VqaModel(request.getfixturevalue(kind), CPU)(noise(0), questions) == list(answers[0])


def run(tmp_path: Path, vqa: str, **changes) -> dict:
    places = {"data": tmp_path / "bench", "images": tmp_path / "pictures", "output": tmp_path / "out"}
    config = {name: str(path) for name, path in places.items()} | {"vqa": vqa, "device": "cpu"} | changes
    return evaluate_dpg_bench(DpgBenchConfig(**config))


def without_seconds(report: dict) -> dict:
    return {name: value for name, value in report.items() if name not in ("seconds", "settings")}


def test_a_run_equals_one_made_by_hand_and_says_whose_answers_they_are(vilt, tmp_path, capsys):
    write_bench(tmp_path / "bench"), write_pictures(tmp_path / "pictures")
    report = run(tmp_path, vilt, batch_size=3)
    bench, ask = read_dpg_bench(str(tmp_path / "bench")), VqaModel(vilt, CPU)
    files = find_images(str(tmp_path / "pictures"), PROMPTS, 4)
    shares = []
    for item, own in bench.propositions.items():
        for picture in range(4):
            image = load_image(files[item], picture, 4)
            yes = {proposition.number: ask(image, [proposition.question]) == ["yes"] for proposition in own}
            shares.append((item, sum(holds(own, yes).values()) / len(own)))
    means = [np.mean([share for of, share in shares if of == item]) for item in PROMPTS]
    assert 0 < np.mean(means) < 1  # neither all nor none, or nothing is shown
    assert list(report["encoders"]) == ["pictures"] and report["compared"] == []
    assert report["encoders"]["pictures"]["score_percent"] == pytest.approx(100 * np.mean(means))
    assert (report["prompts"], report["propositions"]) == (2, 6)
    assert json.loads((tmp_path / "out" / "dpg_bench.json").read_text()) == report
    assert Image.open(tmp_path / "out" / "dpg_bench.png").size[0] > 100
    printed = capsys.readouterr().out
    assert f"Answers are by {Path(vilt).name}" in printed and "mPLUG" in printed and "script skips the first" in printed


def test_a_killed_run_asks_only_about_what_has_no_answers_and_ends_the_same(vilt, blip, tmp_path, monkeypatch):
    write_bench(tmp_path / "bench"), write_pictures(tmp_path / "pictures")
    before = run(tmp_path, vilt)
    (lines,) = (tmp_path / "out").glob("items-*.jsonl")
    whole = lines.read_bytes().splitlines(keepends=True)
    assert len(whole) == 2 * 4
    lines.write_bytes(b"".join(whole[:5]) + whole[5][:-9])  # killed within the sixth image
    asked = []
    ask = VqaModel.__call__

    def counting(self, image, questions):
        asked.append(len(questions))
        return ask(self, image, questions)

    monkeypatch.setattr(VqaModel, "__call__", counting)
    assert without_seconds(run(tmp_path, vilt)) == without_seconds(before) and asked == [2, 2, 2]
    # Another image, another model and other questions are asked about again.
    noise(9).save(tmp_path / "pictures" / "drawtext1" / "2.png")
    run(tmp_path, vilt)
    assert asked[3:] == [2]
    run(tmp_path, blip)
    assert asked[4:] == 4 * [4] + 4 * [2]
    # A whole run needs no model any more.
    monkeypatch.setattr(dpg_bench, "VqaModel", None)
    run(tmp_path, vilt)


def test_no_warning_of_prompts_that_only_positions_are_looked_for_in(caplog):
    logger = logging.getLogger("transformers")
    caplog.set_level(logging.WARNING, "transformers")  # where another test has silenced it
    logger.addHandler(caplog.handler)
    try:
        assert token_position(["red"], "a cat, " * 100 + "a red dog", tiny_tokenizer(77)) > 200
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.records == []


def test_a_broken_picture_is_told_by_name(vilt, tmp_path):
    write_bench(tmp_path / "bench"), write_pictures(tmp_path / "pictures")
    (tmp_path / "pictures" / "drawtext1" / "1.png").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"drawtext1.1.png' cannot be used"):
        run(tmp_path, vilt)


# Pictures that are drawn ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(sdxl_folder) -> str:
    return str(sdxl_folder)


def draw_and_ask(tmp_path, vqa, base, **changes) -> dict:
    encoder = tmp_path / "long"  # its name is the row's
    if not encoder.exists():
        save_tiny_clip(encoder, context_length=248)
    how = {"base": base, "encoders": ["cut:original", str(encoder)], "steps": 1, "images_per_prompt": 2}
    return run(tmp_path, vqa, images=None, **how | changes)


def test_pictures_are_drawn_with_each_encoder_and_asked_about(vilt, base, tmp_path, monkeypatch):
    write_bench(tmp_path / "bench")
    with monkeypatch.context() as patch:
        watched = Watched(patch, VqaModel)
        report = draw_and_ask(tmp_path, vilt, base)
    assert (watched.generators, watched.networks) == (1, 2)
    assert list(report["encoders"]) == ["SDXL's own, cut at 77 tokens", "long"] and report["drawing"]["steps"] == 1
    folders = {
        label: tmp_path / "out" / "images" / name for label, name in folder_names(list(report["encoders"])).items()
    }
    for label, folder in folders.items():
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))
        assert names == ["0/0.png", "0/1.png", "drawtext1/0.png", "drawtext1/1.png"]
        assert len({(folder / name).read_bytes() for name in names}) == 4
        # The same numbers as of pictures that are there.
        there = run(tmp_path, vilt, images=str(folder), output=str(tmp_path / f"there-{label}"), images_per_prompt=2)
        assert list(there["encoders"]) == [folder.name]
        for name in ("score_percent", "interval_percent", "by_category", "by_position", "pictures"):
            assert there["encoders"][folder.name][name] == report["encoders"][label][name]
    first = report["compared"][0]
    assert (first["a"], first["b"], first["score"]) == ("long", "SDXL's own, cut at 77 tokens", "score")
    scores = [its["score_percent"] for its in report["encoders"].values()]
    assert first["difference"] == pytest.approx(scores[1] - scores[0])
    assert "long: hold" in str(tables(report)[0])
    check_report(report)
    # Prompt by prompt the noise is the same: picture i starts from seed + i.
    moved = draw_and_ask(tmp_path, vilt, base, encoders=["cut:original"], seed=1, output=str(tmp_path / "moved"))
    of_seed_1 = [
        tmp_path / "moved" / "images" / "SDXL-s-own-cut-at-77-tokens" / "0" / "0.png",
        folders["SDXL's own, cut at 77 tokens"] / "0" / "1.png",
    ]
    assert of_seed_1[0].read_bytes() == of_seed_1[1].read_bytes() and list(moved["encoders"]) == [
        "SDXL's own, cut at 77 tokens"
    ]
    # What is missing is drawn and asked again, and what is finished is not.
    missing = folders["long"] / "0" / "1.png"
    whole = missing.read_bytes()
    missing.unlink()
    monkeypatch.setattr(dpg_bench, "VqaModel", None)
    again = draw_and_ask(tmp_path, vilt, base)
    assert missing.read_bytes() == whole
    assert again["encoders"]["long"]["by_position"] == report["encoders"]["long"]["by_position"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": "pictures"}, "Give either --images"),
        ({"base": None}, "Give either --images"),
        ({"encoders": []}, "Give either --images"),
        ({"encoders": ["original", "original"]}, "none twice"),
        ({"encoders": ["nowhere"]}, "'nowhere' is not there"),
        ({"output": ""}, "There is no output"),
        ({"vqa": "no/such/model"}, "no/such/model.*could not be loaded.*ViLT or BLIP"),
    ],
)
def test_what_cannot_be_drawn_is_told_first(vilt, base, tmp_path, changes, message):
    write_bench(tmp_path / "bench")
    how = {"images": None, "base": base, "encoders": ["cut:original"], "vqa": vilt} | changes
    with pytest.raises(UserError, match=message):
        run(tmp_path, **how)
    assert not (tmp_path / "out").exists()


def test_encoders_are_compared_prompt_by_prompt():
    bench = {item: chain((), ()) for item in "pqrs"}
    bands = {(item, number): ("1-19", "76-111")[number - 1] for item in bench for number in (1, 2)}
    keys = [(item, 0, number) for item in bench for number in (1, 2)]
    found = {}
    for label, late in (("cut", False), ("whole", True)):
        found[label], groups = outcomes(bench, {key: key[2] == 1 or late for key in keys}, 1, bands)
    compared = {line["score"]: line for line in compare_outcomes(found, groups)}
    assert list(compared) == ["score", "holds, 1-19", "holds, 76-111"]
    assert all((line["a"], line["b"]) == ("whole", "cut") for line in compared.values())
    assert [line["difference"] for line in compared.values()] == [50, 0, 100]
    assert [compared["score"][end] for end in ("low", "high")] == [50, 50]  # every prompt says the same
