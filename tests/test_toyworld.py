"""The toy world: scenes, their pictures and captions, and what captions refer to."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from transformers import CLIPTokenizer

from debias_diffusion.data.toy_scenes import family, toy_scene
from debias_diffusion.text.sentences import split_sentences
from debias_diffusion.text.tokens import CaptionTokenizer
from debias_diffusion.toyworld.claims import Claim, Reference, resolve
from debias_diffusion.toyworld.grammar import STYLES, full_caption, long_caption, short_caption
from debias_diffusion.toyworld.render import SIZE, render
from debias_diffusion.toyworld.scenes import (
    ARRANGEMENTS,
    BACKGROUNDS,
    COLOURS,
    KINDS,
    PLACES,
    SIZES,
    Scene,
    Thing,
    draw_scene,
    generator,
    scene,
)
from debias_diffusion.toyworld.shipped import WEIGHTS

seeds = st.integers(0, 2**40)
scenes = seeds.map(lambda seed: draw_scene(random.Random(seed)))


# ---- scenes


@given(scenes)
def test_a_scene_has_four_to_six_objects_in_places_of_their_own(shown):
    assert 4 <= len(shown.things) <= 6
    assert len({thing.kind for thing in shown.things}) in (2, 3)
    places = [list(PLACES).index(thing.place) for thing in shown.things]
    assert places == sorted(set(places))


def test_everything_occurs_about_equally_often_and_splits_never_meet():
    things = [thing for i in range(2000) for thing in scene("development", i).things]
    for attribute, allowed in (("kind", KINDS), ("colour", COLOURS), ("size", SIZES), ("place", PLACES)):
        counts = Counter(getattr(thing, attribute) for thing in things)
        assert set(counts) == set(allowed)
        assert max(counts.values()) < 1.25 * min(counts.values()), attribute
    splits = ("train", "validation", "development", "test", "test-2")
    assert len({scene(split, i) for split in splits for i in range(500)}) == 2500


def contents(shown):
    """A scene without its places."""
    return shown.background, tuple(sorted((thing.kind, thing.colour, thing.size) for thing in shown.things))


@pytest.mark.parametrize("first", [0, 100])
def test_four_scenes_in_a_row_differ_in_nothing_but_places(first):
    row = [scene("test", index) for index in range(first, first + ARRANGEMENTS)]
    assert len(set(map(contents, row))) == 1 and len(set(row)) == ARRANGEMENTS
    assert contents(scene("test", first + ARRANGEMENTS)) != contents(row[0])


@pytest.mark.parametrize("split", ["test", "development-2", "referring-test", "short-test", "short-referring-test-2"])
def test_scenes_of_a_family_have_the_same_objects_and_others_do_not(split):
    names = [f"{split}/{index:06}" for index in range(96, 108)]
    objects = [Counter((thing.kind, thing.colour, thing.size) for thing in toy_scene(name)[0].things) for name in names]
    by_family = {}
    for name, of_scene in zip(names, objects, strict=True):
        assert by_family.setdefault(family(name), of_scene) == of_scene
    assert len({*map(family, names)}) == (12 if "short" in split else 3)
    assert all(family(name) == name for name in ("photos/000001.png", "test/1.png", "000007", "coco/test/000002"))


def test_a_scene_stays_what_it_was():
    # Weights were trained on these scenes; they must be the same on every machine and Python.
    first, *others, last = scene("test", 3).things
    assert scene("test", 3).background == "pale blue" and len(others) == 3
    assert first == Thing("square", "purple", "large", "top left")
    assert last == Thing("square", "blue", "small", "bottom")


# ---- pictures


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_an_object_fills_its_place_and_no_other(kind, size):
    third = SIZE / 3
    for place, corner in PLACES.items():
        picture = np.asarray(render(Scene("white", (Thing(kind, "blue", size, place),)))).astype(int)
        differs = (picture != BACKGROUNDS["white"]).any(axis=-1)
        for along, pixels in zip(corner, reversed(np.nonzero(differs)), strict=True):
            assert along * third - 1 <= pixels.min() and pixels.max() <= (along + 1) * third
        pure = (abs(picture - COLOURS["blue"]).sum(axis=-1) < 6).sum()
        # Antialiased where edges are not straight: some pixels are neither the object nor the background.
        assert pure > 8 and (kind in ("square", "cross") or differs.sum() - pure > 5)


def test_a_large_object_is_larger_and_kinds_differ():
    def drawn(kind, size):
        return np.asarray(render(Scene("white", (Thing(kind, "red", size, "centre"),))))

    def area(kind, size):
        return (drawn(kind, size) < 200).any(axis=-1).sum()

    assert all(area(kind, "large") > 2 * area(kind, "small") for kind in KINDS)
    assert len({drawn(kind, "large").tobytes() for kind in KINDS}) == len(KINDS)
    assert ndimage.label((drawn("ring", "large") == 250).all(axis=-1))[1] == 2  # outside and the hole


# ---- captions


@given(scenes, seeds)
@settings(max_examples=200)
def test_a_caption_says_the_summary_first_then_every_object_once_and_only_truths(shown, seed):
    written = long_caption(shown, random.Random(seed))
    sentences = written.sentences
    assert 9 <= len(sentences) <= 14
    assert split_sentences(written.text) == [sentence.text for sentence in sentences]
    counts = Counter(thing.kind for thing in shown.things)
    assert all(kind in sentences[0].text for kind in counts) and sentences[0].mentions == ()
    assert not any(colour in sentences[0].text for colour in COLOURS)
    mentioned = written.first_mentions()
    assert set(mentioned) == {thing.place for thing in shown.things}
    by_place = {thing.place: thing for thing in shown.things}
    for sentence in sentences[1:]:
        for place in sentence.mentions:
            thing = by_place[place]
            assert place in sentence.text and thing.kind in sentence.text and thing.colour in sentence.text
    for sentence in sentences:
        check_relation(shown, sentence.text)


RELATIONS = {
    "to the left": lambda a, b: PLACES[a.place][0] < PLACES[b.place][0],
    "to the right": lambda a, b: PLACES[a.place][0] > PLACES[b.place][0],
    " above ": lambda a, b: PLACES[a.place][1] < PLACES[b.place][1],
    "higher up": lambda a, b: PLACES[a.place][1] < PLACES[b.place][1],
    " below ": lambda a, b: PLACES[a.place][1] > PLACES[b.place][1],
    "lower down": lambda a, b: PLACES[a.place][1] > PLACES[b.place][1],
    "larger than": lambda a, b: (a.size, b.size) == ("large", "small"),
}


def check_relation(shown, text):
    """A relation must hold for some pair of the objects it names, and every empty place must be empty."""
    for phrase in (phrase for phrase in RELATIONS if phrase in text):
        named = []
        for part in text.lower().split(phrase, 1):
            of_part = [thing for thing in shown.things if f"{thing.colour} {thing.kind}" in part]
            # A name with a place means that one object.
            exact = [t for t in of_part if f"{t.kind} in the {t.place} " in f"{part.rstrip('. ')} "]
            named.append(exact or of_part)
        assert any(RELATIONS[phrase](a, b) for a in named[0] for b in named[1] if a is not b), text
    if "empty" in text or "nothing at all" in text or "No object" in text:
        places = [place for place in PLACES if f" {place}" in text]
        assert max(places, key=len) not in {thing.place for thing in shown.things}, text


def test_short_captions_are_the_summary_and_one_or_two_objects():
    count = CaptionTokenizer(CLIPTokenizer.from_pretrained(WEIGHTS / "clip" / "tokenizer"), 77)
    written = [short_caption(scene("train", i), generator("train", i, "short")) for i in range(300)]
    details = [[sentence.mentions for sentence in caption.sentences[1:]] for caption in written]
    assert all([len(places) for places in of_one if places] in ([1], [1, 1]) for of_one in details)
    assert all(count.count(caption.text) <= 77 for caption in written)


# ---- captions that refer back


def _values(facts):
    return {place: {name: fact.value for name, fact in attributes.items()} for place, attributes in facts.items()}


@pytest.mark.parametrize("write", [long_caption, full_caption, short_caption])
@given(seed=seeds, style=st.sampled_from(STYLES))
def test_a_caption_claims_only_what_is_true_and_a_long_one_all(write, seed, style):
    shown = draw_scene(random.Random(seed), 1 if write is short_caption else 4, 6)
    caption = write(shown, random.Random(seed), style)
    true = {thing.place: {a: getattr(thing, a) for a in ("kind", "colour", "size")} for thing in shown.things}
    said = _values(caption.facts())
    assert said == {place: true[place] for place in said}
    assert set(caption.first_mentions()) == set(said)
    if write is not short_caption:
        assert said == true


@given(seed=seeds)
def test_a_fact_needs_each_of_its_sentences_and_no_further_one(seed):
    caption = long_caption(draw_scene(random.Random(seed), 4, 6), random.Random(seed), "referring")
    claims = dict(enumerate(sentence.claim for sentence in caption.sentences))
    for place, attributes in caption.facts().items():
        for name, fact in attributes.items():
            assert resolve({n: claims[n] for n in fact.sentences})[place][name].value == fact.value
            for left_out in fact.sentences:
                rest = {n: claim for n, claim in claims.items() if n != left_out}
                assert name not in resolve(rest).get(place, {})


@given(seed=seeds)
def test_half_of_the_objects_or_more_refer_back(seed):
    shown = draw_scene(random.Random(seed), 4, 6)
    facts = long_caption(shown, random.Random(seed), "referring").facts()
    by_reference = sum(len(fact["colour"].sentences) > 1 for fact in facts.values())
    assert by_reference >= len(shown.things) / 2
    plain = long_caption(shown, random.Random(seed)).facts()
    assert all(len(fact.sentences) == 1 for attributes in plain.values() for fact in attributes.values())


def test_a_cut_between_two_sentences_loses_what_they_say_together():
    star = Claim(Reference("top"), (("kind", "star"),))
    it_is_blue = Claim(Reference(), (("colour", "blue"),))
    ring = Claim(Reference("left"), (("kind", "ring"), ("size", "small")))
    like_the_star = Claim(Reference(kind="ring", size="small"), same="colour", other=Reference(kind="star"))
    claims = {1: star, 2: it_is_blue, 3: None, 4: ring, 5: like_the_star}
    whole = resolve(claims)
    assert whole["top"]["colour"] == ("blue", {1, 2}) and whole["left"]["colour"] == ("blue", {1, 2, 4, 5})
    first, second = (_values(resolve({n: claims[n] for n in part})) for part in ((1,), (2, 3, 4, 5)))
    assert (first, second) == ({"top": {"kind": "star"}}, {"left": {"kind": "ring", "size": "small"}})


def test_a_name_that_two_objects_have_says_nothing():
    claims = {
        0: Claim(Reference("top"), (("kind", "star"),)),
        1: Claim(Reference("left"), (("kind", "star"),)),
        2: Claim(Reference(kind="star"), (("colour", "red"),)),
    }
    assert _values(resolve(claims)) == {"top": {"kind": "star"}, "left": {"kind": "star"}}
