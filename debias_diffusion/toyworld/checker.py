"""Finds the object in each place of an image by template matching, without a network.

Each ninth of the image is compared with renderings of all kinds, colours and sizes on the image's background, moved by
up to a pixel, crisp and blurred. The nearest template wins if it is near enough.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageFilter

from .render import render
from .scenes import BACKGROUNDS, COLOURS, KINDS, PLACES, SIZES, Scene, Thing

SIZE = 48  # pixels that images are compared at
UNCLEAR = "unclear"
_CELL = SIZE // 3
_BLURS = (0.0, 0.6, 1.2)  # pixels: an autoencoder's edges may be softer than the renderer's
_FARTHEST = 40.0  # root mean square difference, of 0 to 255, above which nothing is recognised


class SceneReading(NamedTuple):
    """What an image shows: its background, and {place: Thing, None where it is empty, or "unclear"}."""

    background: str
    objects: dict[str, Thing | str | None]


def read_image(image: Image.Image) -> SceneReading:
    """Reads an image of any size."""
    pixels = np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BOX), np.float32)
    background = _background(pixels)
    labels, templates = _templates(background)
    cells = np.stack([_cell(pixels, place).ravel() for place in PLACES])
    # (t - c)^2 = t^2 - 2 t c + c^2, because a product of matrices is fast.
    squares = (templates**2).sum(1) - 2 * cells @ templates.T + (cells**2).sum(1, keepdims=True)
    distances = np.sqrt(np.maximum(squares, 0) / cells.shape[1])
    nearest = [labels[index] for index in distances.argmin(1)]
    objects = {
        place: UNCLEAR if distance > _FARTHEST else label and Thing(*label, place)
        for place, distance, label in zip(PLACES, distances.min(1), nearest, strict=True)
    }
    return SceneReading(background, objects)


@dataclass(frozen=True)
class Comparison:
    """What an image shows of a scene, and what it shows beside that.

    Attributes:
        correct: {place: whether the right kind and colour stand there}, for each object of the scene.
        sizes: {place: whether the size is right as well}, for the same objects.
        filled: the places where the image shows anything, "unclear" included.
        background: whether the image has the scene's background.
    """

    correct: dict[str, bool]
    sizes: dict[str, bool]
    filled: tuple[str, ...]
    background: bool

    @property
    def invented(self) -> tuple[str, ...]:
        """The places that the scene leaves empty and the image fills."""
        return tuple(place for place in self.filled if place not in self.correct)


def compare(reading: SceneReading, scene: Scene) -> Comparison:
    """Compares what an image shows with the scene that it should show."""
    correct, sizes = {}, {}
    for thing in scene.things:
        seen = reading.objects[thing.place]
        correct[thing.place] = isinstance(seen, Thing) and (seen.kind, seen.colour) == (thing.kind, thing.colour)
        sizes[thing.place] = seen == thing
    filled = tuple(place for place, there in reading.objects.items() if there is not None)
    return Comparison(correct, sizes, filled, reading.background == scene.background)


def describe(reading: SceneReading, scene: Scene) -> str:
    """What an image shows of its scene: "3 of 4 objects right. Top: missing. Left: red star, for which nobody asked."

    Places where the scene has an object come first. The size of an object does not count, but is named.
    """
    comparison, things, notes = compare(reading, scene), {thing.place: thing for thing in scene.things}, {}
    for place in sorted(PLACES, key=lambda place: [*things, *PLACES].index(place)):
        there = reading.objects[place]
        seen = f"{there.colour} {there.kind}" if isinstance(there, Thing) else "something unclear" if there else None
        if place not in things:
            notes[place] = seen and f"{seen}, for which nobody asked"
        elif not comparison.correct[place]:
            notes[place] = seen or "missing"
        elif not comparison.sizes[place]:
            notes[place] = f"right, but {there.size}"
    notes["background"] = None if comparison.background else "another"
    right = f"{sum(comparison.correct.values())} of {len(scene.things)} objects right."
    return " ".join([right, *(f"{place.capitalize()}: {note}." for place, note in notes.items() if note)])


def _background(pixels: np.ndarray) -> str:
    """The background colour nearest to the lines between places, which no object reaches."""
    lines = [0, _CELL - 1, _CELL, 2 * _CELL - 1, 2 * _CELL, SIZE - 1]
    colour = np.median(np.concatenate([pixels[lines].reshape(-1, 3), pixels[:, lines].reshape(-1, 3)]), axis=0)
    return min(BACKGROUNDS, key=lambda name: float(np.abs(colour - BACKGROUNDS[name]).sum()))


def _cell(pixels: np.ndarray, place: str) -> np.ndarray:
    column, row = PLACES[place]
    return pixels[row * _CELL : (row + 1) * _CELL, column * _CELL : (column + 1) * _CELL]


@cache
def _templates(background: str) -> tuple[list[tuple[str, str, str] | None], np.ndarray]:
    """(labels, templates [N, 16 * 16 * 3]) of all objects; the label is None for an empty place."""
    labels, templates = [None], [_cell(_pixels(Scene(background, ()), 0.0), "centre").ravel()]
    for label, blur in product(product(KINDS, COLOURS, SIZES), _BLURS):
        pixels = _pixels(Scene(background, (Thing(*label, "centre"),)), blur)
        for x, y in product((-1, 0, 1), repeat=2):
            labels.append(label)
            templates.append(_cell(np.roll(pixels, (y, x), (0, 1)), "centre").ravel())
    return labels, np.stack(templates)


def _pixels(scene: Scene, blur: float) -> np.ndarray:
    return np.asarray(render(scene, SIZE).filter(ImageFilter.GaussianBlur(blur)), np.float32)
