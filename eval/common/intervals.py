"""How sure a number is: bootstrap intervals of means, and the paired comparison of two encoders.

What is drawn anew is always a whole group, an image with all that belongs to it, because what belongs to one image
succeeds or fails together.
"""

from collections.abc import Sequence

import numpy as np

SAMPLES = 10_000
LEVEL = (2.5, 97.5)  # percentiles that hold 95%


def by_group(values: Sequence[float], groups: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Sums [G] and counts [G] of the values of each group; without groups each value is one of its own.

    Args:
        values: [N]
        groups: the group of each, from 0, [N].
    """
    values = np.asarray(values, dtype=np.float64)
    groups = np.arange(len(values)) if groups is None else np.asarray(groups)
    return np.bincount(groups, values), np.bincount(groups).astype(np.float64)


def mean_interval(values: Sequence[float], groups: Sequence[int] | None = None, seed: int = 0) -> list[float]:
    """[low, high] of the 95% percentile bootstrap interval of the mean of `values`.

    Args:
        values: [N], at least one.
        groups: the group of each value, from 0, [N]; None: each is one of its own.
        seed: of the draws; the same seed draws the same groups, whatever the values.

    Raises:
        ValueError: there are no values.
    """
    sums, counts = by_group(values, groups)
    _check(counts)
    return ends(drawn_ratios(sums, counts, seed))


def paired_difference(
    a: Sequence[float], b: Sequence[float], groups: Sequence[int] | None = None, seed: int = 0
) -> dict[str, float]:
    """The difference of two means, mean(a) - mean(b), of the same queries.

    The interval is the bootstrap's; the test is Fisher's randomization test: were both alike, each group's pair could
    as well stand the other way round, so p is the share of such arrangements (of `SAMPLES` drawn ones and the one
    seen) whose difference is at least as large.

    Args:
        a, b: [N] values of the same things, in the same order.
        groups: the group of each, from 0, [N]; None: each is one of its own.
        seed: of the draws.

    Returns:
        "difference", "low" and "high" (95% interval), and "p" in (0, 1], two-sided.

    Raises:
        ValueError: the lengths differ, or there are no values.
    """
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} values and b {len(b)}; both must be of the same things")
    ahead, counts = by_group(np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64), groups)
    _check(counts)
    low, high = ends(drawn_ratios(ahead, counts, seed))
    return {
        "difference": float(ahead.sum() / counts.sum()),
        "low": low,
        "high": high,
        "p": _randomization_p(ahead, seed),
    }


def drawn_ratios(above: np.ndarray, below: np.ndarray, seed: int = 0) -> np.ndarray:
    """sum(above) / sum(below) in each of `SAMPLES` data sets of as many groups, drawn with replacement; nan over 0.

    Args:
        above, below: sums of the groups, [G]: of values and their counts for a mean.
        seed: of the draws; the same seed draws the same groups, whatever the sums.

    Returns:
        [SAMPLES]
    """
    random = np.random.default_rng(seed)
    ratios = []
    for size in _pieces(len(above)):
        drawn = random.integers(len(above), size=(size, len(above)))
        drawn_below = below[drawn].sum(axis=1)
        ratios.append(above[drawn].sum(axis=1) / np.where(drawn_below, drawn_below, np.nan))
    return np.concatenate(ratios)


def _check(counts: np.ndarray) -> None:
    if not counts.sum():
        raise ValueError("there is nothing to draw from")


def _randomization_p(ahead: np.ndarray, seed: int) -> float:
    random, seen, as_large = np.random.default_rng(seed), abs(ahead.sum()), 0
    rounding = 1e-12 * np.abs(ahead).sum()  # sums in another order differ by it
    ahead = ahead[ahead != 0]  # turning nothing round changes nothing
    for size in _pieces(len(ahead)):
        signs = random.integers(2, size=(size, len(ahead)), dtype=np.int8)
        as_large += int((np.abs(2.0 * (signs @ ahead) - ahead.sum()) >= seen - rounding).sum())
    return (as_large + 1) / (SAMPLES + 1)


def _pieces(length: int) -> list[int]:
    """`SAMPLES` in pieces whose draws of `length` stay near 30 MB."""
    most = max(1, 4_000_000 // max(length, 1))
    return [min(most, SAMPLES - start) for start in range(0, SAMPLES, most)]


def ends(drawn: np.ndarray) -> list[float]:
    """[low, high] of the 95% interval of what was found in drawn data sets; those with nan are passed over."""
    return [float(end) for end in np.nanpercentile(drawn, LEVEL)]
