"""Bootstrap intervals and the randomization test, against closed forms and the theory of large samples."""

import math
from itertools import product

import numpy as np
import pytest
from scipy.stats import binom

from debias_diffusion.eval import intervals


def test_whole_families_are_drawn_by_hand():
    """Of six families of two, of which half hit, each of six draws hits or not; twelve alone vary less."""
    values, families = np.repeat([100, 0], 6), [*"aabbccddeeff"]
    sums, counts = intervals.by_group(values, families)
    shares = np.unique(intervals.drawn_ratios(sums, counts), return_counts=True)
    assert shares[0] == pytest.approx(np.arange(7) * 100 / 6)
    assert shares[1] / intervals.SAMPLES == pytest.approx(binom.pmf(range(7), 6, 0.5), abs=0.02)
    alone = np.std(intervals.drawn_ratios(values, np.ones(12)))
    assert np.std(intervals.drawn_ratios(sums, counts)) == pytest.approx(math.sqrt(2) * alone, rel=0.05)


def test_where_all_groups_are_alike_the_interval_is_wilsons():
    groups = np.repeat(np.arange(6), 3)
    all_hit = intervals.hits_interval(np.full(18, 100.0), groups)
    assert all_hit == pytest.approx([100 * 6 / (6 + 1.959964**2), 100])  # Wilson 1927, of six trials
    assert intervals.hits_interval(np.zeros(18), groups) == pytest.approx([0, 100 - all_hit[0]])
    third = intervals.hits_interval(np.tile([100.0, 0, 0], 6), groups)  # one of three in each
    assert third == intervals.wilson(2, 6) and third[0] < 100 / 3 < third[1]
    some = np.where(groups > 2, 100.0, 0.0)
    assert intervals.hits_interval(some, groups) == intervals.mean_interval(some, groups)


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
def test_of_fewer_than_six_groups_and_without_width_there_is_no_interval():
    values, unknown = np.arange(50.0), {"low": None, "high": None}
    for count, p in ((1, None), (5, 2 / 32), (6, 2 / 64)):
        groups, ones = np.arange(50) % count, np.full(50, 0.1)
        for interval in (intervals.mean_interval(values, groups), intervals.hits_interval(values > 20, groups)):
            assert (interval == [None, None]) == (count < 6)
        assert (intervals.wilson(count, count) == [None, None]) == (count < 6)
        found = intervals.paired_difference(ones, 0 * ones, groups)  # all groups are alike
        assert found == unknown | {"difference": pytest.approx(0.1), "p": p and pytest.approx(p, abs=0.006)}
    assert intervals.paired_difference(values, values) == {"difference": 0.0, "p": 1.0} | unknown
    ratio = np.arange(6.0), np.arange(6.0) + 1
    assert intervals.paired_ratio_difference(ratio, (ratio[0][::-1], ratio[1]))["low"] is not None
    ratio = np.array([0.0, *[1.0] * 5]), np.array([0.0, *[2.0] * 5])  # the first has no values
    assert intervals.paired_ratio_difference(ratio, ratio[::-1])["low"] is None


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
    assert intervals.paired_ratio_difference(a, a)["p"] == 1
