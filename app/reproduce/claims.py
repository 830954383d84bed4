"""Claims of the papers, decided by differences between models."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from debias_diffusion.errors import UserError, near_matches
from debias_diffusion.files import read_json_object

from .differences import UNTESTED, Difference, joint_verdict, of_numbers, over_seeds
from .papers import Claim, Claims, Column, Comparison, Model, Recorded

# (model, evaluation, score) -> {seed: values of queries, or one number}
Lookup = Callable[[Model, str, str], dict[int, list[float] | float]]


def with_epochs(model: Model, epochs: int | None) -> Model:
    """The model trained for another number of epochs; a model without training, and None, change nothing."""
    if epochs is None or model.training is None:
        return model
    return replace(model, training=model.training | {"epochs": epochs})


def budgets(claim: Claim) -> list[int | None]:
    """The epochs that a claim is tested at; None: those of its models."""
    return list(claim.epochs) or [None]


def needed(claims: Claims) -> Iterator[tuple[Model, Column]]:
    """Every model that a comparison needs, with the column.

    Raises:
        UserError: a comparison names an unknown model.
    """
    for claim in all_claims(claims):
        for epochs in budgets(claim):
            for comparison in claim.compare:
                for name in comparison.names:
                    yield with_epochs(find_model(claims, name), epochs), Column(comparison.evaluation, comparison.score)


def all_claims(claims: Claims) -> list[Claim]:
    """The claims of all groups."""
    return [claim for group in claims.claims.values() for claim in group]


def find_model(claims: Claims, name: str) -> Model:
    """A model of the claims by its name. Raises UserError for an unknown one."""
    if name not in claims.models:
        raise UserError(
            f"The claims compare an unknown model {name!r}.{near_matches(name, claims.models)} Known are "
            f"{', '.join(claims.models)}."
        )
    return claims.models[name]


def decide(claims: Claims, scores: Lookup, repository: Path, fewest: int = 1) -> dict[str, list[dict]]:
    """Every claim's parts and verdict as JSON values, by group; a claim of several budgets is one entry for each.

    Args:
        scores: (model, evaluation, score) -> {seed: values}
        repository: the folder that recorded files are named from.
        fewest: seeds that all models of a comparison must have, or it is not run yet.
    """
    return {
        title: [
            _decide(claims, claim, epochs, scores, repository, fewest) for claim in group for epochs in budgets(claim)
        ]
        for title, group in claims.claims.items()
    }


def _decide(claims: Claims, claim: Claim, epochs: int | None, scores: Lookup, repository: Path, fewest: int) -> dict:
    compared = [_compared(claims, comparison, epochs, scores, fewest) for comparison in claim.compare]
    parts = [part for part in compared if part is not None]
    absent = [part.file for part in claim.recorded if not (repository / part.file).is_file()]
    parts += [_recorded(part, repository) for part in claim.recorded if part.file not in absent]
    reasons = [claim.not_tested] if claim.not_tested else []
    reasons += [f"{file} is not here." for file in dict.fromkeys(absent)]
    reasons += ["Not run yet."] * (len(parts) < len(compared) + len(claim.recorded) - len(absent))
    verdict = UNTESTED if reasons else joint_verdict([part["verdict"] for part in parts])
    entry = {"claim": claim.claim, "source": claim.source, "published": claim.published, "note": claim.note}
    return entry | {"epochs": epochs, "parts": parts, "verdict": verdict, "reason": " ".join(reasons)}


def _compared(claims: Claims, comparison: Comparison, epochs: int | None, scores: Lookup, fewest: int) -> dict | None:
    """A comparison over the seeds that all its models have; None where these are too few."""
    column, values = (comparison.evaluation, comparison.score), {}
    for name in comparison.names:
        model = with_epochs(find_model(claims, name), epochs)
        values[name] = {seed: np.asarray(part, dtype=float) for seed, part in scores(model, *column).items()}
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in values.values())))
    if len(seeds) < fewest:
        return None
    values = {name: {seed: by_seed[seed] for seed in seeds} for name, by_seed in values.items()}
    a, b = values[comparison.a], values[comparison.b]
    text = f"{comparison.a} − {comparison.b}"
    if comparison.c is not None:
        c, d = values[comparison.c], values[comparison.d]
        a, b = ({seed: above[seed] - below[seed] for seed in above} for above, below in ((a, b), (c, d)))
        text = f"({text}) − ({comparison.c} − {comparison.d})"
    difference = over_seeds(a, b)
    return _part(f"{text}: {' '.join(column)}", difference, comparison.sign, comparison.margin)


def _part(text: str, difference: Difference, sign: str, margin: float, file: str = "") -> dict:
    expected = {"sign": sign} | ({"margin": margin} if sign == "=" else {}) | ({"file": file} if file else {})
    return {"text": text, **expected, **difference.numbers(), "verdict": difference.verdict(sign, margin)}


def _recorded(part: Recorded, repository: Path) -> dict:
    content = read_json_object(repository / part.file)
    measured = [_entry(value, part) for value in follow(content, part.path, part.file)]
    if part.less is not None:
        subtracted = follow(content, part.less, part.file)
        difference = of_numbers([a - b for a, b in zip(measured, subtracted, strict=True)])
    elif len(measured) == 1 and isinstance(measured[0], dict):
        names = ("difference", "low", "high", "p")
        difference = Difference(*(measured[0].get(name) for name in names), by_seed=[])
    else:
        difference = of_numbers([part["difference"] if isinstance(part, dict) else part for part in measured])
    return _part(part.text, difference, part.sign, part.margin, part.file)


def _entry(value: Any, part: Recorded) -> Any:
    """The entry of a list that has the values `where`, and below it `entry`."""
    if part.where is not None:
        entries = [entry for entry in value if all(entry.get(key) == wanted for key, wanted in part.where.items())]
        if len(entries) != 1:
            raise UserError(f"{part.file} has {len(entries)} entries with {part.where}, but there must be one.")
        value = entries[0]
    [value] = follow(value, part.entry, part.file)
    return value


def follow(content: Any, path: list[str], file: str) -> list[Any]:
    """The values at the end of a path of keys, "*" for every key, in the order of the file.

    Raises:
        UserError: there is no such key.
    """
    values = [content]
    for key in path:
        if not all(isinstance(value, Mapping) and (key == "*" or key in value) for value in values):
            raise UserError(f"{file} has no {' > '.join(path)}.")
        values = [part for value in values for part in (value.values() if key == "*" else [value[key]])]
    return values
