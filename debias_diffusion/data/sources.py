"""Opens image-caption pairs of any layout."""

import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from ..errors import UserError
from ..files import bytes_digest, sha256
from .captions import Captions
from .image_folder import read_pair_folder
from .images import ImageFolder, ImageSource
from .json_files import read_data_file
from .records import as_row
from .shards import read_shards
from .toy_scenes import PREFIX, ToyScenes, read_toy_scenes


def open_data(data: str | os.PathLike, images: str | os.PathLike | None = None) -> tuple[Captions, ImageSource]:
    """Image-caption pairs, and what opens their images.

    Args:
        data: a JSON list in ShareGPT4V's layout; a `.jsonl` of one object a line; WebDataset shards, a folder that
            holds `*.tar` or one `.tar`; a folder of image and caption files; or scenes of the toy world, such as
            `toy/test`.
        images: folder that the image paths in a JSON or JSONL file start from. None for all others.

    Raises:
        UserError: `images` is missing or too much, or the data cannot be used.
    """
    read = _reader(data)
    if bool(read) == (images is not None):
        fault = "hold their images" if read else "name their images by paths"
        advice = "Leave images out" if read else "Give the folder that the paths start from"
        raise UserError(f"The data {os.fspath(data)!r} {fault}, but images is {images and str(images)!r}. {advice}.")
    if read:
        return read(data)
    folder = ImageFolder(images)
    return read_data_file(data), folder


def read_captions(data: str | os.PathLike) -> Captions:
    """The captions of `data`, read as by `open_data`, with its errors. The images need not exist."""
    read = _reader(data)
    return read(data)[0] if read else read_data_file(data)


def is_toy_scenes(data: str | os.PathLike) -> bool:
    """Whether `data` is a name of toy scenes, and no file or folder of that name is there."""
    return os.fspath(data).startswith(PREFIX) and not Path(data).exists()


def is_shards(path: Path) -> bool:
    """Whether `path` is a tar, or a folder with tars."""
    return any(path.glob("[!.]*.tar")) if path.is_dir() else path.suffix.lower() == ".tar"


def _reader(data: str | os.PathLike) -> Callable[[str | os.PathLike], tuple[Captions, ImageSource]] | None:
    """What reads data that hold their images; None for a file that names them. Raises UserError if none are there."""
    if is_toy_scenes(data):
        return read_toy_scenes
    if not Path(data).exists():
        raise UserError(
            f"The data {os.fspath(data)!r} are not there. Give a JSON or JSONL file; WebDataset shards, a folder of "
            "*.tar or one tar; a folder of image and caption files; or scenes of the toy world, such as toy/test."
        )
    if is_shards(Path(data)):
        return read_shards
    return read_pair_folder if Path(data).is_dir() else None


def data_digest(data: str | os.PathLike, captions: Captions) -> str:
    """sha256, in hexadecimal, of a data file, or of all records of other data.

    Images count by name only, in shards by position and size too, toy scenes by their pixels.
    """
    read = _reader(data)
    if read is None:
        return sha256(data)
    records = chain(captions.records, captions.bad)
    rows = map(as_row, records)
    scenes = ToyScenes(data) if read is read_toy_scenes else None
    return bytes_digest(chain(rows, (scenes.stamp(record.image) for record in captions.records if scenes)))
