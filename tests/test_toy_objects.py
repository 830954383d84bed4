"""Scores of the toy world's objects: made-up images against closed forms, brute force and the theory of intervals."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion.eval.images.objects import LATE, compare_images, compare_objects, objects_numbers
from debias_diffusion.eval.intervals import paired_difference
from debias_diffusion.toyworld.checker import Comparison
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


def test_one_image_in_closed_form():
    """One object right in another size, one of the wrong colour, one missing, and two that nobody asked for."""
    further = (Thing("cross", "pink", "small", "bottom"), Thing("circle", "brown", "large", "right"))
    shown = Scene("black", (replace(STAR, size="large"), replace(RING, colour="green"), *further))
    numbers = objects_numbers(compared([shown], [ASKED]), [MENTIONS])
    by_sentence = {line["sentence"]: values_of(line) for line in numbers.pop("objects_right_by_sentence")}
    # Sentence 5 mentions two objects: one is wrong and one is missing.
    assert by_sentence == {2: (100, 100, 100), LATE + 1: (0, 0, 0)}
    assert {score: number["value"] for score, number in numbers.items()} == {
        "objects_right": pytest.approx(100 / 3),
        "objects_right_late": 0,
        "objects_precision": pytest.approx(100 / 4),
        "objects_f1": pytest.approx(200 / (3 + 4)),
        "objects_right_with_size": 0,
        "empty_filled": pytest.approx(200 / 6),
        "background_right": 0,
    }


def shares(pairs):
    """Recall, precision and F1, in percent, of (should be there, is there and right or None if nothing is)."""
    asked = [right for should, right in pairs if should]
    filled = [right for _, right in pairs if right is not None]
    hits = sum(map(bool, asked))
    recall = 100 * hits / len(asked) if asked else None
    precision = 100 * hits / len(filled) if filled else None
    f1 = 2 * recall * precision / (recall + precision) if hits else 0 if asked or filled else None
    return tuple(value and pytest.approx(value) for value in (recall, precision, f1))


SOME = st.lists(st.sampled_from(list(PLACES)), unique=True)
IMAGES = st.lists(st.tuples(st.dictionaries(st.sampled_from(list(PLACES)), st.integers(0, 6), min_size=1), SOME, SOME))


@settings(max_examples=40)
@given(IMAGES.filter(bool))
def test_scores_are_brute_force_counts(images):
    """Of images: the sentences that mention places, places that are filled, and those of them that may be right."""
    mentions, comparisons, places = [of_image for of_image, _, _ in images], [], []
    for asked, filled, right in images:
        correct = {place: place in filled and place in right for place in asked}
        comparisons.append(Comparison(correct, correct, tuple(filled), True))
        places += [(asked.get(place), correct.get(place, False) if place in filled else None) for place in PLACES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("debias_diffusion.eval.intervals.SAMPLES", 10)
        numbers = objects_numbers(comparisons, mentions)
    values = {name: number["value"] for name, number in numbers.items() if isinstance(number, dict)}
    expected = shares([(sentence is not None, right) for sentence, right in places])
    assert tuple(map(values.get, ("objects_right", "objects_precision", "objects_f1"))) == expected
    lines = {line["sentence"] - 1: line for line in numbers["objects_right_by_sentence"]}
    assert lines.keys() == {number for of_image in mentions for number in of_image.values()}
    for number, line in lines.items():
        assert values_of(line) == shares([(True, right) for sentence, right in places if sentence == number])


# ---- intervals and comparisons


def coins(seed, share, count=60):
    """Images whose nine objects are all right or all missing."""
    rng = random.Random(seed)
    rows = [dict.fromkeys(PLACES, rng.random() < share) for _ in range(count)]
    return [Comparison(row, row, tuple(place for place in row if row[place]), row["top"]) for row in rows]


def test_objects_of_an_image_succeed_together():
    a, b, mentions = coins(0, 0.7), coins(1, 0.3), [{place: n for n, place in enumerate(PLACES)}] * 60
    numbers, every = objects_numbers(a, mentions), [100 * seen.background for seen in a]
    half = 1.96 * np.std(every) / np.sqrt(len(every))
    for name in ("objects_right", "objects_right_late", "objects_right_with_size", "background_right"):
        assert numbers[name]["value"] == pytest.approx(np.mean(every))
        assert numbers[name]["high"] - numbers[name]["value"] == pytest.approx(half, rel=0.15)
    expected = paired_difference(every, [100 * seen.background for seen in b])  # as if each image had one object
    assert compare_objects(a, b, mentions)["objects_right"] == pytest.approx(expected)
    line = compare_objects(*([compared([each], [ASKED])[0]] for each in (ASKED, NOTHING)), [MENTIONS])["objects_right"]
    assert line == {"difference": 100, "low": None, "high": None, "p": None}  # of one image nothing more is known


def test_a_family_of_scenes_is_drawn_whole():
    """Four scenes alike in all that they show say as much as one."""
    mentions, families = [{place: n for n, place in enumerate(PLACES)}], [number // 4 for number in range(240)]
    single = coins(0, 0.7), coins(1, 0.3)
    fours = [[each for each in shown for _ in range(4)] for shown in single]
    numbers = objects_numbers(fours[0], mentions * 240, None, families)
    for score, number in objects_numbers(single[0], mentions * 60).items():
        if isinstance(number, dict):
            assert numbers[score] == pytest.approx(number)
    line, *lines = numbers["objects_right_by_sentence"]
    assert line["high"] - line["low"] > 0 and len(lines) == 8
    found, expected = compare_objects(*fours, mentions * 240, None, families), compare_objects(*single, mentions * 60)
    assert all(found[score] == pytest.approx(line) for score, line in expected.items()) and len(found) == 6
