"""Scenes of the toy world as image-caption pairs, without a file: each is rendered when it is opened."""

import os
import re
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from ..errors import UserError, near_matches
from ..limits import SHAREGPT4V_HELD_OUT
from ..registry import MOVED, Registry
from ..toyworld.grammar import Caption, caption, short_prompt
from ..toyworld.render import render
from ..toyworld.scenes import ARRANGEMENTS, SPLITS, Scene, scene
from .captions import Captions
from .images import digest_of
from .records import PackedRecords, Record

PREFIX, _TRAINED_ON = "toy/", "train"
_SPLIT = re.compile(rf"((?:[a-z]+-)*?)((?:{'|'.join(SPLITS)})(?:-[\w-]+)?)")
_IMAGE = re.compile(rf"{_SPLIT.pattern}/(\d+)", re.ASCII)


class SceneKind(NamedTuple):
    """A kind of scenes.

    Attributes:
        draw: scene number `index` of a split, and its caption: (split, index) -> (scene, caption).
        in_families: whether the scenes are those of `toyworld.scenes.scene`, of which four hold the same objects.
    """

    draw: Callable[[str, int], tuple[Scene, Caption]]
    in_families: bool


# By what stands before the name of a split.
KINDS = Registry(
    "kind of toy scene",
    {
        "": SceneKind(lambda split, index: (scene(split, index), caption(split, index)), in_families=True),
        "short-": SceneKind(short_prompt, in_families=False),
        "long-": SceneKind(partial(short_prompt, told="long"), in_families=False),
    },
)


class ToyScenes:
    """Renders scenes by the names that `read_toy_scenes` gives its records, such as "test/000012".

    Args:
        name: of the scenes, such as "toy/test".
    """

    def __init__(self, name: str | os.PathLike):
        self.root = Path(name)  # for messages: there is no such folder

    def open(self, image: str) -> Image.Image:
        """The RGB image of 48 x 48 pixels. Raises ValueError for a name that is no scene."""
        return render(toy_scene(image)[0])

    @staticmethod
    @lru_cache(2 * SHAREGPT4V_HELD_OUT)
    def stamp(image: str) -> bytes:
        """16 bytes of the name and the pixels. Raises ValueError for a name that is no scene."""
        return digest_of(image, render(toy_scene(image)[0]).tobytes().hex())


def read_toy_scenes(name: str | os.PathLike) -> tuple[Captions, ToyScenes]:
    """The first 1,000 scenes of a split with their long captions, as `toyworld.pairs.write_pairs` writes them.

    Args:
        name: `toy/test`, `toy/validation`, `toy/development`, or with a suffix, such as `toy/test-2`, which are other
            scenes; `toy/train-2` and the like, but not `toy/train` itself. `toy/short-test` and the like: scenes of one
            to three objects with captions of at most 77 tokens. `toy/long-test` and the like: the same scenes with long
            captions. `KINDS` may have further ones.

    Raises:
        UserError: there are no such scenes, or the toy models have learned from them.
    """
    name = os.fspath(name)
    split = name.removeprefix(PREFIX)
    parts = _SPLIT.fullmatch(split)
    if not parts or parts[1] not in {*KINDS, *MOVED} or parts[2] == _TRAINED_ON:
        variants = [f"{PREFIX}{kind}{known}" for kind in KINDS for known in reversed(SPLITS) if known != _TRAINED_ON]
        raise UserError(
            f"There is no file or folder {name!r}, and no scenes of that name but those that the models of the package "
            f"have learned from.{near_matches(name, variants, most=1)} The toy world's scenes are "
            f"{', '.join(variants)}; and others by a suffix, such as toy/test-2 or, to train a model, toy/train-2."
        )
    KINDS.find(parts[1])
    names = [f"{split}/{index:06}" for index in range(SHAREGPT4V_HELD_OUT)]
    records = PackedRecords.pack(Record(image, image, toy_scene(image)[1].text) for image in names)
    return Captions(records, []), ToyScenes(name)


# One command may read a split several times: captions and stamps are kept, which take most of that time.
@lru_cache(2 * SHAREGPT4V_HELD_OUT)
def toy_scene(image: str) -> tuple[Scene, Caption]:
    """The scene of an image, such as "short-test-2/000012", and its caption. Raises ValueError for no scene."""
    place = _IMAGE.fullmatch(image)
    if place is None or place[1] not in KINDS:
        raise ValueError(f"{image!r} is no scene of the toy world")
    return KINDS[place[1]].draw(place[2], int(place[3]))


def family(image: str) -> str:
    """The first toy scene with the same objects as this one, which is resampled with it; else the image's own name."""
    place = _IMAGE.fullmatch(image)
    if place is None or place[1] not in KINDS or not KINDS[place[1]].in_families:
        return image
    return f"{image.partition('/')[0]}/{int(place[3]) // ARRANGEMENTS * ARRANGEMENTS:06}"
