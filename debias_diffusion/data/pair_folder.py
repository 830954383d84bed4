"""A folder of image and caption files, `photo.jpg` beside `photo.txt`, as image-text trainers keep them."""

import os
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from ..errors import UserError
from ..files import open_regular
from .captions import Captions, folded, is_text, sort_out, utf8
from .images import ImageFolder
from .records import PackedRecords, Record

IMAGES = ("jpg", "jpeg", "png", "webp")
_ALONE = (*IMAGES, "gif", "bmp", "tif", "tiff", "avif", "jp2", "ppm")  # endings of images without captions
CAPTION = "txt"
_LARGEST = 1 << 20  # bytes of a caption file, as in shards
_NAMED = 5  # files without a partner that an error names

Pair = tuple[list[str], list[str]]  # the images and the captions of one name


def read_pair_folder(root: str | os.PathLike) -> tuple[Captions, ImageFolder]:
    """The pairs of a folder and its subfolders: an image (jpg, jpeg, png, webp) and a txt of the same name.

    Sorted by name, as text. Endings may be in upper case. Other files, hidden files and folders, and links to folders
    are skipped. A pair whose caption is empty or unreadable is a bad record.

    Raises:
        UserError: a file has no partner or several, by its name; or there is no pair, or no usable one.
    """
    images = ImageFolder(root)
    pairs = _pairs(images.root)
    _require_both(os.fspath(root), pairs)
    _require_partners(os.fspath(root), pairs)
    names = [(image, caption) for _, ((image,), (caption,)) in sorted(pairs.items())]
    bar = tqdm(names, desc="reading captions", unit=" captions", disable=len(names) < 10_000)
    captions = sort_out(((_shown(pair[0]), pair) for pair in bar), lambda pair: _read(images, *pair), PackedRecords)
    if not captions.records:
        raise UserError(
            f"The folder {os.fspath(root)!r} has {len(names)} pairs and none is usable. The first fault: "
            f"{captions.bad[0]}."
        )
    return captions, images


def list_images(root: str | os.PathLike) -> tuple[list[str], ImageFolder]:
    """The images of a folder and its subfolders by their names, without captions; sorted, as text.

    Hidden files and folders, files whose names are not UTF-8 and links to folders are skipped.

    Raises:
        UserError: there are none.
    """
    images = ImageFolder(root)
    names = sorted(name for name in _files(images.root) if name.rpartition(".")[2].lower() in _ALONE and is_text(name))
    if not names:
        raise UserError(
            f"The folder {os.fspath(root)!r} holds no images: no file, in subfolders either, ends in "
            f".{', .'.join(_ALONE)}. Give a folder that does."
        )
    return names, images


def _pairs(root: Path) -> dict[str, Pair]:
    """{name without ending: (images, captions)}, relative to the root"""
    pairs: dict[str, Pair] = {}
    for name in _files(root):
        stem, _, ending = name.rpartition(".")
        if stem and ending.lower() in (*IMAGES, CAPTION):
            pairs.setdefault(stem, ([], []))[ending.lower() == CAPTION].append(name)
    return pairs


def _files(root: Path) -> Iterator[str]:
    """All files that are not hidden, as posix paths relative to the root."""
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            if not name.startswith(".") and os.path.isfile(path):
                yield path.relative_to(root).as_posix()


def _refuse(error: OSError):
    raise UserError(f"The folder {error.filename!r} cannot be read ({error.strerror}). Make it readable, or move it.")


def _require_both(root: str, pairs: dict[str, Pair]) -> None:
    """Raises UserError, which lists the layouts there are, for a folder without any image or without any caption."""
    counts = [sum(len(pair[kind]) for pair in pairs.values()) for kind in (0, 1)]
    if not all(counts):
        example = next((f", such as {name!r}" for pair in pairs.values() for name in (*pair[0], *pair[1])), "")
        raise UserError(
            f"The folder {root!r} holds no image-caption pairs: {counts[0]} images and {counts[1]} captions "
            f"(.{CAPTION}){example}, and no *.tar. Give a folder of image and caption files (photo.jpg and photo.txt); "
            "a folder of WebDataset shards (*.tar, not compressed); or a JSON or JSONL file, with its image folder "
            "as images."
        )


def _require_partners(root: str, pairs: dict[str, Pair]) -> None:
    """Raises UserError, which names the files, unless every image has one caption and every caption one image."""
    faults = [fault for _, pair in sorted(pairs.items()) if (fault := _fault(*pair))]
    if faults:
        more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise UserError(
            f"In the folder {root!r} {len(faults)} of {len(pairs)} pairs are not one image and one caption: "
            f"{'; '.join(faults[:_NAMED])}{more}. Add what is missing, or move the files away."
        )


def _fault(images: list[str], captions: list[str]) -> str | None:
    if not captions:
        return f"{images[0]!r} has no caption (.{CAPTION})"
    if not images:
        return f"{captions[0]!r} has no image (.{', .'.join(IMAGES)})"
    several = images if len(images) > 1 else captions
    return f"{' and '.join(map(repr, sorted(several)))} have the same name" if len(several) > 1 else None


def _read(folder: ImageFolder, image: str, caption: str) -> Record:
    """One pair. Raises ValueError("kind: detail")."""
    if not is_text(image):
        raise ValueError(f"bad file name: {_shown(image)} is not UTF-8")
    try:
        with open_regular(folder.path(caption)) as file:
            content = file.read(_LARGEST + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"unreadable caption file: {caption}: {getattr(error, 'strerror', error)}") from None
    if len(content) > _LARGEST:
        raise ValueError(f"absurdly large caption: {caption} has more than {_LARGEST} bytes")
    return Record(image, image, folded(utf8(content, caption), f"image {image}"))


def _shown(name: str) -> str:
    """A file name as printable UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
