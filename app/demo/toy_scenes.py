"""Scenes of the toy world whose captions are prompts, and what generated images show of them."""

from dataclasses import dataclass

from PIL import Image

from debias_diffusion.errors import UserError
from debias_diffusion.toyworld.checker import UNCLEAR, compare_reading, read_image
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import Scene, scene

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


@dataclass(frozen=True)
class ObjectMark:
    """An object of a scene, compared with an image.

    Attributes:
        name: description of the object.
        correct: whether its kind and colour stand in its place.
        wrong_size: "small" or "large", as in the image, if `correct` but of another size than the object; else None.
    """

    name: str
    correct: bool
    wrong_size: str | None = None


@dataclass(frozen=True)
class Marks:
    """What an image shows of a scene, and beside it.

    Attributes:
        objects: of each object of the scene, in the order of `ToyScene.objects`.
        invented: descriptions of what stands in places that the scene leaves empty.
        missing_background: the scene's background if the image has another one, else None.
    """

    objects: tuple[ObjectMark, ...]
    invented: tuple[str, ...] = ()
    missing_background: str | None = None


def random_scene(seed: int) -> ToyScene:
    """Scene number `seed`, from 0, of a split that no model was trained on; the same on every machine."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError(f"The number of a scene must be a whole number from 0, got {str(seed)[:80]}.")
    drawn_scene, text = scene(_SPLIT, seed), caption(_SPLIT, seed)
    first_mention = text.first_mentions()
    objects = [(thing.description, first_mention[thing.place] + 1) for thing in drawn_scene.things]
    return ToyScene(text.text, render(drawn_scene), objects, drawn_scene)


def mark(toy_scene: ToyScene, picture: Image.Image) -> Marks:
    """What an image of any size shows of a scene, as the checker reads it."""
    reading = read_image(picture)
    comparison, seen = compare_reading(reading, toy_scene.scene), reading.objects
    objects = []
    for thing in toy_scene.scene.things:
        correct = comparison.correct[thing.place]
        wrong_size = seen[thing.place].size if correct and not comparison.sizes[thing.place] else None
        objects.append(ObjectMark(thing.description, correct, wrong_size))
    invented = [
        seen[place].description if seen[place] != UNCLEAR else f"something unclear, {place}"
        for place in comparison.invented
    ]
    return Marks(tuple(objects), tuple(invented), None if comparison.background else toy_scene.scene.background)
