"""The one way to open image-caption pairs, whatever they lie in."""

import hashlib
import json
import os
from pathlib import Path

from ..errors import UserError
from ..files import sha256
from .images import ImageFolder, ImageSource
from .shards import read_shards
from .sharegpt4v import Captions, read_jsonl, read_sharegpt4v


def open_data(data: str | os.PathLike, images: str | os.PathLike | None = None) -> tuple[Captions, ImageSource]:
    """Image-caption pairs, and what opens their images.

    Args:
        data: a JSON list in ShareGPT4V's layout; a `.jsonl` of one object a line; or WebDataset shards, a folder that
            holds `*.tar` or one `.tar`.
        images: folder that the image paths in a JSON or JSONL file start from. None for shards, which hold theirs.

    Raises:
        UserError: `images` is missing or too much, or the data cannot be used.
    """
    path = Path(data)
    if is_shards(path):
        if images is not None:
            raise UserError(
                f"The data {os.fspath(data)!r} are shards, which hold their images, but images is "
                f"{os.fspath(images)!r}. Leave images out, or give a JSON or JSONL file as the data."
            )
        return read_shards(path)
    if not path.exists():
        raise UserError(
            f"The data {os.fspath(data)!r} are not there. Give a JSON or JSONL file, or WebDataset shards: a folder of "
            "*.tar, or one tar."
        )
    if images is None:
        raise UserError(
            f"The data file {os.fspath(data)!r} names its images by their paths, but images is not given. Give the "
            "folder that the paths start from. Only shards, a folder of *.tar, need none."
        )
    folder = ImageFolder(images)
    return (read_jsonl if path.suffix.lower() == ".jsonl" else read_sharegpt4v)(path), folder


def is_shards(path: Path) -> bool:
    return path.is_dir() or path.suffix.lower() == ".tar"


def data_digest(data: str | os.PathLike, captions: Captions) -> str:
    """sha256, in hexadecimal, of what `open_data(data)` has read: of a data file; of all records of shards.

    Images count by their names only, those in shards by their places and sizes too.
    """
    path = Path(data)
    if not is_shards(path):
        return sha256(path)
    total = hashlib.sha256()
    for record in (*captions.records, *captions.bad):
        total.update(json.dumps(list(vars(record).values())).encode() + b"\n")
    return total.hexdigest()
