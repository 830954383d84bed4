"""Examples of the toy world's story: each prompt with its images, place by place what is right, wrong or extra."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from PIL import Image

from debias_diffusion.data.toy_scenes import scene_and_caption
from debias_diffusion.toyworld.checker import Comparison, compare_reading, read_image
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import ARRANGEMENTS, PLACES, Scene, Thing

from .images.networks import load_image
from .report import image_url

EXAMPLES = 8  # the first of each family of scenes, not the best ones
_WIDTH = 240  # pixels that smaller images are enlarged to, smoothly and the same in every browser
RIGHT, WRONG, EXTRA = "right", "wrong", "extra"


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
    asked, prompt = scene_and_caption(split, index)
    images = {name: load_image(file) for name, file in files.items()}
    readings = {name: read_image(image) for name, image in images.items()}
    seen = {name: compare_reading(reading, asked) for name, reading in readings.items()}
    size = next(iter(images.values())).width
    reference = "Reference image: " + "; ".join(thing.description for thing in asked.things)
    return {
        "sentences": [sentence.text for sentence in prompt.sentences],
        "reference": _image(render(asked, size), "Reference image", reference),
        "generated": [
            _image(image, name, f"{name}: {_in_words(seen[name])}")
            | {
                "score": _score(seen[name]),
                "marks": [
                    # in the grid of three by three, from 0
                    {"verdict": verdict, "column": PLACES[place][0], "row": PLACES[place][1]}
                    for place, verdict in _verdicts(seen[name]).items()
                ],
            }
            for name, image in images.items()
        ],
        "rows": _rows(asked, prompt.first_mentions(), [(seen[name], readings[name].objects) for name in images]),
    }


def _score(seen: Comparison) -> str:
    """ "3 of 5 right, 2 that nobody asked for" """
    right = f"{sum(seen.correct.values())} of {len(seen.correct)} right"
    return f"{right}, {len(seen.invented)} that nobody asked for" if seen.invented else f"{right}, no extras"


def _verdicts(seen: Comparison) -> dict[str, str]:
    """{place: RIGHT, WRONG or EXTRA}, for each place that the scene or the image fills."""
    verdicts = {place: RIGHT if right else WRONG for place, right in seen.correct.items()}
    return verdicts | dict.fromkeys(seen.invented, EXTRA)


def _in_words(seen: Comparison) -> str:
    """The score and the marks, for those who do not see the image."""
    titles = {RIGHT: "Right", WRONG: "Wrong or missing", EXTRA: "Nobody asked for"}
    places: dict[str, list[str]] = {verdict: [] for verdict in titles}
    for place, verdict in _verdicts(seen).items():
        places[verdict].append(place)
    parts = [f"{titles[verdict]}: {', '.join(named)}" for verdict, named in places.items() if named]
    return ". ".join([_score(seen), *parts])


def _rows(
    asked: Scene, mentions: Mapping[str, int], images: Sequence[tuple[Comparison, Mapping[str, Thing | str | None]]]
) -> list[dict]:
    """What the prompt asks for in each place, and what each image shows there ("cells"); then the background.

    Places that the scene and all images leave empty are left out.
    """
    rows = [
        {
            "text": thing.description,
            "sentence": mentions[thing.place] + 1,
            "cells": [_cell(seen.correct[thing.place], objects[thing.place], thing) for seen, objects in images],
        }
        for thing in asked.things
    ]
    for place in PLACES:
        if any(place in seen.invented for seen, _ in images):
            cells = [_empty_cell(objects[place]) for _, objects in images]
            rows.append({"text": f"nothing, {place}", "sentence": None, "cells": cells})
    backgrounds = [_verdict(RIGHT, "right") if seen.background else _verdict(WRONG, "another") for seen, _ in images]
    return [*rows, {"text": f"{asked.background} background", "sentence": None, "cells": backgrounds}]


def _verdict(verdict: str, text: str) -> dict[str, str]:
    return {"verdict": verdict, "text": text}


def _empty_cell(there: Thing | str | None) -> dict[str, str]:
    return _verdict(EXTRA, _name(there)) if there else _verdict(RIGHT, "empty")


def _cell(right: bool, there: Thing | str | None, thing: Thing) -> dict[str, str]:
    if right:
        return _verdict(RIGHT, "right" if there == thing else f"right, but {there.size}")
    return _verdict(WRONG, _name(there) if there else "missing")


def _name(there: Thing | str) -> str:
    return f"{there.colour} {there.kind}" if isinstance(there, Thing) else "something unclear"


def _image(image: Image.Image, name: str, alt: str) -> dict:
    image = image.convert("RGB")
    if image.width < _WIDTH:
        image = image.resize((_WIDTH, _WIDTH * image.height // image.width), Image.Resampling.BICUBIC)
    source = image_url(image, optimize=True)
    return {"name": name, "alt": alt, "source": source, "width": image.width, "height": image.height}
