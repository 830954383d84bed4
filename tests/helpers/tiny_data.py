"""A few coloured squares with captions, in ShareGPT4V's layout: enough for runs of a few steps."""

import json
import random
from collections.abc import Container, Mapping
from pathlib import Path

from PIL import Image

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "white": (240, 240, 240)}


def caption(index: int) -> str:
    rng = random.Random(index)
    left, right = rng.choices(list(COLOURS), k=2)
    sentences = [f"The left side is {left}.", f"The right side is {right}.", f"It is number {index}.", "It is flat."]
    rng.shuffle(sentences)
    return " ".join(["This image shows two colours.", *sentences])


def make_tiny_data(
    folder: Path, count: int = 24, broken: Container[int] = (), captions: Mapping[int, str] | None = None
) -> tuple[str, str]:
    """(data file, image folder), the images of the numbers in `broken` unreadable, and other `captions` by number"""
    images = folder / "images"
    images.mkdir(parents=True)
    entries = []
    for index in range(count):
        rng = random.Random(index)
        left, right = rng.choices(list(COLOURS), k=2)
        image = Image.new("RGB", (32, 32), COLOURS[left])
        image.paste(COLOURS[right], (16, 0, 32, 32))
        image.putpixel((0, 0), (index, index, index))
        image.save(images / f"{index}.png")
        if index in broken:
            (images / f"{index}.png").write_text("not an image")
        answer = (captions or {}).get(index, caption(index))
        conversations = [{"from": "human", "value": "Describe."}, {"from": "gpt", "value": answer}]
        entries.append({"id": str(index), "image": f"{index}.png", "conversations": conversations})
    (folder / "data.json").write_text(json.dumps(entries))
    return str(folder / "data.json"), str(images)
