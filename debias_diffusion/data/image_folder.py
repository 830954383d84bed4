"""Folders of image and caption files, `photo.jpg` beside `photo.txt`, as image-text trainers keep them."""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from ..errors import UserError
from ..files import open_regular, visible_files
from .bad_records import BadRecord, left_out
from .captions import LARGEST_FILE, Captions, check_caption, fold, is_text, usable_captions, utf8
from .images import ImageFolder
from .json_files import read_data_file
from .records import PackedRecords, Record

IMAGES = ("jpg", "jpeg", "png", "webp")
_ALONE = (*IMAGES, "gif", "bmp", "tif", "tiff", "avif", "jp2", "ppm")  # endings of images without captions
CAPTION = "txt"
_CAPTIONS = (CAPTION, "caption")
METADATA = "metadata.jsonl"  # of the hub's image folders
SAME_NAME = "same name"  # kind of a bad record


def read_pair_folder(root: str | os.PathLike) -> tuple[Captions, ImageFolder]:
    """The pairs of a folder and its subfolders: an image (jpg, jpeg, png, webp) and a txt or caption of the same name.

    Sorted by name, as text. Endings may be in upper case. Other files, hidden files and folders, and links to folders
    are skipped. A file without a partner or with several, and a pair whose caption is empty or unreadable, are bad
    records. A folder with a metadata.jsonl, as the hub has them, holds the pairs that this file names.

    Raises:
        UserError: there is no usable pair.
    """
    images, bad = ImageFolder(root), []
    if (images.root / METADATA).is_file():
        return read_data_file(images.root / METADATA), images
    groups: dict[str, list[str]] = defaultdict(list)  # names of files by their name without ending
    for name in visible_files(images.root):
        stem = name.rpartition(".")[0]
        if stem and ending(name) in (*IMAGES, *_CAPTIONS):
            groups[stem].append(name)
        elif Path(name).name in (METADATA, "metadata.csv", "metadata.parquet"):
            bad.append(BadRecord(_escape(name), "metadata not read", f"only {METADATA} of the folder itself is"))

    def read() -> Iterator[Record]:
        bar = tqdm(sorted(groups.items()), desc="reading captions", unit=" captions", disable=len(groups) < 10_000)
        for _, names in bar:
            pictures = [name for name in names if ending(name) not in _CAPTIONS]
            captions = [name for name in names if ending(name) in _CAPTIONS]
            try:
                yield _read(images.root, pictures, captions)
            except (ValueError, OSError) as error:
                bad.append(left_out(_escape((pictures or captions)[0]), error))

    advice = (
        "Give a folder of image and caption files (photo.jpg and photo.txt); a folder of WebDataset shards (*.tar, not "
        "compressed); or a JSON or JSONL file, with its image folder as images."
    )
    return usable_captions(f"The folder {os.fspath(root)!r}", PackedRecords.pack(read()), bad, advice), images


def list_images(root: str | os.PathLike) -> tuple[list[str], ImageFolder]:
    """The names of the images in a folder and its subfolders, sorted as text, without captions.

    Hidden ones, names that are not UTF-8 and links to folders are skipped. Raises UserError if there are none.
    """
    images = ImageFolder(root)
    names = [name for name in visible_files(images.root) if ending(name) in _ALONE and is_text(name)]
    if not names:
        raise UserError(f"{os.fspath(root)!r} holds no images (.{', .'.join(_ALONE)}). Give a folder that does.")
    return names, images


def ending(name: str) -> str:
    """What a name's last part says that a file is: "jpg" for "a.JPG"."""
    return name.rpartition(".")[2].lower()


def _read(root: Path, images: Sequence[str], captions: Sequence[str]) -> Record:
    """One pair. Raises ValueError("kind: detail") or OSError."""
    if not captions:
        raise ValueError(f"no caption: {_escape(images[0])} has none (.{', .'.join(_CAPTIONS)})")
    if not images:
        raise ValueError(f"no image: {_escape(captions[0])} has none (.{', .'.join(IMAGES)})")
    if len(images) > 1 or len(captions) > 1:
        raise ValueError(f"{SAME_NAME}: {' and '.join(map(_escape, images if len(images) > 1 else captions))}")
    image, caption = images[0], captions[0]
    with open_regular(root / caption) as file:
        content = file.read(LARGEST_FILE + 1)
    if not is_text(image):
        raise ValueError(f"bad file name: {_escape(image)} is not UTF-8")
    return Record(image, image, fold(check_caption(utf8(content, caption), f"image {image}")))


def _escape(name: str) -> str:
    """A file name as printable UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
