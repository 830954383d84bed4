"""Differences between two models, and the claims of the papers that they decide.

What varies is the unit. Where a model is trained or searched for each seed, a seed is one observation, in which the
spread of trainings and of queries are both: the interval is Student's over seeds, and p is of the paired t-test. Where
the models are the same in each seed, seeds are batches of queries: the queries of all seeds are pooled, and the
interval is `intervals.paired_ratio_difference` of them, whole groups resampled. So is that of a single seed, which
holds for that training alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy import stats

from debias_diffusion.errors import UserError
from debias_diffusion.eval.intervals import paired_ratio_difference
from debias_diffusion.files import read_json_object
from debias_diffusion.registry import Registry

from .papers import Claim, Claims, Comparison, Model, Queries, Recorded

HOLDS, FAILS, UNDECIDED, UNTESTED = "holds", "does not hold", "not decided", "not tested"
BySeed = Mapping[int, Queries | float]  # a score's queries, or one number, for each seed
Lookup = Callable[[Model, str, str], BySeed]  # of (model, evaluation, score)


@dataclass(frozen=True)
class Difference:
    """A score of one model less that of another.

    Attributes:
        difference: the mean over seeds, or of the pooled queries.
        low, high: 95% interval; None where one seed has no queries, or no two seeds differ.
        p: two-sided, likewise.
        unit: what the interval is over.
        by_seed: the difference of each seed.
    """

    difference: float
    low: float | None
    high: float | None
    p: float | None
    unit: Literal["seeds", "queries"]
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
        rounded = {name: part and float(f"{part:.4g}") for name, part in asdict(self).items() if name in _NUMBERS}
        return rounded | {"unit": self.unit, "by_seed": [float(f"{part:.4g}") for part in self.by_seed]}


_NUMBERS = ("difference", "low", "high", "p")


def compare(a: BySeed, b: BySeed, trained: bool = True) -> Difference:
    """The difference of a score of two models.

    Args:
        a, b: by seed, of the same queries in the same order, or one number.
        trained: whether each seed has models of its own; otherwise its queries are pooled with those of the others.

    Raises:
        ValueError: the seeds differ, or the groups of a seed's queries.
    """
    if a.keys() != b.keys() or not a:
        raise ValueError(f"a has the seeds {sorted(a)} and b {sorted(b)}; both must have the same")
    by_seed = [mean_of(a[seed]) - mean_of(b[seed]) for seed in sorted(a)]
    if (trained and len(a) > 1) or not all(isinstance(part, Queries) for part in (*a.values(), *b.values())):
        return of_numbers(by_seed)
    if any(a[seed].groups != b[seed].groups for seed in a):
        raise ValueError("both must have values of the same queries")
    line = paired_ratio_difference(_sums(a), _sums(b))
    return Difference(**line, unit="queries", by_seed=by_seed)


def mean_of(score: Queries | float) -> float:
    """The score of a seed."""
    return score.mean if isinstance(score, Queries) else score


def _sums(by_seed: Mapping[int, Queries]) -> tuple[np.ndarray, np.ndarray]:
    """Above and below the line, the sums of each group of each seed."""
    of_seeds = [by_seed[seed].group_sums() for seed in sorted(by_seed)]
    above, below = map(np.concatenate, zip(*of_seeds, strict=True))
    return above, below


def of_numbers(by_seed: Sequence[float]) -> Difference:
    """From the difference of each seed: Student's interval of the mean, and p."""
    mean = float(np.mean(by_seed))
    if len(set(by_seed)) < 2:  # of one seed, or of equal ones, nothing is known of the spread
        return Difference(mean, None, None, None, "seeds", list(by_seed))
    test = stats.ttest_1samp(by_seed, 0)
    low, high = map(float, test.confidence_interval())
    return Difference(mean, low, high, float(test.pvalue), "seeds", list(by_seed))


def joint_verdict(verdicts: Sequence[str]) -> str:
    """Of a claim with several parts: it holds if all do, and does not if one does not."""
    if not verdicts:
        return UNTESTED
    if FAILS in verdicts:
        return FAILS
    return HOLDS if all(verdict == HOLDS for verdict in verdicts) else UNDECIDED


