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
        """What an image of any size shows of the scene, such as "3 of 4 objects right. Missed: ..."."""
        reading = read_image(image)
        comparison, seen = compare_reading(reading, self.scene), reading.objects
        right = [thing for thing in self.scene.things if comparison.correct[thing.place]]
        parts = {
            "Missed": [thing.description for thing in self.scene.things if thing not in right],
            "Wrong size": [
                f"{thing.description} (is {seen[thing.place].size})"
                for thing in right
                if not comparison.sizes[thing.place]
            ],
            "Nobody asked for": [
                f"something unclear, {place}" if seen[place] == UNCLEAR else seen[place].description
                for place in comparison.invented
            ],
            "Wrong background": [] if comparison.background else [f"{self.scene.background} was asked for"],
        }
        words = [f"{len(right)} of {len(self.scene.things)} objects right."]
        return " ".join([*words, *(f"{title}: {'; '.join(names)}." for title, names in parts.items() if names)])


def random_scene(number: int) -> ToyScene:
    """A scene, by its number from 0, of a split that no model was trained on; the same on every machine."""
    toy_scene, text = scene(_SPLIT, number), caption(_SPLIT, number)
    first_mention = text.first_mentions()
    objects = [(thing.description, first_mention[thing.place] + 1) for thing in toy_scene.things]
    return ToyScene(toy_scene, text.text, render(toy_scene), objects)
