import random
from collections import Counter
from itertools import permutations
from math import factorial

from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from debias_diffusion.captions import SAMPLERS, draw_generator, join_sentences, random_subset, summary


def test_algorithm_1_draws_every_ordered_subset_as_often_as_it_says():
    # n ~ U{1..4}, then each ordered choice of n among 4 is equally likely.
    sentences = ["S.", "a.", "b.", "c.", "d."]
    draws = 24_000
    counts = Counter(tuple(random_subset(sentences, draw_generator(0, 0, str(i)))) for i in range(draws))
    expected = {
        choice: draws / 4 / (factorial(4) / factorial(4 - n)) for n in range(1, 5) for choice in permutations("abcd", n)
    }
    expected = {tuple(f"{letter}." for letter in choice): count for choice, count in expected.items()}
    assert set(counts) == set(expected)
    assert chisquare([counts[key] for key in expected], list(expected.values())).pvalue > 1e-3


@given(st.lists(st.text(min_size=1), max_size=200, unique=True), st.integers(0, 2**31))
def test_random_subset_is_some_of_the_details_once_each(sentences, seed):
    drawn = random_subset(sentences, random.Random(seed))
    if len(sentences) <= 1:
        assert drawn == sentences
    else:
        assert 1 <= len(drawn) == len(set(drawn)) <= len(sentences) - 1
        assert set(drawn) <= set(sentences[1:])


def test_summary_is_the_first_sentence():
    assert summary(["One.", "Two."], random.Random(0)) == ["One."]
    assert {"random": random_subset, "summary": summary} == SAMPLERS


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
