"""On-disk cache of image features: computed once, used in every epoch, and by every run on the same images.

A folder for each frozen model holds numbered files of the features of up to `ITEM` images each. A name ends in the
digest of these images' stamps (path, size and times of change), so that features of changed images are computed anew.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..clip.backbone import Backbone
from ..data.bad_records import BadRecord, read_or_bad
from ..data.images import ImageSource
from ..data.records import Record
from ..data.workers import load_batches
from ..devices import autocast
from ..errors import UserError, explain_failure
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
        files: with "good" [n], which records have a readable image, and the "features" of these, in order.
    """

    def __init__(self, images: ImageSource, stamps: np.ndarray, files: Sequence[Path]):
        self.images, self.root, self._files = images, images.root, [str(file) for file in files]
        with explain_failure(f"The image features in {str(files[0].parent)!r} cannot be used", "Remove the folder."):
            good = [safe_open(file, "numpy").get_tensor("good") for file in self._files]
        self.good, self._ends = np.concatenate(good), np.cumsum([part.sum() for part in good])
        self._rows = np.argsort(stamps[self.good], kind="stable")
        self._stamps = stamps[self.good][self._rows]

    def open(self, image: str) -> torch.Tensor:
        """Raises OSError, or the source's error, if the image is missing, changed or unreadable."""
        stamp = np.array(self.images.stamp(image), _STAMP)
        at = np.searchsorted(self._stamps, stamp)
        if at == len(self._stamps) or self._stamps[at] != stamp:
            self.images.open(image)  # raises for a missing or unreadable image
            raise OSError("has changed, or could not be read, when its features were computed")
        item = int(np.searchsorted(self._ends, row := self._rows[at], side="right"))
        first = self._ends[item - 1] if item else 0
        return _open(self._files[item], "pt").get_slice("features")[int(row - first)]


def cached_images(
    encoder: FrozenEncoder,
    records: Sequence[Record],
    images: ImageSource,
    folder: str | os.PathLike,
    *,
    batch: int = 64,
    workers: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[ImageSource, list[BadRecord]]:
    """Computes the features of all images that the cache in `folder` lacks, shared among the processes.

    A run that is killed, or that `stop` ends after a batch, resumes with the first file that is not there.

    Returns:
        The features as an image source, and the records with unreadable images; `images` and none when stopped.

    Raises:
        UserError: a feature is not finite.
    """
    accelerator, folder = encoder.accelerator, Path(folder, json_digest(encoder.key)[:32])
    found = (read_or_bad(record, images.stamp) for record in tqdm(records, "stamps", disable=len(records) < 10_000))
    stamps = np.array([b"" if isinstance(stamp, BadRecord) else stamp for stamp in found], _STAMP)
    parts = [range(start, min(start + ITEM, len(records))) for start in range(0, len(records), ITEM)]
    names = (f"{part.start:09}-{bytes_digest([stamps[part].tobytes()])[:32]}.safetensors" for part in parts)
    files = {folder / name: part for name, part in zip(names, parts, strict=True)}
    missing = [file for file in files if not file.exists()]
    accelerator.wait_for_everyone()  # before any of them is written
    mine = {file: files[file] for file in missing[accelerator.process_index :: accelerator.num_processes]}
    indices = [index for part in mine.values() for index in part]
    reader = partial(_read_pixels, images, encoder.read_pixels)
    _write(encoder, mine, DataLoader(records, batch, sampler=indices, num_workers=workers, collate_fn=reader), stop)
    accelerator.wait_for_everyone()
    if not all(file.exists() for file in files):
        return images, []
    cached, bad = CachedImages(images, stamps, list(files)), []
    for index in np.flatnonzero(~cached.good).tolist():
        record = records[index]
        image, detail = read_or_bad(record, images.open), f"{record.image}: not read when its features were computed"
        bad.append(image if isinstance(image, BadRecord) else BadRecord(record.image, "unreadable image", detail))
    return cached, bad


def _read_pixels(images: ImageSource, read: Callable, records: Sequence[Record]) -> list[torch.Tensor | BadRecord]:
    return [read_or_bad(record, lambda name: read(images.open(name))) for record in records]


@torch.inference_mode()
def _write(encoder: FrozenEncoder, files: Mapping[Path, range], loader: DataLoader, stop: Callable[[], bool]) -> None:
    """Writes files, each with the features of some of the records that the loader reads in order."""
    accelerator, rows, left = encoder.accelerator, [], list(files)
    bar = {"desc": "image features", "unit": " images", "disable": not accelerator.is_main_process}
    with load_batches(loader) as batches, tqdm(total=sum(map(len, files.values())), **bar) as shown:
        for batch in batches:
            pixels = [pixels for pixels in batch if not isinstance(pixels, BadRecord)]
            encoded = encoder.encode(torch.stack(pixels).to(accelerator.device)).cpu() if pixels else torch.empty(0)
            if not encoded.isfinite().all():
                raise UserError("The features of an image are not finite. Choose another --precision.")
            features = iter(encoded.float())
            rows += [None if isinstance(pixels, BadRecord) else next(features) for pixels in batch]
            while left and len(rows) >= (count := len(files[left[0]])):
                good = torch.tensor([row is not None for row in rows[:count]])
                readable = [row for row in rows[:count] if row is not None]
                with atomic_file(left.pop(0)) as temporary:
                    save_file({"good": good, "features": torch.stack(readable or [torch.empty(0)])}, temporary)
                del rows[:count]
            shown.update(len(batch))
            if stop():
                break
