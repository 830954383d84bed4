"""Cola's scores against the rules of its authors' script, its files, and an evaluation of both kinds."""

import json
from pathlib import Path

import pytest
import torch
from helpers.tiny_clip import save_tiny_clip
from PIL import Image

from research.evaluations.cola import MULTI, SINGLE, ColaConfig, class_precisions, evaluate_cola, read_cola, right_items
from research.reproduce.measuring import KINDS

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
    score, expected = torch.cosine_similarity(texts[:, None], images[image_of][None], dim=2), []
    for a, b in ((0, 1), (2, 3), (4, 5), (6, 7)):
        expected.append(100.0 * bool(score[a, a] > score[a, b] and score[b, b] > score[b, a]))
    assert right_items(images, texts, image_of) == expected and 0 < sum(expected) < 400
    equal = torch.tensor([[1.0, 0], [1, 1]])  # equal similarities decide against the item
    assert right_items(torch.eye(2), equal, [0, 1]) == [0.0]


def test_average_precision_is_of_each_class_s_hard_images():
    images = torch.tensor([[4.0, 0], [3, 1], [2, 2], [1, 3]])  # more and more unlike the class's text
    text, present = torch.tensor([[1.0, 0]]), torch.tensor([[True], [True], [False], [True]])
    for hard, expected in (
        ([True, True, True, True], {0: (1 + 1 + 3 / 4) / 3}),
        ([False, True, True, True], {0: (1 + 2 / 3) / 2}),
        ([False, False, True, False], {}),  # no hard image shows it
    ):
        scores = class_precisions(images, text, present, torch.tensor(hard)[:, None])
        assert scores == pytest.approx({number: 100 * share for number, share in expected.items()})
    of_equals = class_precisions(torch.ones(4, 2), text, present, torch.ones(4, 1, dtype=torch.bool))
    assert of_equals == pytest.approx({0: 75})  # one threshold, whose precision is the share of positives


def test_both_kinds_of_files(tmp_path):
    a = f"{PLACE}/a.jpg"
    broken = [["a", "b"], [a, "one", a, "two"], [a, " ", "b.jpg", "c"], ["https://x.org/", "a", "b.jpg", "c"]]
    data = read_cola(write(tmp_path / "multi.json", [*ITEMS, *broken]))
    assert data.part == MULTI and data.images == [f"{name}.jpg" for name in COLOURS]
    assert data.texts[:2] == ["a red square left", "a green square"] and data.image_of == [0, 1, 2, 0, 3, 4]
    assert [bad.where for bad in data.bad] == [f"multi.json, entry {index}" for index in range(3, 7)]

    broken = [["a.jpg", {}, [1, 0], [1, 1, 1]], ["a.jpg", {}, [1, 0, 0], [1, 2, 1]], [1, {}, [], []], "x"]
    entries = [*ENTRIES, ENTRIES[0][:1] + ENTRIES[0][2:], *broken]  # PACO's are without the annotation
    data = read_cola(write(tmp_path / "single.json", {"labels": CLASSES, "data": entries}))
    assert (data.part, data.texts) == (SINGLE, CLASSES)
    assert data.images == ["red.jpg", "blue.jpg", "green.jpg", "white.jpg", "red.jpg"]
    for flags, at in ((data.present, -2), (data.hard, -1)):
        assert flags.int().tolist() == [entry[at] for entry in entries[:5]]
    assert [bad.where for bad in data.bad] == [f"single.json, entry {index}" for index in range(5, 9)]


@pytest.mark.usefixtures("coarse_results")
def test_a_table_is_measured_by_item_or_by_class(tmp_path, capsys):
    (images := tmp_path / "images").mkdir()
    for colour in COLOURS:
        Image.new("RGB", (32, 32), colour).save(images / f"{colour}.jpg")
    settings = {"encoders": [save_tiny_clip(tmp_path / "clip")], "images": str(images), "output": str(tmp_path / "out")}
    for name, content in {"one": ITEMS[:1], "classes": {"labels": CLASSES, "data": ENTRIES}}.items():
        data = write(tmp_path / f"{name}.json", content)
        report = evaluate_cola(ColaConfig(data=data, **settings))
        [expected] = [encoder["scores_percent"] for encoder in report["encoders"].values()]
        printed, scores = capsys.readouterr().out, KINDS["cola"](settings | {"data": data})["t2i"]
        if name == "one":
            assert scores["above"] == expected and "(no interval)" in printed
        else:  # no hard image shows the third
            assert report["measure"] == "mAP" and set(expected) == {"red square", "blue square"}
            assert scores["above"] == [*expected.values()]
        assert len({*scores["groups"]}) == sum(scores["below"]) == len(scores["above"])  # each item or class by itself
