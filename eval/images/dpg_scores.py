"""Scores of DPG-Bench: which propositions hold, their shares by group, and the comparison of encoders."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ..intervals import mean_interval, paired_difference
from ..session import compare_encoders
from .dpg_questions import BAND_NAMES, Proposition

Key = tuple[str, int, int]  # prompt's id, image from 0, proposition's number


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
    """

    prompt: np.ndarray
    holds: np.ndarray
    yes: np.ndarray

    def __getitem__(self, chosen: np.ndarray) -> "Outcomes":
        return Outcomes(self.prompt[chosen], self.holds[chosen], self.yes[chosen])


def outcomes(
    propositions: Mapping[str, Sequence[Proposition]],
    yes: Mapping[Key, bool],
    images_per_prompt: int,
    bands: Mapping[tuple[str, int], str],
) -> tuple[Outcomes, dict[str, list[str]]]:
    """The outcome of every proposition on every image, and the name of each one's group, by how they are grouped.

    `propositions` are by the prompt's id, `bands` by (prompt's id, proposition's number).
    """
    rows, groups = [], {"by_category": [], "by_detail": [], "by_position": []}
    for place, (item, of_prompt) in enumerate(propositions.items()):
        for image in range(images_per_prompt):
            answered = {proposition.number: yes[item, image, proposition.number] for proposition in of_prompt}
            holding = holds(of_prompt, answered)
            for proposition in of_prompt:
                rows.append((place, 100.0 * holding[proposition.number], 100.0 * answered[proposition.number]))
                groups["by_category"].append(proposition.category)
                groups["by_detail"].append(f"{proposition.category} - {proposition.detail}")
                groups["by_position"].append(bands[item, proposition.number])
    prompt, holding, answered = map(np.array, zip(*rows, strict=True))
    return Outcomes(prompt.astype(int), holding, answered), groups


def prompt_scores(result: Outcomes) -> np.ndarray:
    """The mean over each prompt's images of the share of propositions that hold, in percent."""
    # All images of a prompt have equally many propositions, so this is the mean of their means.
    return np.bincount(result.prompt, result.holds) / np.bincount(result.prompt)


def score(result: Outcomes, groups: Mapping[str, Sequence[str]], images_per_prompt: int) -> dict:
    """The scores of `outcomes`, all in percent, 0 to 100, with 95% intervals over prompts.

    Returns:
        score_percent, interval_percent: the mean over prompts of the mean over their images of the share of
            propositions that hold.
        by_category, by_detail, by_position: for each group the number of propositions, the share that holds over all
            images, its interval, and the share answered yes, whatever they depend on.
    """
    scores = prompt_scores(result)
    numbers = {"score_percent": float(scores.mean()), "interval_percent": mean_interval(scores)}
    for group, names in groups.items():
        numbers[group] = {}
        for name, chosen in _members(group, names).items():
            members = result[chosen]
            numbers[group][name] = {
                "propositions": int(chosen.sum()) // images_per_prompt,
                "holds_percent": float(members.holds.mean()),
                "interval_percent": mean_interval(members.holds, members.prompt),
                "yes_percent": float(members.yes.mean()),
            }
    return numbers


def _members(group: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """{name: mask of the entries in it}, in order."""
    names = np.array(names)
    order = BAND_NAMES if group == "by_position" else sorted(set(names.tolist()))
    return {name: names == name for name in order if (names == name).any()}


def compare_outcomes(results: Mapping[str, Outcomes], groups: Mapping[str, Sequence[str]]) -> list[dict]:
    """Every two encoders compared by score and by position, in points, paired by prompt; see `compare_encoders`."""
    bands = {f"holds, {name}": chosen for name, chosen in _members("by_position", groups["by_position"]).items()}

    def difference(a: Outcomes, b: Outcomes, name: str) -> dict:
        if name not in bands:
            return paired_difference(prompt_scores(a), prompt_scores(b))
        return paired_difference(a.holds, b.holds, a.prompt)

    values = {
        label: {"score": result, **{name: result[chosen] for name, chosen in bands.items()}}
        for label, result in results.items()
    }
    return compare_encoders(values, difference)
