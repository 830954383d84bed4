"""PNGs that this package wrote: whether they are whole."""

from pathlib import Path

from PIL import Image

from .errors import reason

# What Pillow raises for a PNG that is damaged, or none.
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


def png_damage(path: Path) -> str | None:
    """What is wrong with a PNG, in words; None for one that is whole: all of its chunks agree with their checksums."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            image.verify()
    except UNREADABLE as error:
        return reason(error)
    return None
