"""The scenes that base models are trained on."""

import random
from dataclasses import replace

from debias_diffusion.toyworld.scenes import ARRANGEMENTS, OBJECTS, Scene, arrangement, generator, rearranged

_COMBINED = ("kind", "colour", "size")


def base_scene(index: int) -> Scene:
    """Scene number `index`: families as in `toyworld.scenes.scene`, of one to six objects.

    A third of the scenes have a single object: from these, places are learned within a few hundred steps; from scenes
    of several objects they were not learned in thousands. A third have two: from these, what belongs together is
    learned. Half of the families of several objects exchange colours, kinds and sizes between the places instead of
    moving the objects.
    """
    family, number = divmod(index, ARRANGEMENTS)
    rng = generator("train", family, "base family")
    objects = rng.choice(((1, 1), (2, 2), (2, OBJECTS[1])))
    return arrangement(objects, number, rng, exchanged if rng.random() < 0.5 else rearranged)


def exchanged(scene: Scene, rng: random.Random) -> Scene:
    """The same kinds, colours and sizes in the same places, but one of the three otherwise distributed.

    Of the three only one, because whoever can tell colours apart need not know the kinds. A single object is moved.
    """
    if len(scene.things) == 1:
        return rearranged(scene, rng)
    name = rng.choice(_COMBINED)
    drawn = rng.sample([getattr(thing, name) for thing in scene.things], len(scene.things))
    things = tuple(replace(thing, **{name: value}) for thing, value in zip(scene.things, drawn, strict=True))
    return Scene(scene.background, things)
