"""Captions that refer back: what they say, and which sentences one has to read together to know it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from debias_diffusion.toyworld.grammar import STYLES, full_caption, long_caption, short_caption
from debias_diffusion.toyworld.references import Claim, Reference, resolve, resolve_apart
from debias_diffusion.toyworld.scenes import draw_scene

seeds = st.integers(0, 2**40)


def _claims(caption):
    return {number: sentence.claim for number, sentence in enumerate(caption.sentences)}


def _values(facts):
    return {place: {name: fact.value for name, fact in attributes.items()} for place, attributes in facts.items()}


@pytest.mark.parametrize("write", [long_caption, full_caption, short_caption])
@given(seed=seeds, style=st.sampled_from(STYLES))
def test_a_caption_says_only_what_is_true_and_a_long_one_says_all(write, seed, style):
    scene = draw_scene(random.Random(seed), 1 if write is short_caption else 4, 6)
    caption = write(scene, random.Random(seed), style)
    true = {thing.place: {a: getattr(thing, a) for a in ("kind", "colour", "size")} for thing in scene.things}
    said = _values(caption.facts())
    assert said == {place: true[place] for place in said}
    assert set(caption.first_mentions()) == set(said)
    if write is not short_caption:
        assert said == true


@given(seed=seeds)
def test_a_fact_needs_each_of_its_sentences_and_no_further_one(seed):
    caption = long_caption(draw_scene(random.Random(seed), 4, 6), random.Random(seed), "referring")
    claims = _claims(caption)
    for place, attributes in caption.facts().items():
        for name, fact in attributes.items():
            assert resolve({n: claims[n] for n in fact.sentences})[place][name].value == fact.value
            for left_out in fact.sentences:
                rest = {n: claim for n, claim in claims.items() if n != left_out}
                assert name not in resolve(rest).get(place, {})


@given(seed=seeds)
def test_half_of_the_objects_or_more_refer_back(seed):
    scene = draw_scene(random.Random(seed), 4, 6)
    facts = long_caption(scene, random.Random(seed), "referring").facts()
    by_reference = sum(len(fact["colour"].sentences) > 1 for fact in facts.values())
    assert by_reference >= len(scene.things) / 2
    plain = long_caption(scene, random.Random(seed)).facts()
    assert all(len(fact.sentences) == 1 for attributes in plain.values() for fact in attributes.values())


def test_a_cut_between_two_sentences_loses_what_they_say_together():
    star = Claim(Reference("top"), (("kind", "star"),))
    it_is_blue = Claim(Reference(), (("colour", "blue"),))
    ring = Claim(Reference("left"), (("kind", "ring"), ("size", "small")))
    like_the_star = Claim(Reference(kind="ring", size="small"), same="colour", other=Reference(kind="star"))
    claims = {1: star, 2: it_is_blue, 3: None, 4: ring, 5: like_the_star}
    whole = resolve(claims)
    assert whole["top"]["colour"] == ("blue", {1, 2}) and whole["left"]["colour"] == ("blue", {1, 2, 4, 5})
    apart = resolve_apart([{n: claims[n] for n in part} for part in ((1,), (2, 3, 4, 5))])
    assert _values(apart) == {"top": {"kind": "star"}, "left": {"kind": "ring", "size": "small"}}


def test_a_name_that_two_objects_have_says_nothing():
    claims = {
        0: Claim(Reference("top"), (("kind", "star"),)),
        1: Claim(Reference("left"), (("kind", "star"),)),
        2: Claim(Reference(kind="star"), (("colour", "red"),)),
    }
    assert _values(resolve(claims)) == {"top": {"kind": "star"}, "left": {"kind": "star"}}
