"""Scenes of the toy world whose captions are prompts, and a check of their objects in generated images."""

from dataclasses import dataclass

from PIL import Image

from debias_diffusion.errors import UserError
from debias_diffusion.toyworld.checker import objects_correct
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import Scene, Thing, scene

_SPLIT = "test-demo"  # no model was trained on it


@dataclass(frozen=True)
class ToyScene:
    """A scene with its caption and its reference image.

    Attributes:
        caption: the prompt, 9 to 14 sentences.
        original: the reference image, 48 x 48 pixels.
        objects: description of each object, and the number of the sentence that first mentions it, from 1.
        scene: the scene itself.
    """

    caption: str
    original: Image.Image
    objects: list[tuple[str, int]]
    scene: Scene


def random_scene(seed: int) -> ToyScene:
    """Scene number `seed`, from 0, of a split that no model was trained on; the same on every machine."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError(f"The number of a scene must be a whole number from 0, got {str(seed)[:80]}.")
    drawn_scene, text = scene(_SPLIT, seed), caption(_SPLIT, seed)
    first_mention = text.first_mentions()
    objects = [(_name(thing), first_mention[thing.place] + 1) for thing in drawn_scene.things]
    return ToyScene(text.text, render(drawn_scene), objects, drawn_scene)


def mark(toy_scene: ToyScene, picture: Image.Image) -> list[tuple[str, bool]]:
    """For each object, in the order of `objects`, whether a picture shows its kind and colour at its place."""
    correct = objects_correct(picture, toy_scene.scene)
    return [(_name(thing), correct[thing.place]) for thing in toy_scene.scene.things]


def _name(thing: Thing) -> str:
    return f"{thing.size} {thing.colour} {thing.kind}, {thing.place}"
