"""Scores of the toy world's objects: made-up images against closed forms, brute force and the theory of intervals."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion.eval.images.objects import LATE, SCORES, compare_images, compare_objects, objects_numbers
from debias_diffusion.eval.images.references import ALONE, WITHIN
from debias_diffusion.eval.intervals import paired_difference
from debias_diffusion.toyworld.checker import Comparison
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import PLACES, Scene, Thing, scene

STAR, RING = Thing("star", "red", "small", "top"), Thing("ring", "blue", "large", "left")
SQUARE = Thing("square", "green", "large", "centre")
ASKED, NOTHING = Scene("grey", (STAR, RING, SQUARE)), Scene("grey", ())
MENTIONS = {"top": 1, "left": LATE, "centre": LATE}
EQUAL = {"difference": 0, "low": 0, "high": 0, "p": 1}


def compared(shown: list[Scene], asked: list[Scene]) -> list[Comparison]:
    return compare_images([lambda shown=shown: render(shown) for shown in shown], asked)


def numbers_of(shown: list[Scene], asked: list[Scene], mentions: list[dict[str, int]]) -> dict:
    """{score: value}, and by sentence {sentence: (objects right, precision, F1)}"""
    numbers = objects_numbers(compared(shown, asked), mentions)
    values = {score: number["value"] for score, number in numbers.items() if isinstance(number, dict)}
    lines = {
        line["sentence"]: tuple(part and part["value"] for part in (line, line["precision"], line["f1"]))
        for line in numbers["objects_right_by_sentence"]
    }
    return values | {"by_sentence": lines}


def test_one_image_in_closed_form():
    """One object right in another size, one of the wrong colour, one missing, and two that nobody asked for."""
    further = (Thing("cross", "pink", "small", "bottom"), Thing("circle", "brown", "large", "right"))
    shown = Scene("black", (replace(STAR, size="large"), replace(RING, colour="green"), *further))
    assert numbers_of([shown], [ASKED], [MENTIONS]) == {
        "objects_right": pytest.approx(100 / 3),
        "objects_right_late": 0,
        "objects_precision": pytest.approx(100 / 4),
        "objects_f1": pytest.approx(200 / (3 + 4)),
        "objects_right_with_size": 0,
        "empty_filled": pytest.approx(200 / 6),
        "background_right": 0,
        # Sentence 5 mentions two objects: one is wrong and one is missing.
        "by_sentence": {2: (100, 100, 100), LATE + 1: (0, 0, 0)},
    }


def test_several_images_in_closed_form():
    """A full image weighs more than an empty one, which has no precision of its own."""
    numbers = numbers_of([ASKED, NOTHING], [ASKED, Scene("grey", (STAR,))], [MENTIONS, {"top": 2}])
    assert (numbers["objects_right"], numbers["objects_precision"]) == (75, 100)
    assert numbers["objects_f1"] == pytest.approx(200 * 3 / (4 + 3))
    assert (numbers["empty_filled"], numbers["background_right"]) == (0, 100)
    assert numbers["by_sentence"][3] == (0, None, 0)  # no place of it is filled
    everywhere = Scene("grey", tuple(replace(STAR, place=place) for place in PLACES))
    numbers = numbers_of([NOTHING], [everywhere], [dict.fromkeys(PLACES, 0)])  # scores of nothing are left out
    right = {"objects_right": 0, "objects_f1": 0, "objects_right_with_size": 0, "background_right": 100}
    assert numbers == right | {"by_sentence": {1: (0, None, 0)}}
    scenes = [scene("test", index) for index in range(4)]
    numbers = numbers_of(scenes, scenes, [{thing.place: LATE for thing in each.things} for each in scenes])
    assert {name: numbers[name] for name in SCORES} == dict.fromkeys(SCORES, 100) | {"empty_filled": 0}


def test_objects_count_where_and_how_they_are_mentioned():
    """Of two images of the star, the ring and the square: the star is right in both, the others in the first."""
    kinds = [{"top": ALONE, "left": WITHIN, "centre": WITHIN}, {"top": ALONE, "left": ALONE, "centre": WITHIN}]
    seen, mentions = compared([ASKED, Scene("grey", (STAR,))], [ASKED] * 2), [MENTIONS] * 2
    alone, within = objects_numbers(seen, mentions, kinds)["objects_right_by_telling"]  # none is across a cut
    for line, kind in ((alone, ALONE), (within, WITHIN)):
        assert (line["told"], line["objects"], line["value"]) == (kind, 3, pytest.approx(200 / 3))
        assert line["precision"]["value"] == 100 and line["low"] <= line["value"] <= line["high"]
    assert "objects_right_by_telling" not in objects_numbers(seen, mentions)
    lines = compare_objects(seen, compared([Scene("grey", (RING,)), NOTHING], [ASKED] * 2), mentions, kinds)
    assert lines.keys() - set(SCORES) == {"objects_right_alone", "objects_right_within_chunk"}
    assert lines["objects_right_alone"]["difference"] == pytest.approx(200 / 3)
    assert lines["objects_right_within_chunk"]["difference"] == pytest.approx(100 / 3)


@st.composite
def images(draw) -> tuple[list[Comparison], list[dict[str, int]]]:
    comparisons, mentions = [], []
    for _ in range(draw(st.integers(1, 4))):
        asked = draw(st.lists(st.sampled_from(list(PLACES)), min_size=1, unique=True))
        shown = draw(st.lists(st.sampled_from(list(PLACES)), unique=True))
        correct = {place: place in shown and draw(st.booleans()) for place in asked}
        sizes = {place: right and draw(st.booleans()) for place, right in correct.items()}
        comparisons.append(Comparison(correct, sizes, tuple(shown), draw(st.booleans())))
        mentions.append({place: draw(st.integers(0, 6)) for place in asked})
    return comparisons, mentions


def shares(pairs: list[tuple[bool, bool]]) -> list:
    """Recall, precision and F1, in percent, of (should be there, is there and right or None if nothing is)."""
    asked = [right for should, right in pairs if should]
    filled = [right for _, right in pairs if right is not None]
    hits = sum(bool(right) for right in asked)
    recall = 100 * hits / len(asked) if asked else None
    precision = 100 * hits / len(filled) if filled else None
    f1 = 2 * recall * precision / (recall + precision) if hits else 0 if asked or filled else None
    return [value and pytest.approx(value) for value in (recall, precision, f1)]


@settings(max_examples=40)
@given(images())
def test_scores_are_brute_force_counts(given):
    comparisons, mentions = given
    places = [
        # (number of the sentence, None where nothing should be; right, wrong, or None where nothing is)
        (of_image.get(place), seen.correct.get(place, False) if place in seen.filled else None)
        for seen, of_image in zip(comparisons, mentions, strict=True)
        for place in PLACES
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("debias_diffusion.eval.intervals.SAMPLES", 10)
        numbers = objects_numbers(comparisons, mentions)
    values = [numbers.get(name) for name in ("objects_right", "objects_precision", "objects_f1")]
    expected = shares([(sentence is not None, right) for sentence, right in places])
    assert [number and number["value"] for number in values] == expected
    empty = [right is not None for sentence, right in places if sentence is None]
    filled = numbers.get("empty_filled")
    assert (filled and filled["value"]) == (pytest.approx(100 * np.mean(empty)) if empty else None)
    lines = {line["sentence"] - 1: line for line in numbers["objects_right_by_sentence"]}
    assert lines.keys() == {number for of_image in mentions for number in of_image.values()}
    for number, line in lines.items():
        values = [part and part["value"] for part in (line, line["precision"], line["f1"])]
        assert values == shares([(True, right) for sentence, right in places if sentence == number])


# ---- intervals and comparisons


def coins(seed: int, share: float, count: int = 60) -> tuple[list[Comparison], list[dict[str, int]]]:
    """Images whose nine objects are all right, and of the same sentences, or all missing."""
    rng = random.Random(seed)
    rows = [dict.fromkeys(PLACES, rng.random() < share) for _ in range(count)]
    comparisons = [Comparison(row, row, tuple(place for place in row if row[place]), row["top"]) for row in rows]
    return comparisons, [{place: number for number, place in enumerate(PLACES)}] * count


def test_objects_of_an_image_succeed_together():
    (a, mentions), (b, _) = coins(0, 0.7), coins(1, 0.3)
    numbers, every = objects_numbers(a, mentions), [100 * seen.background for seen in a]
    half = 1.96 * np.std(every) / np.sqrt(len(every))
    for name in ("objects_right", "objects_right_late", "objects_right_with_size", "background_right"):
        assert numbers[name]["value"] == pytest.approx(np.mean(every))
        assert numbers[name]["high"] - numbers[name]["value"] == pytest.approx(half, rel=0.15)
    expected = paired_difference(every, [100 * seen.background for seen in b])  # as if each image had one object
    assert compare_objects(a, b, mentions)["objects_right"] == pytest.approx(expected)
    with pytest.raises(ValueError, match="with the same objects"):
        compare_objects(a, [replace(b[0], correct={"top": True}), *b[1:]], mentions)
    assert compare_objects(a, a, mentions)["objects_f1"] == EQUAL
    line = compare_objects(*([compared([each], [ASKED])[0]] for each in (ASKED, NOTHING)), [MENTIONS])["objects_right"]
    assert line == {"difference": 100, "low": None, "high": None, "p": None}  # of one image nothing more is known


def test_an_encoder_that_invents_more_loses_precision_and_no_recall():
    """Of two encoders that render the same objects right, b fills one more place in most images."""
    rng = random.Random(2)
    scenes = [Scene("grey", (STAR, RING))] * 40
    a = [Scene("grey", (STAR, RING)[: rng.randint(1, 2)]) for _ in scenes]
    b = [replace(each, things=(*each.things, *((SQUARE,) if rng.random() < 0.7 else ()))) for each in a]
    mentions, seen = [{"top": 1, "left": 2}] * len(scenes), [compared(shown, scenes) for shown in (a, b)]
    lines, values = compare_objects(*seen, mentions), [objects_numbers(each, mentions) for each in seen]
    for score in ("objects_precision", "objects_f1", "empty_filled"):
        line, difference = lines[score], values[0][score]["value"] - values[1][score]["value"]
        assert line["difference"] == pytest.approx(difference) and line["low"] < difference < line["high"]
        assert line["p"] < 0.001 and (line["high"] < 0 if score == "empty_filled" else line["low"] > 0)
        swapped = compare_objects(*seen[::-1], mentions)[score]
        assert (swapped["difference"], swapped["low"]) == pytest.approx((-difference, -line["high"]))
    assert lines["objects_right"] == lines["background_right"] == EQUAL
    something, nothing = ([Comparison({"top": right}, {"top": right}, ("top",) * right, True)] * 3 for right in (1, 0))
    lines = compare_objects(something, nothing, [{"top": 0}] * 3)
    assert lines["objects_right"]["difference"] == 100 and "objects_precision" not in lines
