"""Scenes: a few objects of some kinds and colours, each in its place, on a background.

A scene is a pure function of (split, index). The splits never share a key, so that training, development and test
scenes are drawn apart.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

KINDS = ("circle", "square", "triangle", "star", "cross", "ring")
# Far apart in RGB from each other and from the backgrounds, so that an image is unambiguous.
COLOURS = {
    "red": (214, 32, 38),
    "orange": (245, 138, 20),
    "yellow": (242, 214, 36),
    "green": (34, 150, 62),
    "blue": (32, 80, 214),
    "purple": (132, 44, 168),
    "pink": (246, 142, 190),
    "brown": (122, 72, 34),
}
BACKGROUNDS = {"white": (250, 250, 250), "grey": (168, 172, 178), "black": (14, 14, 18), "pale blue": (196, 226, 246)}
SIZES = {"small": 0.56, "large": 0.92}  # width of an object in thirds of the image
# Column and row of each place, from the top left.
PLACES = {
    "top left": (0, 0),
    "top": (1, 0),
    "top right": (2, 0),
    "left": (0, 1),
    "centre": (1, 1),
    "right": (2, 1),
    "bottom left": (0, 2),
    "bottom": (1, 2),
    "bottom right": (2, 2),
}
OBJECTS = (4, 6)  # fewest and most in a scene
KINDS_TOGETHER = (2, 3)  # few kinds a scene, so that many scenes have the same summary
# Consecutive scenes with the same objects in other places. Without them the objects alone identify a scene, and a CLIP
# learns to ignore places.
ARRANGEMENTS = 4
SPLITS = ("train", "validation", "development", "test")


@dataclass(frozen=True)
class Thing:
    """One object of a scene."""

    kind: str
    colour: str
    size: str
    place: str

    @property
    def description(self) -> str:
        """In words, such as "small red star, top left"."""
        return f"{self.size} {self.colour} {self.kind}, {self.place}"


@dataclass(frozen=True)
class Scene:
    """The content of an image: its background, and its objects in the order of their places."""

    background: str
    things: tuple[Thing, ...]


def draw_scene(rng: random.Random, fewest: int = OBJECTS[0], most: int = OBJECTS[1]) -> Scene:
    """A scene of `fewest` to `most` objects (1 to 9), no two in one place."""
    count = rng.randint(fewest, most)
    together = min(rng.randint(*KINDS_TOGETHER), count)
    kinds = rng.sample(KINDS, together)
    kinds += [rng.choice(kinds) for _ in range(count - together)]
    rng.shuffle(kinds)
    places = sorted(rng.sample(list(PLACES), count), key=list(PLACES).index)
    things = tuple(
        Thing(kind, rng.choice(list(COLOURS)), rng.choice(list(SIZES)), place)
        for kind, place in zip(kinds, places, strict=True)
    )
    return Scene(rng.choice(list(BACKGROUNDS)), things)


def generator(split: str, index: int, purpose: str) -> random.Random:
    """The random numbers for one purpose of one scene. A split with a suffix, as in "test-2", has new scenes."""
    return random.Random(f"toyworld/{split}/{index}/{purpose}")


def rearranged(scene: Scene, rng: random.Random) -> Scene:
    """The same objects in other places."""
    places = sorted(rng.sample(list(PLACES), len(scene.things)), key=list(PLACES).index)
    things = rng.sample(scene.things, len(scene.things))
    return Scene(scene.background, tuple(replace(thing, place=p) for thing, p in zip(things, places, strict=True)))


def arrangement(
    objects: tuple[int, int],
    number: int,
    rng: random.Random,
    change: Callable[[Scene, random.Random], Scene] = rearranged,
) -> Scene:
    """Arrangement `number` of a scene with `objects` (fewest, most); each is a `change` of the one before."""
    shown, arrangements, tried = draw_scene(rng, *objects), [], 0
    while len(arrangements) <= number:
        # Some scenes have fewer changes of another kind.
        shown, tried = (change if tried < 10 * ARRANGEMENTS else rearranged)(shown, rng), tried + 1
        if shown not in arrangements:
            arrangements.append(shown)
    return arrangements[number]


def scene(split: str, index: int) -> Scene:
    """Scene number `index` of a split, the same on every machine.

    Scenes 0 to 3 hold the same objects before the same background in different places, and so do 4 to 7, and so on.
    """
    family, number = divmod(index, ARRANGEMENTS)
    return arrangement(OBJECTS, number, generator(split, family, "family"))
