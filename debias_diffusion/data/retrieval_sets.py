"""Retrieval benchmarks: images, captions, and which belong together."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UserError, near_matches
from ..files import bytes_digest
from .bad_records import BadRecord
from .captions import fold, is_text
from .images import ImageFolder, ImageSource, is_there
from .retrieval_layouts import BENCHMARKS, Entry


@dataclass(frozen=True)
class RetrievalSet:
    """Images, captions, and which captions belong to which image.

    Attributes:
        images: what `source` opens, [N].
        captions: white space folded, [M].
        image_of: the position in `images` of each caption's image, [M]; every image has a caption.
        source: opens the images.
        bad: what was left out.
    """

    images: list[str]
    captions: list[str]
    image_of: list[int]
    source: ImageSource
    bad: list[BadRecord]

    def select(self, positions: Sequence[int]) -> "RetrievalSet":
        """The images at these positions, in ascending order, with all their captions."""
        new = {position: row for row, position in enumerate(positions)}
        kept = [caption for caption, image in enumerate(self.image_of) if image in new]
        return replace(
            self,
            images=[self.images[position] for position in positions],
            captions=[self.captions[caption] for caption in kept],
            image_of=[new[self.image_of[caption]] for caption in kept],
        )

    def digest(self) -> str:
        """sha256, in hexadecimal, of the captions and of the images' names."""
        parts = (self.images, self.captions, self.image_of)
        return bytes_digest(json.dumps(part).encode() + b"\n" for part in parts)


def read_retrieval_set(name: str, root: str | os.PathLike) -> RetrievalSet:
    """A benchmark of `BENCHMARKS` from the folder that `find_root` finds, in the order of its files.

    Entries with the same image file become one image with several captions. An entry that cannot be decoded, and an
    empty caption of an image that has others, are bad records. Images are not opened.

    Raises:
        UserError: there is no such benchmark, the folder has another layout, a file is damaged as a whole, or an
            entry is without its image or without a caption, by the file's name.
    """
    root = find_root(name, root)
    benchmark, source, label = BENCHMARKS[name], ImageFolder(root), f"{name} in {str(root)!r}"
    # Of several folders the names of images begin with their folder.
    if len(benchmark.images) == 1 and (root / benchmark.images[0]).is_dir():
        source = ImageFolder(root / benchmark.images[0])
    bad: list[BadRecord] = []
    by_image: dict[str, list[Entry]] = {}
    for entry in benchmark.read(root, bad):
        if not is_text(entry.image):
            raise UserError(f"{entry.where} of {label} names no image, found {entry.image!r}. Download it again.")
        by_image.setdefault(entry.image, []).append(entry)
    if not by_image:
        first = f" The first fault: {bad[0]}." if bad else ""
        raise UserError(f"{label} has no entry that can be read.{first} Download it again.")
    missing = [image for image in by_image if not is_there(source, image)]
    if missing:
        raise UserError(
            f"{len(missing)} of the {len(by_image)} images of {label} are not in {str(source.root)!r}. The first is "
            f"{missing[0]!r}, of {by_image[missing[0]][0].where}. A benchmark is evaluated whole: unpack all of it."
        )
    captions, image_of = [], []
    for position, (image, entries) in enumerate(by_image.items()):
        where, given = entries[0].where, [caption for entry in entries for caption in entry.captions]
        texts = [fold(caption) for caption in given if is_text(caption) and caption.strip()]
        if not texts:
            raise UserError(f"{where} of {label} has no caption for the image {image!r}. Download it again.")
        bad += [BadRecord(where, "empty caption", f"image {image}")] * (len(given) - len(texts))
        captions += texts
        image_of += [position] * len(texts)
    return RetrievalSet(list(by_image), captions, image_of, source, bad)


def find_root(name: str, root: str | os.PathLike) -> Path:
    """The folder of a benchmark below a folder of several.

    It is named after the benchmark (`coco-five`) or the data set that it is a part of (`coco`); or `root` itself holds
    the benchmark.

    Raises:
        UserError: there is no such benchmark, or none of these folders has its files.
    """
    if name not in BENCHMARKS:
        raise UserError(
            f"There is no retrieval benchmark {name!r}.{near_matches(name, BENCHMARKS)} "
            f"Choose one of: {', '.join(BENCHMARKS)}."
        )
    benchmark, parts = BENCHMARKS[name], name.removeprefix("long-").split("-")
    folders = dict.fromkeys([name, *("-".join(parts[:count]) for count in range(len(parts), 0, -1)), "."])
    places = [Path(root) / folder for folder in folders]
    for place in places:
        if all((place / part).exists() for part in benchmark.needs):
            return place
    raise UserError(
        f"{name} is in none of {', '.join(map(repr, map(str, places)))}. A folder of it must hold "
        f"{', '.join(benchmark.needs)}; they come from {benchmark.page}."
    )
