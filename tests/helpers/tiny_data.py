"""A few coloured squares with captions, in ShareGPT4V's layout: enough for runs of a few steps."""

import io
import json
import random
import tarfile
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from PIL import Image

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "white": (240, 240, 240)}


def caption(index: int) -> str:
    rng = random.Random(index)
    left, right = rng.choices(list(COLOURS), k=2)
    sentences = [f"The left side is {left}.", f"The right side is {right}.", f"It is number {index}.", "It is flat."]
    rng.shuffle(sentences)
    return " ".join(["This image shows two colours.", *sentences])


def entry(image: object, caption: object) -> dict:
    """An entry of ShareGPT4V's layout."""
    return {"image": image, "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": caption}]}


def tar(path: Path, members: Iterable[tuple[str, bytes] | tarfile.TarInfo]) -> Path:
    """A tar of (name, content), or of members without content."""
    with tarfile.open(path, "w") as file:
        for member in members:
            content = None
            if not isinstance(member, tarfile.TarInfo):
                content, member = io.BytesIO(member[1]), tarfile.TarInfo(member[0])
                member.size = len(content.getbuffer())
            file.addfile(member, content)
    return path


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
        entries.append({"id": str(index)} | entry(f"{index}.png", (captions or {}).get(index, caption(index))))
    (folder / "data.json").write_text(json.dumps(entries))
    return str(folder / "data.json"), str(images)
