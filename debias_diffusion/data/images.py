"""Images from a folder, and from nowhere else."""

import os
from pathlib import Path

from PIL import Image

from ..errors import UserError


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
            raise ValueError(f"image path {relative!r} leaves the image folder")
        return path

    def open(self, relative: str) -> Image.Image:
        """The decoded RGB image. Raises OSError, ValueError or PIL's own errors when it cannot be had."""
        with Image.open(self.path(relative)) as image:
            return image.convert("RGB")
