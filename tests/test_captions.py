import random
from collections import Counter
from itertools import permutations
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from debias_diffusion.errors import UserError
from debias_diffusion.methods.sampling import SAMPLERS, draw_generator, find_sampler, join_sentences, random_subset
from debias_diffusion.sentences import split_sentences

SENTENCES = ["S.", "a.", "b.", "c.", "d."]
DETAILS = SENTENCES[1:]


def arrangements(items, size):
    """Every ordered choice of `size` items, each as likely as the others."""
    choices = list(permutations(items, size))
    return {choice: 1 / len(choices) for choice in choices}


def mixture(parts):
    """{choice: probability} of several equally likely or weighted parts."""
    total = Counter()
    for weight, part in parts:
        for choice, probability in part.items():
            total[choice] += weight * probability
    return dict(total)


# What each sampler draws from five sentences, and how often: the definitions, written out.
DEFINITIONS = {
    "random": mixture([(1 / 4, arrangements(DETAILS, n)) for n in range(1, 5)]),
    "ordered": {tuple(SENTENCES[1:end]): 1 / 4 for end in range(2, 6)},
    "independent": mixture([(comb(4, n) / 15, arrangements(DETAILS, n)) for n in range(1, 5)]),
    "shuffle": arrangements(DETAILS, 4),
    "keep-4": arrangements(DETAILS, 4),
    "keep-2": arrangements(DETAILS, 2),
    "keep-9": arrangements(DETAILS, 4),
    "summary": {("S.",): 1.0},
    "summary-as-released": {("S",): 1.0},
    "opening": {tuple(SENTENCES[:end]): 1 / 5 for end in range(1, 6)},
    "details": {tuple(DETAILS): 1.0},
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_sampler_draws_what_its_definition_says_as_often_as_it_says(name):
    sampler, expected, draws = find_sampler(name), DEFINITIONS[name], 24_000
    assert sum(expected.values()) == pytest.approx(1)
    counts = Counter(tuple(sampler(SENTENCES, draw_generator(0, 0, str(i)))) for i in range(draws))
    assert set(counts) == set(expected)
    if len(expected) > 1:
        observed = [counts[choice] for choice in expected]
        assert chisquare(observed, [draws * p for p in expected.values()]).pvalue > 1e-3


def test_every_sampler_has_a_definition():
    assert set(SAMPLERS) <= set(DEFINITIONS)


@pytest.mark.parametrize("name", DEFINITIONS)
@given(sentences=st.lists(st.text(min_size=1), max_size=200, unique=True), seed=st.integers(0, 2**31))
@settings(max_examples=50)
def test_a_short_caption_is_some_of_the_sentences_once_each(name, sentences, seed):
    before = list(sentences)
    drawn = find_sampler(name)(sentences, random.Random(seed))
    assert sentences == before
    assert bool(drawn) == bool(sentences)
    if name == "summary-as-released":  # a part of a sentence, or several
        assert drawn == (" ".join(sentences).split(". ")[:1] if sentences else [])
        return
    assert len(drawn) == len(set(drawn)) and set(drawn) <= set(sentences)
    if len(sentences) > 1 and name not in ("summary", "opening"):
        assert sentences[0] not in drawn
    if name in ("summary", "opening", "ordered", "details"):
        start = sentences.index(drawn[0]) if drawn else 0
        assert drawn == sentences[start : start + len(drawn)]
    if name.startswith("keep"):
        assert len(drawn) == min(int(name[5:]), max(len(sentences) - 1, min(len(sentences), 1)))


@pytest.mark.parametrize("name", DEFINITIONS)
def test_captions_of_no_and_of_one_sentence_stay_as_they_are(name):
    for sentences in ([], ["Only."]):
        assert find_sampler(name)(sentences, random.Random(0)) == sentences


@pytest.mark.parametrize("name", ["randm", "keep-0", "keep--1", "keep-x", "keep-", "keep4", "keep-1.5", ""])
def test_unknown_samplings_are_named(name):
    with pytest.raises(UserError, match=rf"Unknown sampling '{name}'.*random.*keep-N with another N from 1"):
        find_sampler(name)


@pytest.mark.parametrize(
    "caption",
    [
        "A man reads. He smiles.",
        "Mr. Lee reads a book. He smiles.",
        "Is it a dog? It is one. It barks.",
        "One sentence only.",
        "No stop at all",
        "Wait... a dog. A cat!",
    ],
)
def test_the_released_summary_is_long_clips_split_of_the_caption(caption):
    drawn = find_sampler("summary-as-released")(split_sentences(caption), random.Random(0))
    assert drawn == [caption.split(". ")[0]]


def test_draws_depend_on_seed_epoch_and_sample_and_on_nothing_else():
    def draw(*key):
        return draw_generator(*key).random()

    assert draw(0, 1, "a") == draw(0, 1, "a")
    assert len({draw(0, 0, "a"), draw(1, 0, "a"), draw(0, 1, "a"), draw(0, 0, "b")}) == 4


def test_a_draw_stays_what_it_was():
    # The same on every machine and Python, or a resumed run would not continue the same one.
    assert random_subset(["S.", "a.", "b.", "c.", "d."], draw_generator(7, 2, "coco/1.jpg")) == PINNED


PINNED = ["b.", "d.", "a."]


def test_sentences_are_joined_by_one_space():
    assert join_sentences(["A.", "B!"]) == "A. B!"
