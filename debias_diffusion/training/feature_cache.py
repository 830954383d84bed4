"""On-disk cache of image features: computed once, used in every epoch, and by every run on the same images.

A folder for each frozen model and data holds numbered files, each with the features of `ITEM` images. Its name is the
digest of both, where an image counts by its stamp (path, size and times of change): other images have another folder.
"""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from ..clip.backbone import Backbone
from ..data.bad_records import BadRecord, read_or_bad
from ..data.images import ImageSource
from ..data.records import Record
from ..data.retrieval import encode_images
from ..devices import autocast
from ..errors import UserError
from ..files import atomic_file, bytes_digest, json_digest

ITEM = 512  # images of a file
_STAMP = np.dtype("S16")
_open = lru_cache(maxsize=128)(safe_open)  # as many files at once


@dataclass(frozen=True)
class FrozenEncoder:
    """A model that is not trained and makes a row of numbers of each image, such as an image tower.

    Attributes:
        read_pixels: an opened image to the tensor that `encode` takes a batch of.
        encode: [batch, ...] pixels on the accelerator's device to [batch, dim].
        key: everything but the image itself that the features depend on, as JSON values.
    """

    accelerator: Accelerator
    read_pixels: Callable[[Image.Image], torch.Tensor]
    encode: Callable[[torch.Tensor], torch.Tensor]
    key: dict


def frozen_tower(backbone: Backbone, accelerator: Accelerator, precision: str) -> FrozenEncoder:
    """An image tower that is not trained: on the accelerator's device, in `eval()` mode."""

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        with autocast(precision, accelerator.device):
            return backbone.encode_image(pixels)

    key = {"image tower": backbone.image_digest(), "precision": precision}
    return FrozenEncoder(accelerator, backbone.read_pixels, encode, key)


class CachedImages:
    """An image source whose images are their features, [dim].

    Args:
        images: of which these are the features.
        stamps: of all records, in order; empty where an image cannot be had.
        files: each of `ITEM` records: "good", those with a readable image, by their place, and the "features" of these.
    """

    def __init__(self, images: ImageSource, stamps: np.ndarray, files: Sequence[Path]):
        self.images, self.root, self._files = images, images.root, [str(file) for file in files]
        self.rows = np.full(len(stamps), -1)  # of each record in its file; -1 where there is none
        for number, file in enumerate(files):
            good = _good(file)
            self.rows[number * ITEM + good] = np.arange(len(good))
        self._order = np.argsort(stamps, kind="stable")
        self._stamps = stamps[self._order]

    def open(self, image: str) -> torch.Tensor:
        """Raises OSError, or the source's error, if the image is missing, changed or unreadable."""
        stamp = np.array(self.images.stamp(image), _STAMP)
        at = np.searchsorted(self._stamps, stamp)
        number = self._order[at] if at < len(self._stamps) and self._stamps[at] == stamp else None
        if number is None or self.rows[number] < 0:
            self.images.open(image)  # raises for a missing or unreadable image
            raise OSError("has changed, or could not be read, when its features were computed")
        return _open(self._files[number // ITEM], "pt").get_slice("features")[int(self.rows[number])]


def _good(file: Path) -> np.ndarray | None:
    """The "good" of a file; None if that is missing or damaged."""
    with suppress(OSError, SafetensorError):
        return safe_open(file, "numpy").get_tensor("good")


def cached_images(
    encoder: FrozenEncoder,
    records: Sequence[Record],
    images: ImageSource,
    folder: str | os.PathLike,
    batch: int = 64,
    readers: int = 1,
) -> tuple[CachedImages, list[BadRecord]]:
    """Computes the features of all images that the cache in `folder` lacks, shared among the processes.

    A run that is killed resumes with the first file that is not there. A damaged one is computed again.

    Args:
        readers: threads that read images in each process.

    Returns:
        The features as an image source, and the records with unreadable images.

    Raises:
        UserError: a feature is not finite.
    """
    accelerator = encoder.accelerator
    found = (read_or_bad(record, images.stamp) for record in tqdm(records, "stamps", disable=len(records) < 10_000))
    stamps = np.array([b"" if isinstance(stamp, BadRecord) else stamp for stamp in found], _STAMP)
    folder = Path(folder, json_digest(encoder.key | {"images": bytes_digest([stamps.tobytes()])})[:32])
    files = [folder / f"{number:06}.safetensors" for number in range(math.ceil(len(records) / ITEM))]
    missing = [number for number, file in enumerate(files) if _good(file) is None]
    accelerator.wait_for_everyone()  # before any of them is written
    mine = missing[accelerator.process_index :: accelerator.num_processes]
    settings = {"progress": False, "read": encoder.read_pixels, "encode": encoder.encode}
    bar = {"unit": " images", "unit_scale": ITEM, "disable": not accelerator.is_main_process}
    for number in tqdm(mine, "image features", **bar):
        part = records[number * ITEM : (number + 1) * ITEM]
        features, good, _ = encode_images(None, part, images, batch, accelerator.device, readers=readers, **settings)
        if not features.isfinite().all():
            raise UserError("The features of an image are not finite. Choose another --precision.")
        with atomic_file(files[number]) as temporary:
            save_file({"good": torch.tensor(good, dtype=torch.long), "features": features}, temporary)
    accelerator.wait_for_everyone()
    _open.cache_clear()  # or files that were replaced would still be read
    cached = CachedImages(images, stamps, files)
    return cached, [read_or_bad(records[index], cached.open) for index in np.flatnonzero(cached.rows < 0).tolist()]
