"""Where images come from, and the one way in which an image of unknown origin is opened."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from PIL import Image

from ..errors import UserError, reason
from ..files import open_regular

# Formats of photographs and pictures that Pillow decodes from the file's own bytes. Of its others EPS starts
# Ghostscript, IPTC opens whatever lies inside (an EPS too), WMF, GRIB, HDF5 and BUFR need handlers from elsewhere, and
# TGA and some more have no signature, so that they take noise for an image.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
LARGEST = 1 << 28  # bytes of an image's file

_MOST_LOPSIDED = 200  # times longer than wide, or the reverse
_EIGHT_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")  # modes that Pillow converts to RGB
_PHOTOMETRIC, _BITS = 262, 258  # tags of TIFF


class UnreadableImage(OSError, ValueError):
    """An image that cannot be used.

    Attributes:
        kind: "missing image", "absurdly large image" or "unreadable image".
    """

    def __init__(self, detail: str, kind: str = "unreadable image"):
        super().__init__(detail)
        self.kind = kind


def as_unreadable(error: Exception) -> UnreadableImage:
    """The UnreadableImage for whatever an image made a decoder, or the reading of its file, raise."""
    if isinstance(error, UnreadableImage):
        return error
    kind = "unreadable image"
    if isinstance(error, FileNotFoundError):
        kind = "missing image"
    elif isinstance(error, Image.DecompressionBombError | MemoryError):
        kind = "absurdly large image"
    # Other libraries' messages say little without the error's name ("index out of range").
    clear = isinstance(error, OSError | ValueError | SyntaxError | Image.DecompressionBombError)
    return UnreadableImage(reason(error) if clear else f"{type(error).__name__}: {reason(error)}", kind)


@contextmanager
def image_errors() -> Iterator[None]:
    """Every Exception leaves as UnreadableImage. For code that does nothing but open and decode one image."""
    try:
        yield
    except UnreadableImage:
        raise
    except Exception as error:  # a damaged file makes a decoder raise almost anything
        raise as_unreadable(error) from error


def open_image(path: str | os.PathLike) -> Image.Image:
    """The decoded RGB image of a file of unknown origin (see `decode_image`).

    Nothing but a regular file is read, links followed, and no other program is started.

    Raises:
        UnreadableImage: it cannot be had, for whatever reason. No other Exception is raised.
    """
    with image_errors(), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST:
            raise UnreadableImage(f"its file has {size} bytes, more than {LARGEST}", "absurdly large image")
        return decode_image(file)


def decode_image(file: BinaryIO, formats: Sequence[str] = FORMATS) -> Image.Image:
    """The RGB image in an open file, of several the first.

    Grey of 16 bits keeps its upper 8, as Pillow keeps those of 16-bit colours. Transparency is left out, as
    `Image.convert("RGB")` does: a pixel keeps its colour however transparent it is. EXIF rotation is not applied.

    Args:
        formats: of `FORMATS`.

    Raises:
        UnreadableImage: it cannot be decoded, is of another format, has pixels that cannot become RGB faithfully
            (floating point numbers, integers of 32 bits, LAB), is absurdly large, or is so lopsided that resizing its
            shorter side to what a model reads would make the other enormous. No other Exception is raised.
    """
    with image_errors():
        try:
            image = Image.open(file, formats=_available(tuple(formats)))
        except Image.UnidentifiedImageError:
            raise UnreadableImage(f"cannot identify it as {', '.join(formats)}{_looks_like(file, formats)}") from None
        with image:
            if max(*image.size, 1) > _MOST_LOPSIDED * min(image.size):
                raise UnreadableImage(f"{image.width} x {image.height} pixels are no picture")
            return _rgb(image)


@cache
def _available(formats: tuple[str, ...]) -> tuple[str, ...]:
    Image.init()  # or formats of plugins that nothing has needed so far would be missing
    return tuple(name for name in formats if name in Image.OPEN)


def _looks_like(file: BinaryIO, formats: Sequence[str]) -> str:
    """ "; it looks like EPS, ..." where a format that is not among `formats` has such a signature, else ""."""
    file.seek(0)
    prefix = file.read(16)
    for name, (_, accept) in Image.OPEN.items():
        with suppress(Exception):  # some expect more bytes
            if name not in formats and accept and accept(prefix) is True:
                return f"; it looks like {name}, which is not read here. Save it as one of these"
    return ""


def _rgb(image: Image.Image) -> Image.Image:
    """Raises UnreadableImage for a mode that cannot become RGB faithfully, and what decoding raises."""
    image.load()
    if image.mode in _EIGHT_BIT:
        # Left out in any case, but Pillow would warn of it, and refuse some palettes.
        image.info.pop("transparency", None)
        return image.convert("RGB")
    bits = _grey_bits(image)
    if bits is None:
        raise UnreadableImage(
            f"its pixels are of mode {image.mode}, which has no certain white. Save it as RGB, or as grey of 8 bits"
        )
    upper = (np.asarray(image) >> (bits - 8)).astype(np.uint8)  # convert would make all above 255 white
    return Image.fromarray(upper).convert("RGB")


def _grey_bits(image: Image.Image) -> int | None:
    """How many bits a pixel of unsigned grey has, 0 being black; None for an image of anything else."""
    if image.mode == "I" and image.format in ("PNG", "PPM"):  # PNG with older versions of Pillow
        return 16
    if not image.mode.startswith("I;16"):
        return None
    if image.format != "TIFF":
        return 16
    return image.tag_v2[_BITS][0] if image.tag_v2.get(_PHOTOMETRIC) == 1 else None


class ImageSource(Protocol):
    """Opens the images of a data set by the names that its records give them.

    Attributes:
        root: where the images lie, for messages.
    """

    root: Path

    def open(self, image: str) -> Image.Image:
        """The decoded RGB image. Raises UnreadableImage or any other Exception when it cannot be had."""

    def is_there(self, image: str) -> bool:
        """Whether the image could be opened, as far as that can be told without reading it."""

    def stamp(self, image: str) -> bytes:
        """16 bytes that change when the image's file could have changed.

        Raises:
            OSError, ValueError: there is no such image.
        """


def digest_of(*parts: str | int) -> bytes:
    """16 bytes that stand for these parts."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def path_inside(root: Path, relative: str) -> Path:
    """Where a file of `root`, itself without links, lies. A loop of links is left to whoever opens the path.

    Raises:
        ValueError: the path would leave the root, symbolic links resolved.
    """
    path = Path(os.path.realpath(root / relative))
    if not path.is_relative_to(root):
        raise ValueError(
            f"{relative!r} leaves the image folder, links followed. Copy the file into it, or give a folder that "
            "holds both."
        )
    return path


class ImageFolder:
    """Opens the images of a data set by their paths relative to one root.

    Args:
        root: folder that holds all images.

    Raises:
        UserError: `root` is not a folder.
    """

    def __init__(self, root: str | os.PathLike):
        self.root = Path(os.path.realpath(root))
        if not os.path.isdir(self.root):
            raise UserError(
                f"Image folder {os.fspath(root)!r} is not there. Give the folder that the data file's image paths "
                "start from."
            )

    def path(self, relative: str) -> Path:
        """Where an image lies. Raises ValueError when the path would leave the root (symbolic links resolved)."""
        return path_inside(self.root, relative)

    def open(self, image: str) -> Image.Image:
        """The decoded RGB image. Raises UnreadableImage when it cannot be had."""
        with image_errors():
            return open_image(self.path(image))

    def is_there(self, image: str) -> bool:
        """Whether there is such a file inside the root."""
        try:
            return os.path.isfile(self.path(image))
        except (OSError, ValueError):
            return False

    def stamp(self, image: str) -> bytes:
        """16 bytes of the path, the file's size and its time of change. Raises OSError or ValueError without a file."""
        stat = self.path(image).stat()
        return digest_of(image, stat.st_size, stat.st_mtime_ns)
