"""The scenes that base models are trained on, and short captions of scenes."""

import random
from dataclasses import replace

from debias_diffusion.toyworld.grammar import Caption, Describe, compose, describe, describe_background
from debias_diffusion.toyworld.scenes import ARRANGEMENTS, OBJECTS, Scene, arrangement, generator, rearranged

_COMBINED = ("kind", "colour", "size")
_WITH_BACKGROUND = 1 / 3  # of the short captions


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


def short_caption(scene: Scene, rng: random.Random, describe: Describe = describe) -> Caption:
    """A caption as CLIP models are pretrained on: the summary, one or two objects, and now and then the background."""
    described = rng.sample(scene.things, min(rng.randint(1, 2), len(scene.things)))
    blocks, later = describe(scene, described, rng)
    if rng.random() < _WITH_BACKGROUND:
        blocks.append([describe_background(scene, rng)])
    return compose(scene, blocks, later, rng)
