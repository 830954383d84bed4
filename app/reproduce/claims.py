"""Claims of the papers, decided by differences between models."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from debias_diffusion.errors import UserError, near_matches
from debias_diffusion.files import read_json_object

from .differences import UNTESTED, Difference, joint_verdict, of_numbers, over_seeds
from .papers import Claim, Claims, Comparison, Model, Recorded

# (model, evaluation, score) -> {seed: values of queries, or one number}
Lookup = Callable[[Model, str, str], dict[int, list[float] | float]]


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
