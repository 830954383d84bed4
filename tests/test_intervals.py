"""Bootstrap intervals and the randomization test, against closed forms and the theory of large samples."""

import math
from itertools import product

import numpy as np
import pytest

from debias_diffusion.eval import intervals


def test_whole_families_are_drawn_by_hand():
    """Of two families of two, of which one hits, samples are 0, 50, 50 and 100; of four alone 0 and 100 are rare."""
    values, families = [100, 100, 0, 0], ["a", "a", "b", "b"]
    sums, counts = intervals.by_group(values, families)
    shares = np.unique(intervals.drawn_ratios(sums, counts), return_counts=True)
    assert shares[0].tolist() == [0, 50, 100] and shares[1] / intervals.SAMPLES == pytest.approx(
        [0.25, 0.5, 0.25], abs=0.02
    )
    alone = np.std(intervals.drawn_ratios(np.array(values), np.ones(4)))
    assert np.std(intervals.drawn_ratios(sums, counts)) == pytest.approx(math.sqrt(2) * alone, rel=0.05)


def test_where_all_groups_hit_or_none_the_interval_is_wilsons():
    groups = np.repeat(np.arange(5), 3)
    all_hit = intervals.hits_interval(np.full(15, 100.0), groups)
    assert all_hit == pytest.approx([100 * 5 / (5 + 1.959964**2), 100])  # Wilson 1927, of five trials
    assert intervals.hits_interval(np.zeros(15), groups) == pytest.approx([0, 100 - all_hit[0]])
    some = np.where(groups > 2, 100.0, 0.0)
    assert intervals.hits_interval(some, groups) == intervals.mean_interval(some, groups)
    assert intervals.hits_interval([100, 100], ["a", "a"]) == [None, None]


def test_the_difference_is_paired():
    random = np.random.default_rng(2)
    hard = random.normal(0, 10, size=400)  # how hard each query is, which both share
    a, b = hard + 0.2 + 0.1 * random.normal(size=400), hard
    result = intervals.paired_difference(a, b)
    assert result["difference"] == pytest.approx((a - b).mean())
    assert result["low"] > 0.18 and result["high"] < 0.22 and result["p"] < 0.001
    assert [result["low"], result["high"]] == intervals.mean_interval(a - b)
    swapped = intervals.paired_difference(b, a)
    assert swapped["difference"] == -result["difference"] and swapped["p"] == pytest.approx(result["p"])


@pytest.mark.filterwarnings("error")
def test_of_one_group_nothing_can_be_known():
    ones, unknown = np.ones(50), {"low": None, "high": None, "p": None}
    assert intervals.paired_difference([1, 0, 1], [1, 0, 1]) == {"difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    assert intervals.paired_difference(ones, 0 * ones)["p"] < 0.001
    for groups in (None, np.zeros(50, dtype=int)):  # all of one image: one observation
        count = 1 if groups is None else 50
        assert intervals.mean_interval(ones[:count], groups) == [None, None]
        assert intervals.paired_difference(ones[:count], 0 * ones[:count], groups) == {"difference": 1.0} | unknown
    assert intervals.mean_interval([1, 2, 3], [5, 5, 5]) == [None, None]
    for ratio in ((np.array([1.0]), np.array([2.0])), (np.array([0.0, 1.0]), np.array([0.0, 2.0]))):
        assert intervals.paired_ratio_difference(ratio, ratio) == {"difference": 0.0} | unknown  # others have no values


def test_the_difference_of_ratios_in_closed_form():
    """Three groups, with every exchange counted."""
    a = np.array([3.0, 2.0, 1.0]), np.array([3.0, 2.0, 2.0])
    b = np.array([1.0, 1.0, 0.0]), np.array([4.0, 2.0, 1.0])
    result = intervals.paired_ratio_difference(a, b)
    assert result["difference"] == pytest.approx(6 / 7 - 2 / 7)
    exchanged = []
    for kept in product((True, False), repeat=3):
        above, below = (np.where(kept, *pair) for pair in zip(a, b, strict=True))
        rest = [np.where(kept, *pair[::-1]) for pair in zip(a, b, strict=True)]
        exchanged.append(abs(above.sum() / below.sum() - rest[0].sum() / rest[1].sum()))
    assert result["p"] == pytest.approx(np.mean(np.array(exchanged) >= 4 / 7 - 1e-9), abs=0.015)
    assert intervals.paired_ratio_difference(a, a) == {"difference": 0, "low": 0, "high": 0, "p": 1}
