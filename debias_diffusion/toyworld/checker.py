"""Says what stands in each place of a picture, by comparing it with every object that could stand there.

No network: each third of the picture, in both directions, is compared with renderings of all kinds, colours and sizes
on the picture's background, moved by up to a pixel, crisp and blurred. The nearest is what stands there, provided it is
near enough.
"""

from functools import cache
from itertools import product

import numpy as np
from PIL import Image, ImageFilter

from .render import render
from .scenes import BACKGROUNDS, COLOURS, KINDS, PLACES, SIZES, Scene, Thing

SIZE = 48  # pixels that pictures are compared at
UNCLEAR = "unclear"
_CELL = SIZE // 3
_BLURS = (0.0, 0.6, 1.2)  # pixels: an autoencoder's edges may be softer than the renderer's
_FARTHEST = 40.0  # root mean square difference, of 0 to 255, past which nothing is recognised


def read_picture(picture: Image.Image) -> dict[str, Thing | str | None]:
    """What stands in each place: a Thing, None where it is empty, or "unclear"."""
    pixels = np.asarray(picture.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BOX), np.float32)
    labels, templates = _templates(_background(pixels))
    cells = np.stack([_cell(pixels, place).ravel() for place in PLACES])
    # (t - c)^2 = t^2 - 2 t c + c^2, because a product of matrices is fast.
    squares = (templates**2).sum(1) - 2 * cells @ templates.T + (cells**2).sum(1, keepdims=True)
    distances = np.sqrt(np.maximum(squares, 0) / cells.shape[1])
    return {
        place: _thing(labels[row.argmin()], place) if row.min() <= _FARTHEST else UNCLEAR
        for place, row in zip(PLACES, distances, strict=True)
    }


def objects_correct(picture: Image.Image, its: Scene) -> dict[str, bool]:
    """For each place of the scene that holds something, whether a shape of its kind and colour stands there."""
    seen = read_picture(picture)
    return {thing.place: _is(seen[thing.place], thing) for thing in its.things}


def _is(seen: Thing | str | None, thing: Thing) -> bool:
    return isinstance(seen, Thing) and (seen.kind, seen.colour) == (thing.kind, thing.colour)


def _background(pixels: np.ndarray) -> str:
    """The background nearest to the lines between the places, which no object reaches."""
    lines = [0, _CELL - 1, _CELL, 2 * _CELL - 1, 2 * _CELL, SIZE - 1]
    colour = np.median(np.concatenate([pixels[lines].reshape(-1, 3), pixels[:, lines].reshape(-1, 3)]), axis=0)
    return min(BACKGROUNDS, key=lambda name: float(np.abs(colour - BACKGROUNDS[name]).sum()))


def _cell(pixels: np.ndarray, place: str) -> np.ndarray:
    column, row = PLACES[place]
    return pixels[row * _CELL : (row + 1) * _CELL, column * _CELL : (column + 1) * _CELL]


@cache
def _templates(background: str) -> tuple[list[tuple[str, str, str] | None], np.ndarray]:
    """What could stand in a place, None for nothing, and how it looks: [N, 16 * 16 * 3]."""
    labels, templates = [None], [_cell(_looks(Scene(background, ()), 0.0), "centre").ravel()]
    for label, blur in product(product(KINDS, COLOURS, SIZES), _BLURS):
        pixels = _looks(Scene(background, (Thing(*label, "centre"),)), blur)
        for x, y in product((-1, 0, 1), repeat=2):
            labels.append(label)
            templates.append(_cell(np.roll(pixels, (y, x), (0, 1)), "centre").ravel())
    return labels, np.stack(templates)


def _looks(its: Scene, blur: float) -> np.ndarray:
    return np.asarray(render(its, SIZE).filter(ImageFilter.GaussianBlur(blur)), np.float32)


def _thing(label: tuple[str, str, str] | None, place: str) -> Thing | None:
    return label and Thing(*label, place)
