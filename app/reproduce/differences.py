"""Differences between two models over several seeds, and what they say of a claim.

A seed has a training, and queries, of its own. So the difference of the two means over a seed's queries, paired by
query, is one observation in which the spread of trainings and of queries are both; seeds are independent of each other.
The interval is Student's over seeds, and p is of the paired t-test. Of a single seed they are those of
`intervals.paired_difference` over its queries, and hold for that training alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy import stats

from debias_diffusion.eval.intervals import paired_difference

HOLDS, FAILS, UNDECIDED, UNTESTED = "holds", "does not hold", "not decided", "not tested"


@dataclass(frozen=True)
class Difference:
    """A score of one model less that of another.

    Attributes:
        difference: the mean over seeds.
        low, high: 95% interval; None where there is neither a second seed nor queries.
        p: two-sided, likewise.
        by_seed: the difference of each seed.
    """

    difference: float
    low: float | None
    high: float | None
    p: float | None
    by_seed: list[float]

    def verdict(self, sign: str, margin: float = 0.0) -> str:
        """Whether the interval lies above 0 ("+"), below ("-"), or between -margin and margin ("=")."""
        if self.low is None or self.high is None:
            return UNDECIDED
        if sign == "=":
            inside, outside = -margin <= self.low and self.high <= margin, self.low > margin or self.high < -margin
        else:
            low, high = (self.low, self.high) if sign == "+" else (-self.high, -self.low)
            inside, outside = low > 0, high < 0
        return HOLDS if inside else FAILS if outside else UNDECIDED

    def numbers(self) -> dict:
        """As JSON values, rounded."""
        numbers = {name: part for name, part in asdict(self).items() if name != "by_seed"}
        rounded = {name: part if part is None else float(f"{part:.4g}") for name, part in numbers.items()}
        return rounded | {"by_seed": [float(f"{part:.4g}") for part in self.by_seed]}


def over_seeds(a: Mapping[int, Sequence[float] | float], b: Mapping[int, Sequence[float] | float]) -> Difference:
    """The difference of a score of two models.

    Args:
        a, b: by seed, the values of the same queries in the same order, or one number.

    Raises:
        ValueError: the seeds differ, or the numbers of queries of a seed.
    """
    if a.keys() != b.keys() or not a:
        raise ValueError(f"a has the seeds {sorted(a)} and b {sorted(b)}; both must have the same")
    if any(np.shape(a[seed]) != np.shape(b[seed]) for seed in a):
        raise ValueError("both must have values of the same queries")
    by_seed = [float(np.mean(a[seed]) - np.mean(b[seed])) for seed in sorted(a)]
    [first, *others] = a
    if others or not np.ndim(a[first]):
        return of_numbers(by_seed)
    return Difference(**paired_difference(a[first], b[first]), by_seed=by_seed)


def of_numbers(by_seed: Sequence[float]) -> Difference:
    """From the difference of each seed: Student's interval of the mean, and p."""
    mean = float(np.mean(by_seed))
    if len(by_seed) < 2:
        return Difference(mean, None, None, None, list(by_seed))
    if len(set(by_seed)) == 1:  # no seed differs: the t-test is not defined
        return Difference(mean, mean, mean, 1.0 if mean == 0 else 0.0, list(by_seed))
    test = stats.ttest_1samp(by_seed, 0)
    low, high = map(float, test.confidence_interval())
    return Difference(mean, low, high, float(test.pvalue), list(by_seed))


def joint_verdict(verdicts: Sequence[str]) -> str:
    """Of a claim with several parts: it holds if all do, and does not if one does not."""
    if not verdicts:
        return UNTESTED
    if FAILS in verdicts:
        return FAILS
    return HOLDS if all(verdict == HOLDS for verdict in verdicts) else UNDECIDED
