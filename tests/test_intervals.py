"""Bootstrap intervals and the randomization test, against closed forms and the theory of large samples."""

import math
from itertools import product

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion.eval.intervals import (
    SAMPLES,
    by_group,
    drawn_ratios,
    ends,
    hits_interval,
    mean_interval,
    paired_difference,
    paired_ratio_difference,
)


def test_values_of_one_group_are_drawn_together():
    values = np.random.default_rng(1).normal(size=300)
    repeated, groups = np.repeat(values, 5), np.repeat(np.arange(300), 5)
    assert mean_interval(repeated, groups) == pytest.approx(mean_interval(values))
    alone = np.diff(mean_interval(repeated))
    assert alone == pytest.approx(np.diff(mean_interval(values)) / math.sqrt(5), rel=0.05)


def test_whole_families_are_drawn_by_hand():
    """Of two families of two, of which one hits, samples are 0, 50, 50 and 100; of four alone 0 and 100 are rare."""
    values, families = [100, 100, 0, 0], ["a", "a", "b", "b"]
    sums, counts = by_group(values, families)
    shares = np.unique(drawn_ratios(sums, counts), return_counts=True)
    assert shares[0].tolist() == [0, 50, 100] and shares[1] / SAMPLES == pytest.approx([0.25, 0.5, 0.25], abs=0.02)
    alone = np.std(drawn_ratios(np.array(values), np.ones(4)))
    assert np.std(drawn_ratios(sums, counts)) == pytest.approx(math.sqrt(2) * alone, rel=0.05)


def test_the_standard_error_grows_with_what_a_family_shares():
    """By the design effect, sqrt(1 + 3 c) for families of four that share the part c of the variance."""
    random = np.random.default_rng(4)
    for common, factor in ((0.0, 1.0), (0.12, 1.17), (0.26, 1.33)):
        shared, own = np.repeat(random.normal(size=500), 4), random.normal(size=2000)
        values, families = math.sqrt(common) * shared + math.sqrt(1 - common) * own, np.repeat(np.arange(500), 4)
        wider = np.diff(mean_interval(values, families)) / np.diff(mean_interval(values))
        assert wider == pytest.approx(factor, rel=0.07)


def test_where_all_groups_hit_or_none_the_interval_is_wilsons():
    groups = np.repeat(np.arange(5), 3)
    all_hit = hits_interval(np.full(15, 100.0), groups)
    assert all_hit == pytest.approx([100 * 5 / (5 + 1.959964**2), 100])  # Wilson 1927, of five trials
    assert hits_interval(np.zeros(15), groups) == pytest.approx([0, 100 - all_hit[0]])
    some = np.where(groups > 2, 100.0, 0.0)
    assert hits_interval(some, groups) == mean_interval(some, groups)
    assert hits_interval([100, 100], ["a", "a"]) == [None, None]


def test_the_difference_is_paired():
    random = np.random.default_rng(2)
    hard = random.normal(0, 10, size=400)  # how hard each query is, which both share
    a, b = hard + 0.2 + 0.1 * random.normal(size=400), hard
    result = paired_difference(a, b)
    assert result["difference"] == pytest.approx((a - b).mean())
    assert result["low"] > 0.18 and result["high"] < 0.22 and result["p"] < 0.001
    assert [result["low"], result["high"]] == mean_interval(a - b)
    swapped = paired_difference(b, a)
    assert swapped["difference"] == -result["difference"] and swapped["p"] == pytest.approx(result["p"])


@pytest.mark.filterwarnings("error")
def test_of_one_group_nothing_can_be_known():
    ones, unknown = np.ones(50), {"low": None, "high": None, "p": None}
    assert paired_difference([1, 0, 1], [1, 0, 1]) == {"difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    assert paired_difference(ones, 0 * ones)["p"] < 0.001
    for groups in (None, np.zeros(50, dtype=int)):  # all of one image: one observation
        count = 1 if groups is None else 50
        assert mean_interval(ones[:count], groups) == [None, None]
        assert paired_difference(ones[:count], 0 * ones[:count], groups) == {"difference": 1.0} | unknown
    assert mean_interval([1, 2, 3], [5, 5, 5]) == [None, None]
    for ratio in ((np.array([1.0]), np.array([2.0])), (np.array([0.0, 1.0]), np.array([0.0, 2.0]))):
        assert paired_ratio_difference(ratio, ratio) == {"difference": 0.0} | unknown  # others have no values


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 5)), min_size=2, max_size=12))
def test_ratios_with_equal_divisors_are_means(rows):
    above_a, above_b, below = np.array(rows, dtype=float).T
    groups = np.repeat(np.arange(len(rows)), below.astype(int))
    a, b = ((above / below)[groups] for above in (above_a, above_b))
    expected = paired_difference(a, b, groups)
    assert paired_ratio_difference((above_a, below), (above_b, below)) == pytest.approx(expected, abs=1e-12)


def test_the_difference_of_ratios_in_closed_form():
    """Three groups, with every exchange counted."""
    a = np.array([3.0, 2.0, 1.0]), np.array([3.0, 2.0, 2.0])
    b = np.array([1.0, 1.0, 0.0]), np.array([4.0, 2.0, 1.0])
    result = paired_ratio_difference(a, b)
    assert result["difference"] == pytest.approx(6 / 7 - 2 / 7)
    exchanged = []
    for kept in product((True, False), repeat=3):
        above, below = (np.where(kept, *pair) for pair in zip(a, b, strict=True))
        rest = [np.where(kept, *pair[::-1]) for pair in zip(a, b, strict=True)]
        exchanged.append(abs(above.sum() / below.sum() - rest[0].sum() / rest[1].sum()))
    assert result["p"] == pytest.approx(np.mean(np.array(exchanged) >= 4 / 7 - 1e-9), abs=0.015)
    assert paired_ratio_difference(a, a) == {"difference": 0, "low": 0, "high": 0, "p": 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paired_ratio_difference((np.ones(2), np.ones(2)), (np.ones(1), np.ones(1))), "a has 2 groups and b 1"),
        (lambda: paired_ratio_difference((np.zeros(2), np.zeros(2)), (np.ones(2), np.ones(2))), "there are no values"),
        (lambda: paired_difference([1, 2], [1, 2, 3]), "a has 2 values and b 3"),
        (lambda: mean_interval([]), "there are no values"),
    ],
)
def test_unusable_values_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("groups", [2, 40, 1200])  # the draws of many groups are not kept
def test_draws_are_scipys_bootstrap(groups):
    random = np.random.default_rng(groups)
    above, below = random.random(groups), random.integers(1, 4, size=groups).astype(float)
    options = {"n_resamples": SAMPLES, "batch": 1_000_000 // groups, "paired": True, "method": "percentile"}
    theirs = scipy.stats.bootstrap(
        (above, below), lambda a, b, axis: a.sum(axis) / b.sum(axis), rng=np.random.default_rng(5), **options
    )
    ours = drawn_ratios(above, below, seed=5)
    np.testing.assert_allclose(ours, theirs.bootstrap_distribution, rtol=1e-12)
    assert ends(ours) == pytest.approx([theirs.confidence_interval.low, theirs.confidence_interval.high])
