"""Retrieval benchmarks in their published layouts."""

import json
from pathlib import Path

from PIL import Image

from debias_diffusion.eval.retrieval_sets import read_retrieval_set

COLOURS = ("red", "green", "blue", "white", "grey", "black")


def draw(path: Path, colour: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", (32, 32), COLOURS[colour % len(COLOURS)])
    picture.putpixel((colour % 32, 0), (colour, 0, 0))
    picture.save(path, format="PNG")  # Pillow tells the kind by the bytes, and PNG keeps the pixel


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def lay_out(root: Path, files: dict, expected: dict, images: str) -> dict:
    """Writes files, JSON where they are no text, and images into the folder `images`. Returns `expected`."""
    for path, content in files.items():
        write(root / path, content if isinstance(content, str) else json.dumps(content))
    for number, image in enumerate(expected):
        draw(root / images / image, number)
    return expected


def check_benchmark(name: str, root: Path, expected: dict[str, list[str]]) -> None:
    """Whether a benchmark is read as these captions by image."""
    read = read_retrieval_set(name, root)
    images = [record.image for record in read.records]
    assert read.bad == [] and images == list(expected)
    assert read.captions == [caption for captions in expected.values() for caption in captions]
    assert [images[i] for i in read.image_of] == [image for image, texts in expected.items() for _ in texts]
    assert {read.images.open(image).size for image in images} == {(32, 32)}
    last = read.select([len(images) - 1], {})
    assert (last.records, last.captions) == (read.records[-1:], expected[images[-1]])
    assert last.image_of == [0] * len(last.captions)
    assert read.digest == read_retrieval_set(name, str(root)).digest
