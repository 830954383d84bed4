"""Scores of the toy world's objects: made-up images against closed forms, brute force and the theory of intervals."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion.eval.images.objects import (
    KIND_SCORES,
    LATE,
    SCORES,
    compare_images,
    compare_objects,
    objects_numbers,
)
from debias_diffusion.eval.images.references import ALONE, WITHIN
from debias_diffusion.eval.intervals import paired_difference
from debias_diffusion.toyworld.checker import Comparison
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import PLACES, Scene, Thing, scene

STAR, RING = Thing("star", "red", "small", "top"), Thing("ring", "blue", "large", "left")
SQUARE = Thing("square", "green", "large", "centre")
ASKED = Scene("grey", (STAR, RING, SQUARE))
MENTIONS = {"top": 1, "left": LATE, "centre": LATE}


def numbers_of(drawn: list[Scene], asked: list[Scene], mentions: list[dict[str, int]]) -> dict:
    """{score: value}, and by sentence {sentence: (objects right, precision, F1)}"""
    numbers = objects_numbers(compare_images([lambda its=its: render(its) for its in drawn], asked), mentions)
    values = {score: number["value"] for score, number in numbers.items() if isinstance(number, dict)}
    lines = {
        line["sentence"]: tuple(part and part["value"] for part in (line, line["precision"], line["f1"]))
        for line in numbers["objects_right_by_sentence"]
    }
    return values | {"by_sentence": lines}


def test_one_image_in_closed_form():
    """One object right in another size, one of the wrong colour, one missing, and two that nobody asked for."""
    further = (Thing("cross", "pink", "small", "bottom"), Thing("circle", "brown", "large", "right"))
    drawn = Scene("black", (replace(STAR, size="large"), replace(RING, colour="green"), *further))
    found = numbers_of([drawn], [ASKED], [MENTIONS])
    assert found == {
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
    precision, recall = found["objects_precision"], found["objects_right"]
    assert found["objects_f1"] == pytest.approx(2 * precision * recall / (precision + recall))


def test_objects_count_where_they_are_told():
    """Of two images of the star, the ring and the square: the star is right in both, the others in the first."""
    drawn, asked = [ASKED, Scene("grey", (STAR,))], [ASKED] * 2
    first, second = {"top": ALONE, "left": WITHIN, "centre": WITHIN}, {"top": ALONE, "left": ALONE, "centre": WITHIN}
    comparisons = compare_images([lambda its=its: render(its) for its in drawn], asked)
    numbers = objects_numbers(comparisons, [MENTIONS] * 2, [first, second])
    alone, within = numbers["objects_right_by_telling"]  # nothing is told across a cut
    assert (alone["told"], alone["objects"], alone["value"]) == (ALONE, 3, pytest.approx(200 / 3))
    assert (within["told"], within["objects"], within["value"]) == (WITHIN, 3, pytest.approx(200 / 3))
    assert (alone["precision"]["value"], within["precision"]["value"]) == (100, 100)
    assert alone["low"] <= alone["value"] <= alone["high"] and alone.keys() == within.keys()
    assert "objects_right_by_telling" not in objects_numbers(comparisons, [MENTIONS] * 2)
    worse = compare_images([lambda its=its: render(its) for its in (Scene("grey", (RING,)), Scene("grey", ()))], asked)
    found = compare_objects(comparisons, worse, [MENTIONS] * 2, [first, second])
    assert found["objects_right_alone"]["difference"] == pytest.approx(200 / 3)
    assert found["objects_right_within_chunk"]["difference"] == pytest.approx(100 / 3)
    assert found.keys() - set(SCORES) == set(list(KIND_SCORES.values())[:2])


def test_counts_of_images_are_pooled():
    """A full image weighs more than an empty one, which has no precision of its own."""
    nothing = Scene("grey", ())
    found = numbers_of([ASKED, nothing], [ASKED, Scene("grey", (STAR,))], [MENTIONS, {"top": 2}])
    assert (found["objects_right"], found["objects_precision"]) == (75, 100)
    assert found["objects_f1"] == pytest.approx(200 * 3 / (4 + 3))
    assert (found["empty_filled"], found["background_right"]) == (0, 100)
    assert found["by_sentence"][3] == (0, None, 0)  # no place of it is filled


def test_scores_of_nothing_are_left_out():
    everywhere = Scene("grey", tuple(replace(STAR, place=place) for place in PLACES))
    found = numbers_of([Scene("grey", ())], [everywhere], [dict.fromkeys(PLACES, 0)])
    assert found.keys() == {"objects_right", "objects_f1", "objects_right_with_size", "background_right", "by_sentence"}
    assert found["objects_right"] == found["objects_f1"] == 0


def test_rendered_scenes_are_all_right():
    scenes = [scene("test", index) for index in range(4)]
    mentions = [{thing.place: LATE for thing in its.things} for its in scenes]
    found = numbers_of(scenes, scenes, mentions)
    assert {name: found[name] for name in SCORES} == dict.fromkeys(SCORES, 100) | {"empty_filled": 0}
    worse = numbers_of([replace(its, things=its.things[1:]) for its in scenes], scenes, mentions)
    assert worse["objects_right"] < 100 == worse["objects_precision"]


@st.composite
def images(draw) -> tuple[list[Comparison], list[dict[str, int]]]:
    comparisons, mentions = [], []
    for _ in range(draw(st.integers(1, 4))):
        asked = draw(st.lists(st.sampled_from(list(PLACES)), min_size=1, unique=True))
        drawn = draw(st.lists(st.sampled_from(list(PLACES)), unique=True))
        correct = {place: place in drawn and draw(st.booleans()) for place in asked}
        sizes = {place: right and draw(st.booleans()) for place, right in correct.items()}
        comparisons.append(Comparison(correct, sizes, tuple(drawn), draw(st.booleans())))
        mentions.append({place: draw(st.integers(0, 6)) for place in asked})
    return comparisons, mentions


def shares(pairs: list[tuple[bool, bool]]) -> tuple[float | None, float | None, float | None]:
    """Recall, precision and F1, in percent, of (should be there, is there and right or None if nothing is)."""
    asked = [right for should, right in pairs if should]
    filled = [right for _, right in pairs if right is not None]
    hits = sum(bool(right) for right in asked)
    recall = 100 * hits / len(asked) if asked else None
    precision = 100 * hits / len(filled) if filled else None
    if not hits:
        return recall, precision, 0 if asked or filled else None
    return recall, precision, 2 * recall * precision / (recall + precision)


@settings(max_examples=40)
@given(images())
def test_scores_are_brute_force_counts(drawn):
    comparisons, mentions = drawn
    places = [
        # (number of the sentence, None where nothing should be; right, wrong, or None where nothing is)
        (of_image.get(place), seen.correct.get(place, False) if place in seen.drawn else None)
        for seen, of_image in zip(comparisons, mentions, strict=True)
        for place in PLACES
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("debias_diffusion.eval.intervals.SAMPLES", 10)
        numbers = objects_numbers(comparisons, mentions)
    values = [numbers.get(name) for name in ("objects_right", "objects_precision", "objects_f1")]
    expected = shares([(sentence is not None, right) for sentence, right in places])
    assert [number and number["value"] for number in values] == [e if e is None else pytest.approx(e) for e in expected]
    empty = [right is not None for sentence, right in places if sentence is None]
    filled = numbers.get("empty_filled")
    assert (filled and filled["value"]) == (pytest.approx(100 * np.mean(empty)) if empty else None)
    lines = {line["sentence"] - 1: line for line in numbers["objects_right_by_sentence"]}
    assert lines.keys() == {number for of_image in mentions for number in of_image.values()}
    for number, line in lines.items():
        expected = shares([(True, right) for sentence, right in places if sentence == number])
        found = [part and part["value"] for part in (line, line["precision"], line["f1"])]
        assert found == [e if e is None else pytest.approx(e) for e in expected]


# ---- how sure they are


def coins(rng: random.Random, share: float, count: int = 60) -> tuple[list[Comparison], list[dict[str, int]]]:
    """Images whose nine objects are all right, and of the same sentences, or all missing."""
    rows = [dict.fromkeys(PLACES, rng.random() < share) for _ in range(count)]
    comparisons = [Comparison(row, row, tuple(place for place in row if row[place]), row["top"]) for row in rows]
    return comparisons, [{place: number for number, place in enumerate(PLACES)}] * count


def test_objects_of_an_image_succeed_together():
    (a, mentions), (b, _) = coins(random.Random(0), 0.7), coins(random.Random(1), 0.3)
    numbers, found = objects_numbers(a, mentions), compare_objects(a, b, mentions)
    every = [100 * seen.background for seen in a]
    half = 1.96 * np.std(every) / np.sqrt(len(every))
    for name in ("objects_right", "objects_right_late", "objects_right_with_size", "background_right"):
        assert numbers[name]["value"] == pytest.approx(np.mean(every))
        assert numbers[name]["high"] - numbers[name]["value"] == pytest.approx(half, rel=0.15)
    expected = paired_difference(every, [100 * seen.background for seen in b])  # as if each image had one object
    assert found["objects_right"] == pytest.approx(expected)
    with pytest.raises(ValueError, match="with the same objects"):
        compare_objects(a, [replace(b[0], correct={"top": True}), *b[1:]], mentions)
    assert compare_objects(a, a, mentions)["objects_f1"] == {"difference": 0, "low": 0, "high": 0, "p": 1}
    assert [line["sentence"] for line in numbers["objects_right_by_sentence"]] == list(range(1, 10))


def test_an_encoder_that_invents_more_loses_precision_and_no_recall():
    """Of two encoders that draw the same objects right, b fills one more place in most images."""
    rng = random.Random(2)
    scenes = [Scene("grey", (STAR, RING))] * 40
    a = [Scene("grey", (STAR, RING)[: rng.randint(1, 2)]) for _ in scenes]
    b = [replace(its, things=(*its.things, *((SQUARE,) if rng.random() < 0.7 else ()))) for its in a]
    mentions = [{"top": 1, "left": 2}] * len(scenes)
    comparisons = [compare_images([lambda its=its: render(its) for its in drawn], scenes) for drawn in (a, b)]
    found = compare_objects(*comparisons, mentions)
    values = [objects_numbers(seen, mentions) for seen in comparisons]
    for score in ("objects_precision", "objects_f1", "empty_filled"):
        line, difference = found[score], values[0][score]["value"] - values[1][score]["value"]
        assert line["difference"] == pytest.approx(difference) and line["low"] < difference < line["high"]
        assert line["p"] < 0.001 and (line["high"] < 0 if score == "empty_filled" else line["low"] > 0)
        swapped = compare_objects(*comparisons[::-1], mentions)[score]
        assert (swapped["difference"], swapped["low"]) == pytest.approx((-difference, -line["high"]))
    assert found["objects_right"] == found["background_right"] == {"difference": 0, "low": 0, "high": 0, "p": 1}


def test_an_encoder_that_draws_nothing_has_no_precision_to_compare():
    something, nothing = ([Comparison({"top": right}, {"top": right}, ("top",) * right, True)] * 3 for right in (1, 0))
    found = compare_objects(something, nothing, [{"top": 0}] * 3)
    assert found["objects_right"]["difference"] == 100 and "objects_precision" not in found
