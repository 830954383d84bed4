"""What only the toy world can say of a picture: which of the objects that its prompt names are drawn right."""

from collections.abc import Sequence

import numpy as np

from debias_diffusion.toyworld.checker import objects_correct
from debias_diffusion.toyworld.scenes import Scene

from ..common.intervals import mean_interval, paired_difference
from .networks import Picture, open_picture

LATE = 4  # number, from 0, of the first sentence that lies beyond what the opening says
Right = list[dict[str, bool]]  # of each picture, by place, whether the object there was drawn right
Told = Sequence[dict[str, int]]  # of each picture, by place, the sentence that first tells the object there, from 0

# By name, and for tables; in percent of the objects that prompts name.
SCORES = {"objects_right": "objects right, %", "objects_right_late": f"told late (sentence {LATE + 1} on), %"}


def objects_right(pictures: Sequence[Picture], scenes: Sequence[Scene]) -> Right:
    """For each picture, by place, whether a shape of the right kind and colour stands there."""
    return [objects_correct(open_picture(picture), its) for picture, its in zip(pictures, scenes, strict=True)]


def objects_numbers(right: Right, told: Told) -> dict:
    """The share of objects drawn right, in percent, with 95% intervals over pictures.

    The objects of a picture succeed or fail together, so that the intervals are those of pictures, not of objects.

    Returns:
        of `SCORES`, "value", "low" and "high" (those that no object is told for are left out);
        "objects_right_by_sentence", a list of the same with "sentence", from 1, and "objects", their number.
    """
    groups = {name: _values(right, told, first=first) for name, first in _FIRST.items()}
    numbers = {name: _number(*its) for name, its in groups.items() if its[0]}
    by_sentence = []
    for number in sorted({number for its in told for number in its.values()}):
        values, pictures = _values(right, told, number, number)
        by_sentence.append({"sentence": number + 1, "objects": len(values), **_number(values, pictures)})
    return numbers | {"objects_right_by_sentence": by_sentence}


def compare_objects(a: Right, b: Right, told: Told) -> dict[str, dict[str, float]]:
    """The paired comparison of two encoders by score, in points; pictures of one prompt stay together.

    Returns:
        {score: {"difference", a - b, "low", "high", "p"}}, see `intervals.paired_difference`
    """
    compared = {}
    for name, first in _FIRST.items():
        (values, pictures), (others, _) = (_values(right, told, first=first) for right in (a, b))
        if values:
            compared[name] = paired_difference(values, others, pictures)
    return compared


_FIRST = dict(zip(SCORES, (0, LATE), strict=True))


def _values(right: Right, told: Told, first: int, last: float = np.inf) -> tuple[list[float], list[int]]:
    """100 for each object that is right, else 0, of those told in sentences `first` to `last`; and their pictures."""
    found = [
        (100.0 * is_right, picture)
        for picture, (its, its_told) in enumerate(zip(right, told, strict=True))
        for place, is_right in its.items()
        if first <= its_told[place] <= last
    ]
    return [value for value, _ in found], [picture for _, picture in found]


def _number(values: Sequence[float], pictures: Sequence[int]) -> dict[str, float]:
    low, high = mean_interval(values, pictures)
    return {"value": float(np.mean(values)), "low": low, "high": high}
