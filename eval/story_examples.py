"""Examples of the toy world's story: each prompt with its images, place by place what is right, wrong or extra."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from PIL import Image

from debias_diffusion.data.toy_scenes import toy_scene
from debias_diffusion.toyworld.checker import Verdict, describe, judge, read_image
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import ARRANGEMENTS, PLACES, Scene

from .images.networks import load_image
from .report import image_url

EXAMPLES = 8  # the first of each family of scenes, not the best ones
_WIDTH = 240  # pixels that smaller images are enlarged to, smoothly and the same in every browser


def examples(split: str, count: int, folders: Mapping[str, Path]) -> list[dict]:
    """The first prompt of each family of scenes, with its reference image and the generated ones.

    Args:
        split: of the toy world's scenes, such as "test" or "referring-test".
        count: how many of them have images.
        folders: of images, by the encoder's name.

    Returns:
        for the template, at most `EXAMPLES`; none if images are missing.
    """
    shown = range(0, count, ARRANGEMENTS)[:EXAMPLES]
    if not all((folder / f"{index:06}.png").is_file() for folder, index in product(folders.values(), shown)):
        return []
    return [
        _example(split, index, {name: folder / f"{index:06}.png" for name, folder in folders.items()})
        for index in shown
    ]


def _example(split: str, index: int, files: Mapping[str, Path]) -> dict:
    asked, prompt = toy_scene(f"{split}/{index:06}")
    images = {name: load_image(file) for name, file in files.items()}
    seen = {name: judge(read_image(image), asked) for name, image in images.items()}
    words = {name: describe(verdicts, asked) for name, verdicts in seen.items()}
    size = next(iter(images.values())).width
    reference = "Reference image: " + "; ".join(thing.description for thing in asked.things)
    return {
        "sentences": [sentence.text for sentence in prompt.sentences],
        "reference": _image(render(asked, size), "Reference image", reference),
        "generated": [
            _image(image, name, f"{name}: {words[name]}")
            | {
                "score": words[name].partition(".")[0],
                "marks": [
                    # in the grid of three by three, from 0
                    {"verdict": seen[name][place].verdict, "column": column, "row": row}
                    for place, (column, row) in PLACES.items()
                    if seen[name][place].text != "empty"
                ],
            }
            for name, image in images.items()
        ],
        "rows": _rows(asked, prompt.first_mentions(), list(seen.values())),
    }


def _rows(asked: Scene, mentions: Mapping[str, int], images: Sequence[Mapping[str, Verdict]]) -> list[dict]:
    """What the prompt asks for in each place, and what each image shows there ("cells"); then the background.

    Places that the scene and all images leave empty are left out.
    """
    things = {thing.place: thing.description for thing in asked.things}
    texts = {place: things.get(place, f"nothing, {place}") for place in images[0]}
    texts["background"] = f"{asked.background} background"
    return [
        {
            "text": text,
            "sentence": mentions[place] + 1 if place in things else None,
            "cells": [image[place] for image in images],
        }
        for place, text in texts.items()
        if any(image[place].text != "empty" for image in images)
    ]


def _image(image: Image.Image, name: str, alt: str) -> dict:
    image = image.convert("RGB")
    if image.width < _WIDTH:
        image = image.resize((_WIDTH, _WIDTH * image.height // image.width), Image.Resampling.BICUBIC)
    source = image_url(image, optimize=True)
    return {"name": name, "alt": alt, "source": source, "width": image.width, "height": image.height}
