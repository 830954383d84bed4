"""Scores of the toy world's objects: made-up images against closed forms, brute force and the theory of intervals."""

import random
from dataclasses import replace

import pytest

from debias_diffusion.eval.images.objects import LATE, compare_images, compare_objects, objects_numbers
from debias_diffusion.eval.intervals import paired_difference
from debias_diffusion.toyworld.checker import Comparison, describe, read_image
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import PLACES, Scene, Thing

STAR, RING = Thing("star", "red", "small", "top"), Thing("ring", "blue", "large", "left")
SQUARE = Thing("square", "green", "large", "centre")
ASKED, NOTHING = Scene("grey", (STAR, RING, SQUARE)), Scene("grey", ())
MENTIONS = {"top": 1, "left": LATE, "centre": LATE}


def compared(shown, asked):
    return compare_images([lambda shown=shown: render(shown) for shown in shown], asked)


def values_of(line):
    """(objects right, precision, F1)"""
    return tuple(part and part["value"] for part in (line, line["precision"], line["f1"]))


def test_images_in_closed_form():
    """One object right in another size, one of the wrong colour, one missing, two more than asked; then all right."""
    further = (Thing("cross", "pink", "small", "bottom"), Thing("circle", "brown", "large", "right"))
    shown = Scene("black", (replace(STAR, size="large"), replace(RING, colour="green"), *further))
    words = "Top: right, but large. Left: green ring. Centre: missing. Right: brown circle, for which nobody asked. "
    words += "Bottom: pink cross, for which nobody asked. Background: another."
    assert describe(read_image(render(shown)), ASKED) == f"1 of 3 objects right. {words}"
    numbers = objects_numbers(compared([shown, ASKED], [ASKED, ASKED]), [MENTIONS] * 2)
    by_sentence = {line["sentence"]: values_of(line) for line in numbers.pop("objects_right_by_sentence")}
    # Sentence 5 mentions two objects: of the first image one is wrong and one is missing.
    assert by_sentence == {2: (100, 100, 100), LATE + 1: pytest.approx((50, 200 / 3, 400 / 7))}
    assert {score: number["value"] for score, number in numbers.items()} == {
        "objects_right": pytest.approx(400 / 6),
        "objects_right_late": 50,
        "objects_precision": pytest.approx(400 / 7),
        "objects_f1": pytest.approx(800 / (6 + 7)),
        "objects_right_with_size": 50,
        "empty_filled": pytest.approx(200 / 12),
        "background_right": 50,
    }


def coins(seed, share, count=60):
    """Images whose nine objects are all right or all missing."""
    rng = random.Random(seed)
    rows = [dict.fromkeys(PLACES, rng.random() < share) for _ in range(count)]
    return [Comparison(row, row, tuple(place for place in row if row[place]), row["top"]) for row in rows]


def test_objects_of_an_image_succeed_together():
    a, b, mentions = coins(0, 0.7), coins(1, 0.3), [{place: n for n, place in enumerate(PLACES)}] * 60
    # as if each image had one object
    expected = paired_difference(*([100 * seen.background for seen in images] for images in (a, b)))
    assert compare_objects(a, b, mentions)["objects_right"] == pytest.approx(expected)
    line = compare_objects(*([compared([each], [ASKED])[0]] for each in (ASKED, NOTHING)), [MENTIONS])["objects_right"]
    assert line == {"difference": 100, "low": None, "high": None, "p": None}  # of one image nothing more is known


def test_a_family_of_scenes_is_drawn_whole():
    """Four scenes alike in all that they show say as much as one."""
    mentions, families = [{place: n for n, place in enumerate(PLACES)}], [number // 4 for number in range(240)]
    single = coins(0, 0.7), coins(1, 0.3)
    fours = [[each for each in shown for _ in range(4)] for shown in single]
    numbers = objects_numbers(fours[0], mentions * 240, families)
    for score, number in objects_numbers(single[0], mentions * 60).items():
        if isinstance(number, dict):
            assert numbers[score] == pytest.approx(number)
    line, *lines = numbers["objects_right_by_sentence"]
    assert line["high"] - line["low"] > 0 and len(lines) == 8
    found, expected = compare_objects(*fours, mentions * 240, families), compare_objects(*single, mentions * 60)
    assert all(found[score] == pytest.approx(line) for score, line in expected.items()) and len(found) == 6
