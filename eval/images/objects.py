"""Scores only the toy world has: what an image shows of its scene, and what it shows that nobody asked for.

Every score is a ratio of two counts, each summed over all images: `SCORES` names them. So a score of many images is
not the mean of the images' scores, and an image that shows nothing needs no precision of its own. Intervals resample
families of scenes, which share their objects, not images or objects.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from debias_diffusion.toyworld.checker import Comparison, compare, read_image
from debias_diffusion.toyworld.scenes import PLACES, Scene

from ..intervals import Groups, by_group, drawn_ratios, paired_ratio_difference, percent_ends
from .networks import ImageLike, load_image

LATE = 4  # number, from 0, of the first sentence that lies beyond what the opening says
# Of each image: the sentence, from 0, that first mentions the object in a place.
Mentions = Sequence[Mapping[str, int]]
Counts = dict[str, np.ndarray]  # by name, a count for each image, [images]

BY_SENTENCE = "objects_right_by_sentence"  # name of the list of scores by sentence
# By name: the title, and the counts above and below the line, see `_sums`. A count named twice is added twice.
SCORES = {
    "objects_right": ("objects right, %", ["right"], ["objects"]),
    "objects_right_late": (f"first mentioned in sentence {LATE + 1} or later, %", ["right_late"], ["objects_late"]),
    "objects_precision": ("precision of objects, %", ["right"], ["filled"]),
    "objects_f1": ("F1 of objects, %", ["right", "right"], ["objects", "filled"]),
    "objects_right_with_size": ("objects right, size too, %", ["right_with_size"], ["objects"]),
    "empty_filled": ("empty places filled, %", ["invented"], ["empty"]),
    "background_right": ("background right, %", ["background"], ["images"]),
}

NOTE = (
    "Objects right is a recall, of the objects that prompts ask for. The other side, places filled that nobody asked "
    "for, is in empty places filled, precision and F1."
)


def compare_images(images: Sequence[ImageLike], scenes: Sequence[Scene]) -> list[Comparison]:
    """What each image shows of its scene."""
    return [compare(read_image(load_image(image)), scene) for image, scene in zip(images, scenes, strict=True)]


def count(comparisons: Sequence[Comparison], places: Iterable[Collection[str]]) -> Counts:
    """What each image shows in some of its places.

    Args:
        places: of each image, those that count.

    Returns:
        by name, for each image: "objects" that should stand in these places, of them "right" (kind, colour and place)
        and "right_with_size"; "filled", how many of these places show anything, right or wrong; "empty", how many the
        scene leaves empty, of them "invented" (filled); "background", 1 if it is right; "images", always 1.
    """
    rows = []
    for seen, counted in zip(comparisons, places, strict=True):
        asked = [place for place in seen.correct if place in counted]
        row = {
            "objects": len(asked),
            "right": sum(seen.correct[place] for place in asked),
            "right_with_size": sum(seen.sizes[place] for place in asked),
            "filled": sum(place in counted for place in seen.filled),
            "empty": len(counted) - len(asked),
            "invented": sum(place in counted for place in seen.invented),
            "background": int(seen.background),
            "images": 1,
        }
        rows.append(row)
    return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in rows[0]}


def ratio(counts: Counts, score: str) -> tuple[np.ndarray, np.ndarray]:
    """The counts of each image above and below the line of a score, [images] each; their sums make the score."""
    above, below = (sum(counts[name] for name in names) for names in SCORES[score][1:])
    return above, below


def places_of(mentions: Sequence[Mapping], counts: Callable[[int | str], bool]) -> list[list[str]]:
    """Of each image, the places whose mention `counts`."""
    return [[place for place, mention in of_image.items() if counts(mention)] for of_image in mentions]


def objects_numbers(comparisons: Sequence[Comparison], mentions: Mentions, groups: Groups = None) -> dict:
    """Scores of images in percent, with 95% intervals over their groups.

    Returns:
        Of `SCORES`, "value", "low" and "high" (without scores of no object); "objects_right_by_sentence", a list for
        each sentence that first mentions objects: "sentence", from 1, "objects", their number, "value", "low" and
        "high" of the objects right, and "precision" and "f1" with the same three (precision is None if no place is
        filled).
    """
    sums = sums_by_image(comparisons, mentions)
    numbers = {score: number for score in sums if (number := _number(sums[score], groups))}
    numbers[BY_SENTENCE] = [
        {"sentence": sentence + 1} | numbers_of_places(comparisons, places_of(mentions, sentence.__eq__), groups)
        for sentence in sorted({sentence for of_image in mentions for sentence in of_image.values()})
    ]
    return numbers


def numbers_of_places(comparisons: Sequence[Comparison], places: Sequence[Collection[str]], groups: Groups) -> dict:
    """The number of objects in some places of each image, and their recall, precision and F1."""
    counts = count(comparisons, places)
    recall, precision, f1 = (_number(ratio(counts, f"objects_{name}"), groups) for name in ("right", "precision", "f1"))
    return {"objects": int(counts["objects"].sum()), **recall, "precision": precision, "f1": f1}


def compare_objects(
    a: Sequence[Comparison], b: Sequence[Comparison], mentions: Mentions, groups: Groups = None
) -> dict[str, dict[str, float]]:
    """The paired comparison of two encoders by score, in points; what belongs to a group stays together.

    Args:
        a, b: of the same images, with the same objects.
        groups: of the images.

    Returns:
        {score: {"difference", a - b, "low", "high", "p"}}, see `intervals.paired_ratio_difference`, of `SCORES`
        without those that a or b lacks.
    """
    sums_a, sums_b = (sums_by_image(comparisons, mentions) for comparisons in (a, b))
    compared = {}
    for score in sums_a:
        if sums_a[score][1].any() and sums_b[score][1].any():
            line = paired_ratio_difference(*(_by_group(sums[score], groups) for sums in (sums_a, sums_b)))
            points = {name: value and 100 * value for name, value in line.items()}  # None of a single group
            compared[score] = points | {"p": line["p"]}
    return compared


def sums_by_image(comparisons: Sequence[Comparison], mentions: Mentions) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The counts of each image above and below the line, by score."""
    counts, late = count(comparisons, [PLACES] * len(comparisons)), places_of(mentions, LATE.__le__)
    counts |= {f"{name}_late": values for name, values in count(comparisons, late).items()}
    return {score: ratio(counts, score) for score in SCORES}


def _by_group(sums: Sequence[np.ndarray], groups: Groups) -> tuple[np.ndarray, ...]:
    return tuple(by_group(counts, groups)[0] for counts in sums)


def _number(sums: Sequence[np.ndarray], groups: Groups) -> dict[str, float] | None:
    """The score, in percent, with its interval; None if there is nothing that could be right."""
    above, below = _by_group(sums, groups)
    if not below.any():
        return None
    percent = float(100 * above.sum() / below.sum())
    low, high = percent_ends(percent, np.count_nonzero(below), 100 * drawn_ratios(above, below))
    return {"value": percent, "low": low, "high": high}
