"""Scenes and their long captions on disk, in ShareGPT4V's layout: what the real `train` command reads."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from ..files import write_json
from .grammar import Caption, caption
from .render import render
from .scenes import scene

DATA, IMAGES = "data.json", "images"


def write_pairs(
    folder: str | os.PathLike,
    held_out: int,
    trained_on: int,
    split: str = "train",
    captions: Sequence[Callable[[str, int], Caption]] = (caption,),
) -> tuple[Path, Path]:
    """Writes images and captions; the first `held_out` pairs are of the validation split, the rest of `split`.

    Scenes take turns with `captions`, which give that of a scene by its split and number. The data file is written
    last: if it exists, all files do, and nothing is written. Returns (data file, image folder).
    """
    folder = Path(folder)
    data, images = folder / DATA, folder / IMAGES
    if data.exists():
        return data, images
    keys = [("validation", index) for index in range(held_out)] + [(split, index) for index in range(trained_on)]
    images.mkdir(parents=True, exist_ok=True)
    entries = []
    for source, index in tqdm(keys, desc="rendering scenes"):
        name = f"{source}-{index:06}.png"
        render(scene(source, index)).save(images / name)
        conversations = [{"from": "human", "value": "<image>\nDescribe this image in detail."}]
        conversations.append({"from": "gpt", "value": captions[index % len(captions)](source, index).text})
        entries.append({"id": f"{source}-{index:06}", "image": name, "conversations": conversations})
    write_json(data, entries)
    return data, images
