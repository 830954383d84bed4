"""The toy world: scenes, their pictures and captions, and what captions refer to."""

import random
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from debias_diffusion.data.toy_scenes import family, toy_scene
from debias_diffusion.toyworld.claims import Claim, Reference, resolve
from debias_diffusion.toyworld.grammar import long_caption
from debias_diffusion.toyworld.render import SIZE, render
from debias_diffusion.toyworld.scenes import BACKGROUNDS, COLOURS, KINDS, PLACES, SIZES, Scene, Thing, draw_scene, scene

seeds = st.integers(0, 2**40)
scenes = seeds.map(lambda seed: draw_scene(random.Random(seed)))


# ---- scenes


@pytest.mark.parametrize("split", ["test", "development-2", "referring-test", "short-test", "short-referring-test-2"])
def test_scenes_of_a_family_have_the_same_objects_and_others_do_not(split):
    names, by_family = [f"{split}/{index:06}" for index in range(96, 108)], {}
    shown = [toy_scene(name)[0] for name in names]
    for name, each in zip(names, shown, strict=True):
        objects = each.background, Counter((thing.kind, thing.colour, thing.size) for thing in each.things)
        assert by_family.setdefault(family(name), objects) == objects
    assert len(set(shown)) == 12 and len(by_family) == (12 if "short" in split else 3)
    assert all(family(name) == name for name in ("photos/000001.png", "test/1.png", "000007", "coco/test/000002"))


def test_splits_never_meet_and_a_scene_stays_what_it_was():
    splits = ("train", "validation", "development", "test", "test-2")
    assert len({scene(split, i) for split in splits for i in range(500)}) == 2500
    # Weights were trained on these scenes; they must be the same on every machine and Python.
    first, *others, last = scene("test", 3).things
    assert scene("test", 3).background == "pale blue" and len(others) == 3
    assert first == Thing("square", "purple", "large", "top left")
    assert last == Thing("square", "blue", "small", "bottom")


# ---- pictures


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_fills_its_place_and_no_other_and_kinds_differ(kind):
    blue, parts = {}, {}
    for size, (place, corner) in product(SIZES, PLACES.items()):
        picture = np.asarray(render(Scene("white", (Thing(kind, "blue", size, place),)))).astype(int)
        differs = (picture != BACKGROUNDS["white"]).any(axis=-1)
        for along, pixels in zip(corner, reversed(np.nonzero(differs)), strict=True):
            assert along * SIZE / 3 - 1 <= pixels.min() and pixels.max() <= (along + 1) * SIZE / 3
        parts[size, place] = ndimage.label(~differs)[1]  # of what is not the object
        blue[size] = (abs(picture - COLOURS["blue"]).sum(axis=-1) < 6).sum()
    assert blue["large"] > 2 * blue["small"] > 16
    assert parts["large", "centre"] == (2 if kind == "ring" else 1)  # outside and the hole


# ---- captions


def values(facts):
    return {place: {name: fact.value for name, fact in attributes.items()} for place, attributes in facts.items()}


@given(seed=seeds)
def test_a_fact_needs_each_of_its_sentences_and_no_further_one(seed):
    caption = long_caption(draw_scene(random.Random(seed), 4, 6), random.Random(seed), "referring")
    claims = dict(enumerate(sentence.claim for sentence in caption.sentences))
    facts = caption.facts()
    assert sum(len(fact["colour"].sentences) > 1 for fact in facts.values()) >= len(facts) / 2
    for place, attributes in facts.items():
        for name, fact in attributes.items():
            assert resolve({n: claims[n] for n in fact.sentences})[place][name].value == fact.value
            for left_out in fact.sentences:
                rest = {n: claim for n, claim in claims.items() if n != left_out}
                assert name not in resolve(rest).get(place, {})


def test_a_name_that_two_objects_have_says_nothing():
    stars = [Claim(Reference(place), (("kind", "star"),)) for place in ("top", "left")]
    red = Claim(Reference(kind="star"), (("colour", "red"),))
    assert values(resolve(dict(enumerate([*stars, red])))) == {"top": {"kind": "star"}, "left": {"kind": "star"}}
