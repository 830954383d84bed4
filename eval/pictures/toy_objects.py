"""A score only the toy world has: which of the objects named by a prompt are correct in its image."""

from collections.abc import Sequence

import numpy as np

from debias_diffusion.toyworld.checker import objects_correct
from debias_diffusion.toyworld.scenes import Scene

from ..common.intervals import mean_interval, paired_difference
from .networks import Picture, open_picture

LATE = 4  # number, from 0, of the first sentence that lies beyond what the opening says
# Of each image, by place: whether the object there is correct, and the sentence, from 0, that first mentions it.
Correct = list[dict[str, bool]]
Mentions = Sequence[dict[str, int]]

# By name, and for tables; in percent of the objects that prompts name.
SCORES = {
    "objects_right": "objects right, %",
    "objects_right_late": f"first mentioned in sentence {LATE + 1} or later, %",
}
_FIRST = {"objects_right": 0, "objects_right_late": LATE}


def objects_right(images: Sequence[Picture], scenes: Sequence[Scene]) -> Correct:
    """`objects_correct` of each image and its scene."""
    return [objects_correct(open_picture(image), scene) for image, scene in zip(images, scenes, strict=True)]


def objects_numbers(correct: Correct, mentions: Mentions) -> dict:
    """The share of correct objects, in percent, with 95% intervals over images.

    Images are resampled, not objects, because the objects of an image succeed or fail together.

    Returns:
        Of `SCORES`, "value", "low" and "high" (without scores of no object); "objects_right_by_sentence", a list of the
        same for each sentence that first mentions objects: "sentence", from 1, and "objects", their number.
    """
    groups = {name: object_values(correct, mentions, first) for name, first in _FIRST.items()}
    numbers = {name: _number(values, images) for name, (values, images) in groups.items() if values}
    by_sentence = []
    for sentence in sorted({sentence for of_image in mentions for sentence in of_image.values()}):
        values, images = object_values(correct, mentions, sentence, sentence)
        by_sentence.append({"sentence": sentence + 1, "objects": len(values), **_number(values, images)})
    return numbers | {"objects_right_by_sentence": by_sentence}


def compare_objects(a: Correct, b: Correct, mentions: Mentions) -> dict[str, dict[str, float]]:
    """The paired comparison of two encoders by score, in points; the objects of an image stay together.

    Returns:
        {score: {"difference", a - b, "low", "high", "p"}}, see `intervals.paired_difference`

    Raises:
        ValueError: a and b are not of the same objects.
    """
    compared = {}
    for name, first in _FIRST.items():
        (values, images), (values_b, images_b) = (object_values(correct, mentions, first) for correct in (a, b))
        if images != images_b:
            raise ValueError("a and b must be of the same images, with the same objects")
        if values:
            compared[name] = paired_difference(values, values_b, images)
    return compared


def object_values(
    correct: Correct, mentions: Mentions, first: int = 0, last: float = np.inf
) -> tuple[list[float], list[int]]:
    """100 for each correct object, else 0, of those first mentioned in sentences `first` to `last`, and their images.

    Returns:
        values [N] and the index of each one's image [N], which `paired_difference` takes as groups
    """
    pairs = [
        (100.0 * is_correct, image)
        for image, (objects, sentences) in enumerate(zip(correct, mentions, strict=True))
        for place, is_correct in objects.items()
        if first <= sentences[place] <= last
    ]
    return [value for value, _ in pairs], [image for _, image in pairs]


def _number(values: Sequence[float], images: Sequence[int]) -> dict[str, float]:
    low, high = mean_interval(values, images)
    return {"value": float(np.mean(values)), "low": low, "high": high}
