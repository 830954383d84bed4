"""Cola's scores against the rules of its authors' script, its files, and an evaluation of both kinds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.tiny_clip import save_tiny_clip
from PIL import Image

from debias_diffusion.errors import UserError
from research.cola import (
    MULTI,
    SINGLE,
    ColaConfig,
    class_precisions,
    evaluate_cola,
    read_cola,
    right_items,
)
from research.reproduce.measuring import cola_scores

PLACE = "https://cs-people.bu.edu/array/data/vg_gqa_images"
COLOURS = ("red", "green", "blue", "white", "black")
ITEMS = [
    [f"{PLACE}/{a}.jpg", f"a {a} square  left", f"{PLACE}/{b}.jpg", f"a {b} square"]
    for a, b in (("red", "green"), ("blue", "red"), ("white", "black"))
]
CLASSES = ["red square", "blue square", "green circle"]
ENTRIES = [
    ["/vg/red.jpg", {"square": ["red"]}, [1, 0, 0], [1, 1, 0]],
    ["/vg/blue.jpg", {}, [0, 1, 0], [1, 1, 0]],
    ["/vg/green.jpg", {}, [0, 0, 0], [0, 1, 1]],
    ["/vg/white.jpg", {}, [1, 0, 0], [1, 0, 1]],
]


def write(path: Path, content) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_an_item_is_right_if_each_caption_prefers_its_own_image():
    generator = torch.Generator().manual_seed(0)
    images, image_of = torch.randn(6, 5, generator=generator), [0, 1, 1, 2, 5, 0, 3, 4]
    texts = images[image_of] + 1.5 * torch.randn(8, 5, generator=generator)
    expected = []
    for a, b in ((0, 1), (2, 3), (4, 5), (6, 7)):
        score = {(c, i): torch.cosine_similarity(texts[c], images[image_of[i]], dim=0) for c in (a, b) for i in (a, b)}
        expected.append(100.0 * bool(score[a, a] > score[a, b] and score[b, b] > score[b, a]))
    assert right_items(images, texts, image_of) == expected and 0 < sum(expected) < 400
    equal = torch.tensor([[1.0, 0], [1, 1]])  # equal similarities decide against the item
    assert right_items(torch.eye(2), equal, [0, 1]) == [0.0]


def literal_precision(scores: list[float], labels: list[bool]) -> float:
    """Sum over the ranks of the positives of the precision there; no equal scores."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    ranks = [rank for rank, i in enumerate(order, 1) if labels[i]]
    return 100 * sum(count / rank for count, rank in enumerate(ranks, 1)) / len(ranks)


def test_average_precision_is_of_each_class_s_hard_images():
    generator = torch.Generator().manual_seed(0)
    images, texts = torch.randn(30, 4, generator=generator), torch.randn(5, 4, generator=generator)
    present, hard = torch.rand(30, 5, generator=generator) < 0.3, torch.rand(30, 5, generator=generator) < 0.6
    hard[:, 3] = False  # no hard image
    present[:, 4] &= ~hard[:, 4]  # positives, but none of them hard
    scores = class_precisions(images, texts, present, hard)
    assert list(scores) == [0, 1, 2]
    cosine = torch.cosine_similarity(images[:, None].double(), texts[None].double(), dim=-1)
    for number, value in scores.items():
        rows = hard[:, number]
        expected = literal_precision(cosine[rows, number].tolist(), present[rows, number].tolist())
        assert value == pytest.approx(expected, abs=1e-3)
    flat, positives = torch.ones(4, 2), torch.tensor([[True], [False], [False], [False]])
    of_equals = class_precisions(flat, flat[:1], positives, torch.ones(4, 1, dtype=torch.bool))
    assert of_equals == {0: pytest.approx(25)}  # one threshold, whose precision is the share of positives


def test_the_multi_object_file(tmp_path):
    a = f"{PLACE}/a.jpg"
    broken = [["a", "b"], [a, "one", a, "two"], [a, " ", "b.jpg", "c"], ["https://x.org/", "a", "b.jpg", "c"]]
    data = read_cola(write(tmp_path / "multi.json", [*ITEMS, *broken]))
    assert data.part == MULTI and data.images == [f"{name}.jpg" for name in COLOURS]
    assert data.texts[:2] == ["a red square left", "a green square"] and data.image_of == [0, 1, 2, 0, 3, 4]
    kinds = ["not an item", "one image twice", "empty or non-text caption", "no image"]
    assert [bad.kind for bad in data.bad] == kinds
    assert data.bad[0].where == "multi.json, entry 3"


