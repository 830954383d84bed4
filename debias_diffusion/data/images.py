"""Where images come from: a folder, and nowhere else."""

import hashlib
import os
from pathlib import Path
from typing import Protocol

from PIL import Image

from ..errors import UserError


class ImageSource(Protocol):
    """Opens the images of a data set by the names that its records give them.

    Attributes:
        root: where the images lie, for messages.
    """

    root: Path

    def open(self, image: str) -> Image.Image:
        """The decoded RGB image. Raises OSError, ValueError or PIL's own errors when it cannot be had."""

    def is_there(self, image: str) -> bool:
        """Whether the image could be opened, as far as that can be told without reading it."""

    def stamp(self, image: str) -> bytes:
        """16 bytes that change when the image's file could have changed.

        Raises:
            OSError, ValueError: there is no such image.
        """


_MOST_LOPSIDED = 200  # times longer than wide, or the reverse


def decoded(image: Image.Image) -> Image.Image:
    """The RGB image of an opened file.

    Raises:
        ValueError: resizing its shorter side to what a model reads would make the other enormous.
        OSError and PIL's own errors: it cannot be decoded.
    """
    if min(image.size) * _MOST_LOPSIDED < max(image.size):
        raise ValueError(f"{image.width} x {image.height} pixels are no picture")
    return image.convert("RGB")


def digest_of(*parts: str | int) -> bytes:
    """16 bytes that stand for these parts."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"), digest_size=16).digest()


class ImageFolder:
    """Opens the images of a data set by their paths relative to one root.

    Args:
        root: folder that holds all images.

    Raises:
        UserError: `root` is not a folder.
    """

    def __init__(self, root: str | os.PathLike):
        self.root = Path(root).resolve()
        if not self.root.is_dir():
            raise UserError(
                f"Image folder {os.fspath(root)!r} is not there. Give the folder that the data file's image paths "
                "start from."
            )

    def path(self, relative: str) -> Path:
        """Where an image lies. Raises ValueError when the path would leave the root (symbolic links resolved)."""
        path = (self.root / relative).resolve()
        if not path.is_relative_to(self.root):
            raise ValueError(
                f"{relative!r} leaves the image folder, links followed. Copy the file into it, or give a folder that "
                "holds both."
            )
        return path

    def open(self, image: str) -> Image.Image:
        """The decoded RGB image. Raises OSError, ValueError or PIL's own errors when it cannot be had."""
        with Image.open(self.path(image)) as file:
            return decoded(file)

    def is_there(self, image: str) -> bool:
        """Whether there is such a file inside the root."""
        try:
            return self.path(image).is_file()
        except (OSError, ValueError):
            return False

    def stamp(self, image: str) -> bytes:
        """16 bytes of the path, the file's size and its time of change. Raises OSError or ValueError without a file."""
        stat = self.path(image).stat()
        return digest_of(image, stat.st_size, stat.st_mtime_ns)
