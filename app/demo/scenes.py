"""Scenes of the toy world to draw from their captions, and which of their objects a picture shows."""

from dataclasses import dataclass

from PIL import Image

from debias_diffusion.errors import UserError
from debias_diffusion.toyworld.checker import objects_correct
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import Scene, Thing, scene

_SPLIT = "test-demo"  # none that a model has learned from


@dataclass(frozen=True)
class ToyScene:
    """A scene to draw.

    Attributes:
        caption: the prompt, 9 to 14 sentences.
        original: what it describes, 48 x 48 pixels.
        objects: what stands in it, in words, and the number of the sentence that first tells it, from 1.
        scene: the same for `mark`.
    """

    caption: str
    original: Image.Image
    objects: list[tuple[str, int]]
    scene: Scene


def random_scene(seed: int) -> ToyScene:
    """Scene number `seed`, from 0, of those that no model was trained on; the same on every machine."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError(f"The number of a scene must be a whole number from 0, got {str(seed)[:80]}.")
    its, words = scene(_SPLIT, seed), caption(_SPLIT, seed)
    told = words.first_told()
    objects = [(_name(thing), told[thing.place] + 1) for thing in its.things]
    return ToyScene(words.text, render(its), objects, its)


def mark(its: ToyScene, picture: Image.Image) -> list[tuple[str, bool]]:
    """For each object of the scene, in the order of `objects`, whether a picture shows its kind and colour there."""
    right = objects_correct(picture, its.scene)
    return [(_name(thing), right[thing.place]) for thing in its.scene.things]


def _name(thing: Thing) -> str:
    return f"{thing.size} {thing.colour} {thing.kind}, {thing.place}"