def compared_models(claims: Claims, claim: Claim) -> Iterator[tuple[Comparison, list[tuple[str, Model]]]]:
    """Each comparison of a claim, with the names and models of a, b, and of c and d.

    Raises:
        UserError: a comparison names an unknown model.
    """
    models = Registry("model of the claims", claims.models)
    for comparison in claim.compare:
        names = filter(None, (comparison.a, comparison.b, comparison.c, comparison.d))
        yield comparison, [(name, models.find(name)) for name in names]


def decide(claims: Claims, scores: Lookup, repository: Path) -> dict[str, list[dict]]:
    """Every claim's parts and verdict as JSON values, by group.

    Args:
        repository: the folder that recorded files are named from.
    """

    def decided(claim: Claim) -> dict:
        parts = [_compare(*part, scores) for part in compared_models(claims, claim)]
        absent = dict.fromkeys(part.file for part in claim.recorded if not (repository / part.file).is_file())
        parts += [_recorded(part, repository) for part in claim.recorded if part.file not in absent]
        reason = " ".join(f"{file} is not here." for file in absent)
        verdict = UNTESTED if reason else joint_verdict([part["verdict"] for part in parts])
        entry = {name: getattr(claim, name) for name in ("claim", "source", "published", "note")}
        return entry | {"parts": parts, "verdict": verdict, "reason": reason}

    return {title: list(map(decided, group)) for title, group in claims.claims.items()}


def _compare(comparison: Comparison, models: list[tuple[str, Model]], scores: Lookup) -> dict:
    column = comparison.evaluation, comparison.score
    a, b, *less = (scores(model, *column) for _, model in models)
    text = f"{comparison.a} − {comparison.b}"
    if less:
        c, d = less
        text = f"({text}) − ({comparison.c} − {comparison.d})"
        a, b = ({seed: mean_of(x[seed]) - mean_of(y[seed]) for seed in x} for x, y in ((a, b), (c, d)))
    trained = any(model.is_trained for _, model in models)
    return _as_json(f"{text}: {' '.join(column)}", compare(a, b, trained), comparison)


def _as_json(text: str, difference: Difference, part: Comparison | Recorded, **file: str) -> dict:
    expected = {"sign": part.sign} | ({"margin": part.margin} if part.sign == "=" else {}) | file
    return {"text": text, **expected, **difference.numbers(), "verdict": difference.verdict(part.sign, part.margin)}


def _recorded(part: Recorded, repository: Path) -> dict:
    content = read_json_object(repository / part.file)
    measured = follow(content, part.path, part.file)
    if part.less is not None:
        subtracted = follow(content, part.less, part.file)
        difference = of_numbers([a - b for a, b in zip(measured, subtracted, strict=True)])
    elif len(measured) == 1:
        numbers = [measured[0].get(name) for name in _NUMBERS]
        difference = Difference(*numbers, measured[0]["unit"], measured[0]["by_seed"])
    else:
        difference = of_numbers([entry["difference"] for entry in measured])
    return _as_json(part.text, difference, part, file=part.file)


def follow(content: Any, path: list, file: str) -> list[Any]:
    """The values at the end of a path of keys, see `Recorded.path`, in the order of the file.

    Raises:
        UserError: there is no such key, or no single entry with these values.
    """
    values = [content]
    for key in path:
        if isinstance(key, dict):
            values = [[entry for entry in entries if key.items() <= entry.items()] for entries in values]
            if counts := {len(entries) for entries in values} - {1}:
                raise UserError(f"{file} has {min(counts)} entries with {key}, but there must be one.")
            values = [entry for [entry] in values]
        elif all(isinstance(value, Mapping) and (key == "*" or key in value) for value in values):
            values = [part for value in values for part in (value.values() if key == "*" else [value[key]])]
        else:
            raise UserError(f"{file} has no {' > '.join(map(str, path))}.")
    return values
