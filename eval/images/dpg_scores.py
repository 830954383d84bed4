"""Scores of DPG-Bench: which propositions hold, their shares by group, and the comparison of encoders."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ..intervals import hits_interval, mean_interval, paired_difference
from ..session import compare_encoders
from .dpg_questions import BAND_NAMES, Proposition

GROUPINGS = ("by_category", "by_detail", "by_position")


def holds(propositions: Iterable[Proposition], yes: Mapping[int, bool]) -> dict[int, bool]:
    """Which propositions of one image hold: answered yes, as are all propositions they depend on, however far back.

    Args:
        propositions: of one prompt, in any order, with all that they depend on, without circles.
        yes: by number.
    """
    parents = {proposition.number: proposition.parents for proposition in propositions}

    @cache
    def holds_too(number: int) -> bool:
        return yes[number] and all(map(holds_too, parents[number]))

    return {number: holds_too(number) for number in parents}


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of propositions, an entry for each proposition and image.

    Attributes:
        prompt: the index of its prompt.
        holds, yes: 100 if it holds, or was answered yes, else 0: a mean is in percent.
        groups: by_category, by_detail and by_position, the name of its group.
    """

    prompt: np.ndarray
    holds: np.ndarray
    yes: np.ndarray
    groups: dict[str, np.ndarray]

    def members(self, grouping: str) -> dict[str, "Outcomes"]:
        """The entries of each group, by its name, in order."""
        names = self.groups[grouping]
        order = BAND_NAMES if grouping == "by_position" else sorted(set(names.tolist()))
        masks = {name: names == name for name in order if name in names}
        return {name: Outcomes(self.prompt[m], self.holds[m], self.yes[m], {}) for name, m in masks.items()}


def outcomes(
    propositions: Mapping[str, Sequence[Proposition]], yes: Mapping[str, Sequence[Sequence[bool]]]
) -> Outcomes:
    """The outcome of every proposition on every image.

    Args:
        propositions: of each prompt.
        yes: of each prompt the answers, [images][propositions].
    """
    rows = []
    for place, (item, of_prompt) in enumerate(propositions.items()):
        for answers in yes[item]:
            holding = holds(of_prompt, {p.number: answer for p, answer in zip(of_prompt, answers, strict=True)})
            for proposition, answer in zip(of_prompt, answers, strict=True):
                detail = f"{proposition.category} - {proposition.detail}"
                numbers = place, 100.0 * holding[proposition.number], 100.0 * answer
                rows.append((*numbers, proposition.category, detail, proposition.position))
    prompt, holding, answered, *groups = map(np.array, zip(*rows, strict=True))
    return Outcomes(prompt, holding, answered, dict(zip(GROUPINGS, groups, strict=True)))


def prompt_scores(result: Outcomes) -> np.ndarray:
    """The mean over each prompt's images of the share of propositions that hold, in percent."""
    # All images of a prompt have equally many propositions, so this is the mean of their means.
    return np.bincount(result.prompt, result.holds) / np.bincount(result.prompt)


def score(result: Outcomes, images_per_prompt: int) -> dict:
    """The scores of `outcomes`, all in percent, 0 to 100, with 95% intervals over prompts.

    Returns:
        score_percent, interval_percent: the mean over prompts of the mean over their images of the share of
            propositions that hold.
        by_category, by_detail, by_position: for each group the number of propositions, the share that holds over all
            images, its interval, and the share answered yes, whatever they depend on.
    """
    scores = prompt_scores(result)
    numbers = {"score_percent": float(scores.mean()), "interval_percent": mean_interval(scores)}
    for grouping in GROUPINGS:
        numbers[grouping] = {
            name: {
                "propositions": len(members.prompt) // images_per_prompt,
                "holds_percent": float(members.holds.mean()),
                "interval_percent": hits_interval(members.holds, members.prompt.tolist()),
                "yes_percent": float(members.yes.mean()),
            }
            for name, members in result.members(grouping).items()
        }
    return numbers


def compare_outcomes(results: Mapping[str, Outcomes]) -> list[dict]:
    """Every two encoders compared by score and by position, in points, paired by prompt; see `compare_encoders`."""

    def difference(a: Outcomes, b: Outcomes, name: str) -> dict:
        if name == "score":
            return paired_difference(prompt_scores(a), prompt_scores(b))
        return paired_difference(a.holds, b.holds, a.prompt.tolist())

    values = {
        label: {"score": result} | {f"holds, {name}": band for name, band in result.members("by_position").items()}
        for label, result in results.items()
    }
    return compare_encoders(values, difference)
