"""Scenes of the toy world whose captions are prompts, and what generated images show of them."""

from dataclasses import dataclass

from PIL import Image

from debias_diffusion.toyworld.checker import UNCLEAR, compare_reading, read_image
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import Scene, scene

MOST_SCENES = 2**31
_SPLIT = "test-demo"  # no model was trained on it


@dataclass(frozen=True)
class ToyScene:
    """A scene with its caption and its reference image.

    Attributes:
        caption: the prompt, 9 to 14 sentences.
        reference: the reference image, 48 x 48 pixels.
        objects: description of each object, and the number of the sentence that first mentions it, from 1.
        scene: the scene itself.
    """

    caption: str
    reference: Image.Image
    objects: list[tuple[str, int]]
    scene: Scene


@dataclass(frozen=True)
class Marks:
    """What an image shows of a scene, and beside it; objects by their descriptions.

    Attributes:
        right: objects whose kind and colour stand in their places; "(is large)" follows where their size
            is wrong.
        missed: the scene's other objects.
        invented: what stands in places that the scene leaves empty.
        background: the scene's background if the image has another one, else None.
    """

    right: tuple[str, ...]
    missed: tuple[str, ...] = ()
    invented: tuple[str, ...] = ()
    background: str | None = None

    def in_words(self) -> str:
        """Such as "3 of 4 objects right. Missed: ..."."""
        words = f"{len(self.right)} of {len(self.right) + len(self.missed)} objects right."
        sized = [name for name in self.right if name.endswith(")")]
        for title, names in (("Missed", self.missed), ("Wrong size", sized), ("Nobody asked for", self.invented)):
            words += f" {title}: {'; '.join(names)}." if names else ""
        return words + (f" Wrong background: {self.background} was asked for." if self.background else "")


def random_scene(number: int) -> ToyScene:
    """A scene, by its number from 0, of a split that no model was trained on; the same on every machine."""
    toy_scene, text = scene(_SPLIT, number), caption(_SPLIT, number)
    first_mention = text.first_mentions()
    objects = [(thing.description, first_mention[thing.place] + 1) for thing in toy_scene.things]
    return ToyScene(text.text, render(toy_scene), objects, toy_scene)


def mark(toy_scene: ToyScene, image: Image.Image) -> Marks:
    """What an image of any size shows of a scene, as the checker reads it."""
    reading = read_image(image)
    comparison, seen = compare_reading(reading, toy_scene.scene), reading.objects
    right, missed = [], []
    for thing in toy_scene.scene.things:
        if not comparison.correct[thing.place]:
            missed.append(thing.description)
        elif comparison.sizes[thing.place]:
            right.append(thing.description)
        else:
            right.append(f"{thing.description} (is {seen[thing.place].size})")
    invented = [
        seen[place].description if seen[place] != UNCLEAR else f"something unclear, {place}"
        for place in comparison.invented
    ]
    background = None if comparison.background else toy_scene.scene.background
    return Marks(tuple(right), tuple(missed), tuple(invented), background)
