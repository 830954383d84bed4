"""Where images come from, and the one way in which an image of unknown origin is opened."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from PIL import Image, ImageOps

from ..errors import UserError, reason
from ..files import file_stamp, open_regular

# Formats of photographs and pictures that Pillow decodes from the file's own bytes. Of its others EPS starts
# Ghostscript, IPTC opens whatever lies inside (an EPS too), WMF, GRIB, HDF5 and BUFR need handlers from elsewhere, and
# TGA and some more have no signature, so that they take noise for an image.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")

OPENED_AS = "upright"  # what `decode_image` makes of a file: another word makes caches compute anew
_MOST_LOPSIDED = 200  # times longer than wide, or the reverse
_EIGHT_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")  # modes that Pillow converts to RGB


def image_fault(error: Exception) -> tuple[str, str]:
    """Kind and details of whatever an image made a decoder, or the reading of its file, raise."""
    kind = "unreadable image"
    if isinstance(error, FileNotFoundError):
        kind = "missing image"
    elif isinstance(error, Image.DecompressionBombError | MemoryError):
        kind = "absurdly large image"
    # Other libraries' messages say little without the error's name ("index out of range").
    clear = isinstance(error, OSError | ValueError | SyntaxError | Image.DecompressionBombError)
    return kind, reason(error) if clear else f"{type(error).__name__}: {reason(error)}"


def open_image(path: str | os.PathLike) -> Image.Image:
    """The decoded RGB image of a file of unknown origin. Raises whatever `decode_image` and opening it raise."""
    with open_regular(path) as file:
        return decode_image(file)


def decode_image(file: BinaryIO) -> Image.Image:
    """The RGB image in an open file, of several the first, upright as EXIF says it; as stored if EXIF is unreadable.

    Grey of 16 bits keeps its upper 8, as Pillow keeps those of 16-bit colours. Transparency is left out, as
    `Image.convert("RGB")` does: a pixel keeps its colour however transparent it is.

    Raises:
        ValueError: it is of none of `FORMATS`, has pixels that cannot become RGB faithfully (floating point
            numbers, integers of 32 bits, LAB), or is so lopsided that resizing its shorter side to what a model reads
            would make the other enormous.
        Exception: Pillow cannot decode it, for which a damaged file makes it raise almost anything, or it has more
            pixels than Pillow decodes.
    """
    Image.init()  # or formats of plugins that nothing has needed so far would be missing
    try:
        image = Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])
    except Image.UnidentifiedImageError:
        raise ValueError(f"cannot identify it as {', '.join(FORMATS)}") from None
    with image:
        if max(*image.size, 1) > _MOST_LOPSIDED * min(image.size):
            raise ValueError(f"{image.width} x {image.height} pixels are no picture")
        image.load()
        with suppress(Exception):  # what reads EXIF raises almost anything, too
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode in _EIGHT_BIT:
            # Left out in any case, but Pillow would warn of it, and refuse some palettes.
            image.info.pop("transparency", None)
            return image.convert("RGB")
        if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM"):
            upper = (np.asarray(image) >> 8).astype(np.uint8)  # convert would make all above 255 white
            return Image.fromarray(upper).convert("RGB")
        raise ValueError(
            f"its pixels are of mode {image.mode}, which has no certain white. Save it as RGB, or as grey of 8 bits"
        )


class ImageSource(Protocol):
    """Opens the images of a data set by the names that its records give them."""

    root: Path  # where the images lie, for messages

    def open(self, image: str) -> Image.Image:
        """The decoded RGB image. Raises any Exception when it cannot be had."""

    def stamp(self, image: str) -> bytes:
        """16 bytes of root, name, the file's size and times, and `OPENED_AS`. Raises OSError or ValueError."""


def is_there(images: ImageSource, image: str) -> bool:
    """Whether the image could be opened, as far as that can be told without reading it."""
    try:
        return bool(images.stamp(image))
    except (OSError, ValueError):
        return False


def digest_of(*parts: str | int | Path) -> bytes:
    """16 bytes that stand for these parts."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def stamp_of(root: Path, image: str, stamp: tuple[int, int, int]) -> bytes:
    """16 bytes for an image by its name, the `files.file_stamp` of the file that it lies in, and how it is opened."""
    # The root, because two may hold other images of the same names, sizes and times.
    return digest_of(OPENED_AS, root, image, *stamp)


def pixels_digest(image: Image.Image) -> bytes:
    """16 bytes that stand for an image's size and pixels."""
    return hashlib.blake2b(b"%d %d " % image.size + image.tobytes(), digest_size=16).digest()


class ImageFolder:
    """Opens images by their paths, absolute or relative to `root`. Raises UserError if that is no folder."""

    def __init__(self, root: str | os.PathLike):
        self.root = Path(os.path.realpath(root))
        if not os.path.isdir(self.root):
            raise UserError(f"There is no image folder {os.fspath(root)!r}. Give the one that image paths start from.")

    def open(self, image: str) -> Image.Image:
        return open_image(self.root / image)

    def stamp(self, image: str) -> bytes:
        return stamp_of(self.root, image, file_stamp(self.root / image))
