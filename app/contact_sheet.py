"""Contact sheets: many images on few pages, each with the beginning of its prompt."""

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from diffusers.utils import make_image_grid
from PIL import Image, ImageDraw, ImageFont, ImageOps
from tqdm import tqdm

from debias_diffusion.data.bad_records import printable
from debias_diffusion.data.images import open_image
from debias_diffusion.pipelines.rendering.png import write_png

PER_PAGE = 48
CELL = 240  # pixels of an image's longer side
_COLUMNS = 8
_GAP, _FONT_SIZE = 12, 13
_CHARACTERS, _LINES = 34, 3  # in a line, and lines of a prompt
_TEXT = (1 + _LINES) * 16  # pixels of the lines
_NAME = "contact-sheet"


def write_contact_sheets(folder: Path, images: Sequence[tuple[Path, str, str]]) -> list[Path]:
    """Writes `contact-sheet.png`, and `contact-sheet-2.png` and so on for more than 48 images.

    Removes further pages of an earlier call. Returns the pages. The images are (file, title, text of which the
    beginning is shown below the title), in order.
    """
    import matplotlib  # takes a second

    # DejaVu, which comes with matplotlib, has more scripts than Pillow's own font; what it lacks becomes a box.
    font = ImageFont.truetype(os.path.join(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), _FONT_SIZE)
    starts = range(0, len(images), PER_PAGE)
    pages = [folder / f"{_NAME}{f'-{page}' if page > 1 else ''}.png" for page in range(1, len(starts) + 1)]
    bar = tqdm(zip(pages, starts, strict=True), "contact sheets", len(pages), unit="page", disable=len(pages) < 2)
    for path, start in bar:
        cells = [_cell(*image, font) for image in images[start : start + PER_PAGE]]
        columns = min(_COLUMNS, len(cells))
        cells += [Image.new("RGB", cells[0].size, "whitesmoke")] * (-len(cells) % columns)
        write_png(make_image_grid(cells, len(cells) // columns, columns), path, {})
    for old in set(folder.glob(f"{_NAME}-*.png")) - set(pages):
        old.unlink()
    return pages


def _cell(path: Path, title: str, text: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    """An image in a square, and below it its title and the first lines of its text."""
    image = open_image(path)
    # tiny images are shown with their pixels
    method = Image.Resampling.NEAREST if max(image.size) < CELL else Image.Resampling.BICUBIC
    image = ImageOps.contain(image, (CELL, CELL), method)
    cell = Image.new("RGB", (CELL + _GAP, CELL + _GAP + _TEXT), "whitesmoke")
    cell.paste(image, ((cell.width - image.width) // 2, _GAP // 2 + CELL - image.height))
    lines = textwrap.wrap(printable(text), _CHARACTERS, max_lines=_LINES, placeholder="…")
    draw, corner = ImageDraw.Draw(cell), (_GAP // 2, CELL + _GAP // 2)
    draw.multiline_text(corner, title, fill="gray", font=font)
    draw.multiline_text(corner, "\n" + "\n".join(lines), fill="black", font=font, spacing=2)
    return cell
