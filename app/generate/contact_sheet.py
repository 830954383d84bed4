"""Contact sheets: many images on few pages, each with the beginning of its prompt."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from debias_diffusion.data.bad_records import printable
from debias_diffusion.errors import UserError, reason
from debias_diffusion.png import UNREADABLE

from .png_settings import write_png

PER_PAGE = 48
CELL = 240  # pixels of an image's longer side
_GAP = 12
_FONT_SIZE = 13
_LINES = 3  # of a prompt
_NAME = "contact-sheet"


def write_contact_sheets(folder: Path, images: Sequence[tuple[Path, str, str]]) -> list[Path]:
    """Writes `contact-sheet.png`, and `contact-sheet-2.png` and so on for more than 48 images.

    Removes further pages of an earlier call. Returns the pages.

    Args:
        images: (file, title, text of which the beginning is shown below the title), in order.

    Raises:
        UserError: an image cannot be read.
    """
    starts = range(0, len(images), PER_PAGE)
    pages = [folder / f"{_NAME}{f'-{page}' if page > 1 else ''}.png" for page in range(1, len(starts) + 1)]
    bar = tqdm(zip(pages, starts, strict=True), "contact sheets", len(pages), unit="page", disable=len(pages) < 2)
    for path, start in bar:
        write_png(_page(images[start : start + PER_PAGE]), path, {})
    for old in set(folder.glob(f"{_NAME}-*.png")) - set(pages):
        if not old.is_dir():
            old.unlink()
    return pages


def _page(images: Sequence[tuple[Path, str, str]]) -> Image.Image:
    import matplotlib  # takes a second

    # DejaVu, which comes with matplotlib, has more scripts than Pillow's own font; what it lacks becomes a box.
    font = ImageFont.truetype(os.path.join(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), _FONT_SIZE)
    line_height = math.ceil(1.3 * _FONT_SIZE)
    thumbnails = [_thumbnail(path) for path, _, _ in images]
    width = max(CELL // 2, *(image.width for image in thumbnails)) + _GAP
    image_height = max(image.height for image in thumbnails)
    height = image_height + (1 + _LINES) * line_height + 2 * _GAP
    columns = math.ceil(math.sqrt(len(images) * height / width))
    page = Image.new("RGB", (columns * width + _GAP, math.ceil(len(images) / columns) * height + _GAP), "whitesmoke")
    draw = ImageDraw.Draw(page)
    for place, (image, (_, title, text)) in enumerate(zip(thumbnails, images, strict=True)):
        left, top = _GAP + place % columns * width, _GAP + place // columns * height
        page.paste(image, (left, top + image_height - image.height))
        below = top + image_height + _GAP // 2
        for line, (words, colour) in enumerate(
            [(title, "gray"), *((words, "black") for words in _wrap(text, font, width - _GAP))]
        ):
            draw.text((left, below + line * line_height), words, fill=colour, font=font)
    return page


def _thumbnail(path: Path) -> Image.Image:
    try:
        with Image.open(path, formats=("PNG",)) as image:
            image = image.convert("RGB")
    except UNREADABLE as error:
        raise UserError(
            f"The image {str(path)!r} cannot be read ({reason(error)}). Remove it, and run the same command again."
        ) from error
    longest = max(image.size)
    if longest < CELL:  # tiny images are shown with their pixels
        return image.resize(
            (image.width * (CELL // longest), image.height * (CELL // longest)), Image.Resampling.NEAREST
        )
    image.thumbnail((CELL, CELL))
    return image


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """The beginning of a text in at most `_LINES` lines of so many pixels, with an ellipsis where it is cut."""
    text = " ".join(printable(" ".join(text.split())).split())
    lines = []
    while text and len(lines) < _LINES:
        end = _fitting(text, font, width)
        if end < len(text):
            end = text.rfind(" ", 0, end + 1) if " " in text[: end + 1] else end
        lines.append(text[:end])
        text = text[end:].lstrip()
    if text:
        last = lines[-1]
        lines[-1] = last[: _fitting(last, font, width - font.getlength("…"))].rstrip() + "…"
    return lines


def _fitting(text: str, font: ImageFont.FreeTypeFont, width: float) -> int:
    """How many characters of a text fit, at least one."""
    end = 1
    while end < len(text) and font.getlength(text[: end + 1]) <= width:
        end += 1
    return end
