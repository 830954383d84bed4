"""What stands in a scene: a few objects of some kinds and colours, each in its place, before a background.

A scene is a pure function of (split, index). The splits never share a key, so that training, development and test
scenes are drawn apart.
"""

import random
from dataclasses import dataclass, replace

KINDS = ("circle", "square", "triangle", "star", "cross", "ring")
# Far apart in RGB from each other and from the backgrounds, so that a picture says which one is meant.
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
SIZES = {"small": 0.56, "large": 0.92}  # width of an object in thirds of the picture
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
# Scenes in a row that hold the same objects in other places. Without such neighbours what stands in a scene tells it
# from all others, and a CLIP learns to pass over where it stands.
ARRANGEMENTS = 4
SPLITS = ("train", "validation", "development", "test")


@dataclass(frozen=True)
class Thing:
    """One object of a scene."""

    kind: str
    colour: str
    size: str
    place: str


@dataclass(frozen=True)
class Scene:
    """What a picture shows: its background, and its objects in the order of their places."""

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
    """The random numbers for one purpose of one scene. Raises ValueError for an unknown split."""
    # A further split, such as "test-2" for a repetition with fresh scenes, is as good as those listed.
    if split.partition("-")[0] not in SPLITS:
        raise ValueError(f"unknown split {split!r}; it must be one of {', '.join(SPLITS)}, or one of them with -suffix")
    return random.Random(f"toyworld/{split}/{index}/{purpose}")


def scene(split: str, index: int) -> Scene:
    """Scene number `index` of a split, the same on every machine.

    Scenes 0 to 3 hold the same objects before the same background in different places, and so do 4 to 7, and so on.
    """
    family, number = divmod(index, ARRANGEMENTS)
    return _arrangement(OBJECTS, number, generator(split, family, "family"))


def base_scene(index: int) -> Scene:
    """Scene number `index` of those that the base models learn from: four in a row as `scene`, of one to six objects.

    Half of them hold a single one, because where things stand is learned from those, within a few hundred steps; from
    scenes of several it was not learned in thousands.
    """
    family, number = divmod(index, ARRANGEMENTS)
    rng = generator("train", family, "base family")
    return _arrangement((1, rng.choice((1, OBJECTS[1]))), number, rng)


def _arrangement(objects: tuple[int, int], number: int, rng: random.Random) -> Scene:
    """Arrangement number `number` of a scene, no two of them equal."""
    its, arrangements = draw_scene(rng, *objects), []
    while len(arrangements) <= number:
        its = _rearranged(its, rng)
        if its not in arrangements:
            arrangements.append(its)
    return arrangements[number]


def _rearranged(its: Scene, rng: random.Random) -> Scene:
    places = sorted(rng.sample(list(PLACES), len(its.things)), key=list(PLACES).index)
    things = rng.sample(its.things, len(its.things))
    return Scene(its.background, tuple(replace(thing, place=p) for thing, p in zip(things, places, strict=True)))