def test_a_single_object_file_by_keys_and_as_a_list(tmp_path):
    paco = ENTRIES[0][:1] + ENTRIES[0][2:]  # without the annotation
    broken = [["a.jpg", {}, [1, 0], [1, 1, 1]], ["a.jpg", {}, [1, 0, 0], [1, 2, 1]], [1, {}, [], []], "x"]
    entries = [*ENTRIES, paco, *broken]
    for content in ([CLASSES, entries], {"labels": CLASSES, "data": entries}):
        data = read_cola(write(tmp_path / "single.json", content))
        assert (data.part, data.texts) == (SINGLE, CLASSES)
        assert data.images == ["red.jpg", "blue.jpg", "green.jpg", "white.jpg", "red.jpg"]
        assert data.present.tolist() == [[value == 1 for value in entry[-2]] for entry in entries[:5]]
        assert data.hard.tolist() == [[value == 1 for value in entry[-1]] for entry in entries[:5]]
        assert [bad.kind for bad in data.bad] == ["bad label", "bad hard list", "not an entry", "not an entry"]
    with pytest.raises(UserError, match="none of Cola's files"):
        read_cola(write(tmp_path / "x.json", {"images": []}))


# ---- evaluated


@pytest.fixture
def config(tmp_path, coarse_results) -> ColaConfig:
    """Two encoders on three items of five images."""
    (tmp_path / "images").mkdir()
    for colour in COLOURS:
        Image.new("RGB", (32, 32), colour).save(tmp_path / "images" / f"{colour}.jpg")
    clips = [save_tiny_clip(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    data = write(tmp_path / "multi.json", ITEMS)
    return ColaConfig(encoders=clips, data=data, images=str(tmp_path / "images"), output=str(tmp_path / "out"))


def test_items_are_evaluated_without_those_of_unreadable_images(config, tmp_path):
    report = evaluate_cola(config)
    assert (report["part"], report["measure"], report["items"], report["images"]) == (MULTI, "accuracy", 3, 5)
    first, second = report["encoders"].values()
    for numbers in (first, second):
        assert set(numbers["scores_percent"]) <= {0.0, 100.0} and len(numbers["scores_percent"]) == 3
        assert numbers["score_percent"] == pytest.approx(sum(numbers["scores_percent"]) / 3)
    (line,) = report["compared"]
    assert line["difference"] == pytest.approx(second["score_percent"] - first["score_percent"])
    (tmp_path / "images" / "white.jpg").unlink()
    report = evaluate_cola(config)
    assert (report["items"], report["images"]) == (2, 4)
    assert [bad["kind"] for bad in report["left_out"]] == ["missing image"]
    (tmp_path / "images" / "red.jpg").unlink()
    with pytest.raises(UserError, match="leaves nothing to score"):
        evaluate_cola(replace(config, max_bad=1))


def test_classes_are_evaluated_without_those_that_no_hard_image_shows(config, tmp_path):
    data = write(tmp_path / "single.json", {"labels": CLASSES, "data": ENTRIES})
    report = evaluate_cola(replace(config, encoders=config.encoders[:1], data=data))
    (numbers,) = report["encoders"].values()
    scores = numbers["scores_percent"]
    assert (report["part"], report["measure"], report["classes"]) == (SINGLE, "mAP", 2)
    assert set(scores) == {"red square", "blue square"}
    assert numbers["score_percent"] == pytest.approx(sum(scores.values()) / 2)


def test_a_table_is_measured_by_item_or_by_class(config, tmp_path, capsys):
    settings = {"encoders": config.encoders[:1], "images": config.images, "output": config.output}
    for name, content in {"one": ITEMS[:1], "classes": {"labels": CLASSES, "data": ENTRIES}}.items():
        data = write(tmp_path / f"{name}.json", content)
        [encoder] = evaluate_cola(ColaConfig(data=data, **settings))["encoders"].values()
        expected = encoder["scores_percent"]
        printed = capsys.readouterr().out
        scores = cola_scores(settings | {"data": data})["t2i"]
        assert scores["above"] == (expected if name == "one" else [*expected.values()])
        assert len({*scores["groups"]}) == sum(scores["below"]) == len(scores["above"])  # each item or class by itself
        assert name != "one" or "(no interval: too few)" in printed  # of one item none can be known
