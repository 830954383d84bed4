"""Scenes of the toy world whose captions are prompts, and what generated images show of them."""

from dataclasses import dataclass

from PIL import Image

from debias_diffusion.toyworld.checker import describe, judge, read_image
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import Scene, scene

MOST_SCENES = 2**31
_SPLIT = "test-demo"  # no model was trained on it


@dataclass(frozen=True)
class ToyScene:
    """A scene with its caption and its reference image.

    Attributes:
        scene: the scene itself.
        caption: the prompt, 9 to 14 sentences.
        reference: the reference image, 48 x 48 pixels.
        objects: description of each object, and the number of the sentence that first mentions it, from 1.
    """

    scene: Scene
    caption: str
    reference: Image.Image
    objects: list[tuple[str, int]]

    def marks(self, image: Image.Image) -> str:
        """What an image of any size shows of the scene, such as "3 of 4 objects right. Top: missing."."""
        return describe(judge(read_image(image), self.scene), self.scene)


def random_scene(number: int) -> ToyScene:
    """A scene, by its number from 0, of a split that no model was trained on; the same on every machine."""
    toy_scene, text = scene(_SPLIT, number), caption(_SPLIT, number)
    first_mention = text.first_mentions()
    objects = [(thing.description, first_mention[thing.place] + 1) for thing in toy_scene.things]
    return ToyScene(toy_scene, text.text, render(toy_scene), objects)


def scene_of(number: int | None, prompt: str) -> ToyScene | None:
    """The scene of a number, if the prompt is its caption."""
    if number is None or not 0 <= number < MOST_SCENES:
        return None
    toy_scene = random_scene(number)
    return toy_scene if toy_scene.caption == prompt else None
