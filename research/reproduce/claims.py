"""Differences between two models over several seeds, and the claims of the papers that they decide.

A seed has a training, and queries, of its own. So the difference of the two means over a seed's queries, paired by
query, is one observation in which the spread of trainings and of queries are both; seeds are independent of each other.
The interval is Student's over seeds, and p is of the paired t-test. Of a single seed they are those of
`intervals.paired_difference` over its queries, and hold for that training alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from debias_diffusion.errors import UserError, near_matches
from debias_diffusion.eval.intervals import paired_difference
from debias_diffusion.files import read_json_object

from .papers import Claim, Claims, Comparison, Model, Recorded

HOLDS, FAILS, UNDECIDED, UNTESTED = "holds", "does not hold", "not decided", "not tested"
# (model, evaluation, score) -> {seed: values of queries, or one number}
Lookup = Callable[[Model, str, str], dict[int, list[float] | float]]


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


def compared_models(claims: Claims, claim: Claim) -> Iterator[tuple[Comparison, dict[str, Model]]]:
    """Each comparison of a claim, with its models by name.

    Raises:
        UserError: a comparison names an unknown model.
    """
    for comparison in claim.compare:
        names = filter(None, (comparison.a, comparison.b, comparison.c, comparison.d))
        yield comparison, {name: _find_model(claims, name) for name in names}


def _find_model(claims: Claims, name: str) -> Model:
    if name not in claims.models:
        raise UserError(
            f"The claims compare an unknown model {name!r}.{near_matches(name, claims.models)} Known are "
            f"{', '.join(claims.models)}."
        )
    return claims.models[name]


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
        entry = {"claim": claim.claim, "source": claim.source, "published": claim.published, "note": claim.note}
        return entry | {"parts": parts, "verdict": verdict, "reason": reason}

    return {title: list(map(decided, group)) for title, group in claims.claims.items()}


def _compare(comparison: Comparison, models: dict[str, Model], scores: Lookup) -> dict:
    column, values = (comparison.evaluation, comparison.score), {}
    for name, model in models.items():
        values[name] = {seed: np.asarray(part, dtype=float) for seed, part in scores(model, *column).items()}
    a, b, text = values[comparison.a], values[comparison.b], f"{comparison.a} − {comparison.b}"
    if comparison.c is not None:
        c, d = values[comparison.c], values[comparison.d]
        a, b = ({seed: above[seed] - below[seed] for seed in above} for above, below in ((a, b), (c, d)))
        text = f"({text}) − ({comparison.c} − {comparison.d})"
    return _as_json(f"{text}: {' '.join(column)}", over_seeds(a, b), comparison)


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
        difference = Difference(*(measured[0].get(name) for name in ("difference", "low", "high", "p")), by_seed=[])
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
