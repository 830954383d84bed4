"""DPG-Bench: the published layout, the rules of the score, the position of a proposition, and runs with tiny models."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from helpers.memory import Watched
from helpers.reports import check_report
from helpers.vocabulary import tiny_tokenizer
from PIL import Image

from debias_diffusion.errors import UserError
from debias_diffusion.eval.images import dpg_bench, dpg_questions
from debias_diffusion.eval.images.dpg_bench import (
    DpgBenchConfig,
    VqaModel,
    evaluate_dpg_bench,
    find_images,
    load_images,
)
from debias_diffusion.eval.images.dpg_questions import COLUMNS, Proposition, band, read_dpg_bench, token_position
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


def save_vqa(folder, kind, config, **images):
    torch.manual_seed(0)
    model, processor, of_images = (
        getattr(transformers, f"{kind}{part}") for part in ("ForQuestionAnswering", "Processor", "ImageProcessor")
    )
    model(config).save_pretrained(folder)
    tokenizer = transformers.BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)}, model_max_length=40)
    processor(of_images(**images), tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def vilt(tmp_path_factory):
    config = transformers.ViltConfig(**TEXT, **VISION, id2label={0: "yes", 1: "no"}, label2id={"yes": 0, "no": 1})
    return save_vqa(tmp_path_factory.mktemp("vilt"), "Vilt", config, size={"shortest_edge": 32}, size_divisor=16)


@pytest.fixture(scope="module")
def blip(tmp_path_factory):
    special = {"bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3, "pad_token_id": 0, "encoder_hidden_size": 32}
    config = transformers.BlipConfig(text_config=TEXT | special, vision_config=SIZE | VISION)
    return save_vqa(tmp_path_factory.mktemp("blip"), "Blip", config, size={"height": 32, "width": 32})


def chain(*parents, category="entity"):
    """Propositions 1, 2, ... with these parents."""
    return [Proposition(n, above, category, "whole", f"{n}?", "1-19") for n, above in enumerate(parents, 1)]


# ---- the published layout


def test_bad_rows_are_named_with_what_depends_on_them(tmp_path):
    broken = [(5, "none", "Nothing?"), (6, "5", "On it?"), (7, "9", "Round?"), (9, "7", "And round?"), (4, "0", "4?")]
    rows = [("0", number, parents, "entity", "whole", "", text) for number, parents, text in [*broken, (10, "0", " ")]]
    rows = [*ROWS, *rows, ("nowhere", 1, "0", "entity", "whole", "", "Is there a prompt?")]
    prompts = PROMPTS | {"unasked": "A sea.", "empty": " \n", "long": "a" * 20_001}
    bench = read_dpg_bench(write_bench(tmp_path, rows, prompts))
    assert bench.prompts == PROMPTS
    first, second, _, fourth = bench.propositions["0"]  # the first row too, which the published script skips
    assert (first.number, first.question, first.parents) == (1, "Is there a truck?", ())
    assert (second.position, fourth.parents) == ("1-19", (1, 3)) and len(bench.propositions["drawtext1"]) == 2
    named = [f"row {number}" for number in range(7, 14)]
    named += [f"prompts/{name}.txt" for name in ("unasked", "empty", "long")]
    assert sorted(record.where for record in bench.bad) == sorted(named)
    (tmp_path / "dpg_bench.csv").write_text("item_id,text\n0,A red truck\n")
    with pytest.raises(UserError, match="lacks the column keywords"):
        read_dpg_bench(str(tmp_path))


def test_keywords_name_a_proposition_unless_they_are_the_whole_prompts():
    prompts = {"0": f"A truck, {'very ' * 30} red."}
    for keywords, position in (("a truck, red", "20-39"), ("truck red", "1-19")):
        rows = [csv_row(*row, keywords=of_row) for row, of_row in zip(ROWS, (keywords, "truck red"), strict=False)]
        assert dpg_questions.parse_rows(rows, prompts)[0]["0"][0].position == position


def test_images_in_folders_and_in_grids(tmp_path):
    root = write_images(tmp_path)
    files, grid = find_images(root, PROMPTS, 4), np.asarray(noise(0, 64))
    quarters, separate = (load_images(files[item], 4) for item in ("0", "drawtext1"))
    for index, (top, left) in enumerate([(0, 0), (0, 32), (32, 0), (32, 32)]):
        assert np.array_equal(quarters[index], grid[top : top + 32, left : left + 32])
        assert np.array_equal(separate[index], noise(1 + index))
    assert load_images(find_images(root, ["0"], 1)["0"], 1)[0].size == (64, 64)  # one image is no grid
    (tmp_path / "drawtext1" / "3.png").unlink()
    with pytest.raises(UserError, match="images of 2 prompts: the folder drawtext1 holds 3 files.*grid of 2 x 2"):
        find_images(root, [*PROMPTS, "7"], 4)


# ---- positions and scores


def test_position_is_that_of_the_last_word_read():
    tokenizer, prompt = tiny_tokenizer(77), "A dog, low-flat and Red, near two birds and a dog of snow."
    ids = tokenizer(prompt.lower())["input_ids"]

    def at(*words):
        return token_position(words, prompt, tokenizer)

    def decoded(*words):
        return tokenizer.decode([ids[at(*words)]]).strip()

    assert at("dog") == 2  # its first time; SOT is 0
    assert [decoded("red"), decoded("RED", "dog"), decoded("flat"), decoded("bird")] == ["red", "red", "flat", "birds"]
    assert at("now") is None and at("fla") is None and at() is None  # not inside snow or flat
    assert at("now", "dog") == 2 and token_position(["red"], "a cat, " * 100 + "a red dog", tokenizer) > 200
    bands = [band(position) for position in (1, 19, 20, 75, 76, 400, None)]
    assert bands == ["1-19", "1-19", "20-39", "60-75", "76-111", "112 and on", "not in the prompt"]


def test_scores_in_a_closed_form():
    style = Proposition(3, (), "global", "style", "?", "not in the prompt")
    bench = {"p": [*chain(()), Proposition(2, (1,), "entity", "whole", "?", "76-111"), style], "q": chain(())}
    # 1 of 3, because the second's parent is missing; 2 of 3
    results = outcomes(bench, {"p": [[False, True, True], [True, True, False]], "q": [[True]] * 2})
    numbers = score(results, 2)
    assert numbers["score_percent"] == pytest.approx(100 * ((1 / 3 + 2 / 3) / 2 + 1) / 2)
    assert numbers["interval_percent"] == pytest.approx([50, 100])  # both draws the one prompt, or the other
    assert numbers["by_category"]["entity"] == {
        "propositions": 3,
        "holds_percent": pytest.approx(100 * 4 / 6),
        "interval_percent": pytest.approx([50, 100]),  # of two prompts, 2 of 4 and 2 of 2
        "yes_percent": pytest.approx(100 * 5 / 6),
    }
    assert list(numbers["by_detail"]) == ["entity - whole", "global - style"]
    by_position = {name: number["holds_percent"] for name, number in numbers["by_position"].items()}
    assert by_position == {"1-19": 75, "76-111": 50, "not in the prompt": 50}
    # Compared with images of which everything is answered yes.
    perfect = outcomes(bench, {"p": [[True] * 3] * 2, "q": [[True]] * 2})
    compared = compare_outcomes({"some": results, "all": perfect})
    assert all((line["a"], line["b"]) == ("all", "some") for line in compared)
    differences = {line["score"]: line["difference"] for line in compared}
    assert differences["score"] == pytest.approx(100 - numbers["score_percent"])
    assert differences["holds, 76-111"] == 50
    # However far back, and in any order.
    assert not any(holds(chain((2,), (3,), ()), {1: True, 2: True, 3: False}).values())


# ---- whole runs


@pytest.mark.parametrize("kind", ["vilt", "blip"])
def test_a_model_answers_each_question_as_if_it_were_alone(kind, request):
    ask = VqaModel(request.getfixturevalue(kind), CPU)
    questions = ["Is there a truck?", "Is the truck red?", "cat?", "red red red truck no?"]
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
        for image in load_images(files[item], 4):
            yes = {proposition.number: ask(image, [proposition.question]) == ["yes"] for proposition in propositions}
            means.append(sum(holds(propositions, yes).values()) / len(propositions))
    assert 0 < np.mean(means) < 1  # neither all nor none, or nothing is shown
    assert report["encoders"]["images"]["score_percent"] == pytest.approx(100 * np.mean(means))
    assert (report["prompts"], report["propositions"], report["compared"]) == (2, 6, [])
    assert f"Answers are by {Path(vilt).name}" in capsys.readouterr().out
    (folder / "images" / "drawtext1" / "1.png").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"drawtext1.1.png' cannot be used"):
        run(folder, vilt)


@pytest.mark.usefixtures("blank_figures")
def test_a_killed_run_asks_only_what_has_no_answers_and_ends_the_same(vilt, blip, folder, monkeypatch):
    asked, ask, before = [], VqaModel.__call__, run(folder, vilt, output=str(folder / "whole"))["encoders"]

    def count_and_ask(model, image, questions):
        asked.append(len(questions))
        if len(asked) == 6:  # the second image of the second prompt
            raise KeyboardInterrupt
        return ask(model, image, questions)

    monkeypatch.setattr(VqaModel, "__call__", count_and_ask)
    with pytest.raises(KeyboardInterrupt):
        run(folder, vilt)
    assert run(folder, vilt)["encoders"] == before and asked[6:] == 4 * [2]
    # The images of a prompt of which one is another, and another model, are asked again; a whole run needs no model.
    noise(9).save(folder / "images" / "drawtext1" / "2.png")
    run(folder, vilt)
    run(folder, blip)
    assert asked[10:] == 4 * [2] + 4 * [4] + 4 * [2]
    monkeypatch.setattr(dpg_bench, "VqaModel", None)
    run(folder, vilt)


@pytest.mark.usefixtures("blank_figures")
def test_images_are_generated_with_each_encoder(vilt, sdxl_folder, long_clip_folder, folder, monkeypatch):
    given = {"images": None, "base": str(sdxl_folder), "steps": 1, "images_per_prompt": 2}
    given |= {"encoders": ["cut:original", str(long_clip_folder)]}
    with pytest.raises(UserError, match="no/such/model.*could not be loaded.*ViLT or BLIP"):
        run(folder, "no/such/model", **given)
    assert not (folder / "out").exists()  # before anything is generated
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
    # The same numbers as of images that are there.
    there = run(folder, vilt, images=str(folders[long]), output=str(folder / "there"), images_per_prompt=2)
    (numbers,) = there["encoders"].values()
    assert numbers.items() <= report["encoders"][long].items()
    # Image i of each prompt starts from seed + i. What is missing is rendered, and what is finished is not asked again.
    run(folder, vilt, **given | {"encoders": ["cut:original"], "seed": 1, "output": str(folder / "moved")})
    moved = folder / "moved" / "images" / folders[cut].name / "0" / "0.png"
    assert (
        moved.read_bytes() == (folders[cut] / "0" / "1.png").read_bytes() != (folders[cut] / "0" / "0.png").read_bytes()
    )
    missing = folders[long] / "0" / "1.png"
    content = missing.read_bytes()
    missing.unlink()
    monkeypatch.setattr(VqaModel, "__call__", lambda *_: pytest.fail("asked again"))
    assert run(folder, vilt, **given)["encoders"][long]["by_position"] == report["encoders"][long]["by_position"]
    assert missing.read_bytes() == content
