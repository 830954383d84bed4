"""On-disk cache of image features: computed once, used in every epoch and by every run that can share them.

The cache is a folder of files of about `ITEM` images each. An image's features are found by its stamp (path, size
and times of change); where only that is new, as after a copy, by a digest of its pixels.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Subset
from tqdm import tqdm

from ..clip.backbone import Backbone
from ..data.bad_records import BadRecord, read_or_bad
from ..data.images import ImageSource, pixels_digest
from ..data.records import Record
from ..data.workers import load_batches
from ..devices import autocast
from ..errors import UserError
from ..files import atomic_file, bytes_digest, json_digest, remove_path

ITEM = 512  # images of an item, about
_KEY = np.dtype("S16")  # a stamp or a digest
_AFTER_ALL = b"\xff" * 16  # sorts behind every key, so that a search always ends at one
_open = lru_cache(maxsize=128)(safe_open)  # features of as many items at once


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

    A file of the cache, in safetensors, has keys [n, 2, 16], stamp and digest of each image, and features [n, dim].
    """

    def __init__(self, images: ImageSource, folder: str | os.PathLike, encoder: FrozenEncoder):
        self.images, self.root = images, images.root
        self.folder = Path(folder, f"image-features-{json_digest(encoder.key)[:32]}")

    def remove_unreadable(self) -> None:
        for file in self.folder.glob("*.safetensors"):
            try:
                with safe_open(file, "pt"):
                    pass
            except (OSError, SafetensorError):
                remove_path(file)

    def read(self) -> None:
        """Reads which images the files are of."""
        self._files = sorted(map(str, self.folder.glob("*.safetensors")))
        keys = [safe_open(file, "numpy").get_tensor("keys").reshape(-1).view(_KEY) for file in self._files]
        self._ends = np.cumsum([len(part) // 2 for part in keys])
        keys = np.concatenate([*keys, np.array([_AFTER_ALL], _KEY)])
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def find(self, keys: Sequence[bytes]) -> np.ndarray:
        """The row of the features of each stamp or digest, -1 where there are none."""
        keys = np.array(keys, _KEY)
        at = np.searchsorted(self._keys, keys)
        return np.where(self._keys[at] == keys, self._order[at] // 2, -1)

    def __getitem__(self, row: int) -> torch.Tensor:
        item = int(np.searchsorted(self._ends, row, side="right"))
        first = self._ends[item - 1] if item else 0
        return _open(self._files[item], "pt").get_slice("features")[int(row - first)]

    def open(self, image: str) -> torch.Tensor:
        """Raises OSError, or the source's error, if the image is missing, changed or unreadable."""
        row = self.find([self.images.stamp(image)])[0]
        if row < 0:
            self.images.open(image)  # raises for a missing or unreadable image
            raise OSError("has changed since its features were computed")
        return self[row]

    def read_batch(self, read_pixels: Callable, records: Sequence[Record]) -> list[tuple | BadRecord]:
        """Stamp and digest of each image, and its pixels or, where those of the digest are there, its features."""

        def read(name: str) -> tuple[bytes, bytes, torch.Tensor | None, torch.Tensor | None]:
            # The stamp first: if the image is replaced before its pixels are read, the new stamp must not find them.
            stamp, image = self.images.stamp(name), self.images.open(name)
            digest = pixels_digest(image)
            row = self.find([digest])[0]
            return (stamp, digest, read_pixels(image), None) if row < 0 else (stamp, digest, None, self[row])

        return [read_or_bad(record, read) for record in records]

    @torch.inference_mode()
    def fill(self, encoder: FrozenEncoder, loader: DataLoader, stop: Callable[[], bool]) -> list[BadRecord]:
        """Writes items of the loader's images, until `stop` says so. Returns the images that could not be read."""
        bad, rows, device = [], [], encoder.accelerator.device
        disable = not encoder.accelerator.is_main_process
        bar = tqdm(total=len(loader.dataset), desc="image features", unit=" images", disable=disable)
        with bar, load_batches(loader) as batches:
            for batch in batches:
                bad += [image for image in batch if isinstance(image, BadRecord)]
                good = [image for image in batch if not isinstance(image, BadRecord)]
                unknown = [pixels for _, _, pixels, _ in good if pixels is not None]
                encoded = encoder.encode(torch.stack(unknown).to(device)).cpu() if unknown else torch.empty(0)
                if not encoded.isfinite().all():
                    raise UserError("The features of an image are not finite. Choose another --precision.")
                features = iter(encoded)
                rows += [(*keys, next(features) if known is None else known) for *keys, _, known in good]
                bar.update(len(batch))
                if len(rows) >= ITEM:
                    self._write(rows)
                    rows = []
                if stop():
                    break
        if rows:
            self._write(rows)
        return bad

    def _write(self, rows: Sequence[tuple[bytes, bytes, torch.Tensor]]) -> None:
        keys, features = b"".join(key for row in rows for key in row[:2]), torch.stack([row[2] for row in rows]).float()
        with atomic_file(self.folder / f"{bytes_digest([keys])[:32]}.safetensors") as temporary:
            keys = torch.frombuffer(bytearray(keys), dtype=torch.uint8).view(-1, 2, 16)
            save_file({"keys": keys, "features": features}, temporary)


def cached_images(
    encoder: FrozenEncoder,
    records: Sequence[Record],
    images: ImageSource,
    folder: str | os.PathLike,
    *,
    batch: int = 64,
    workers: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[CachedImages, list[BadRecord]]:
    """Computes the features of all images that the cache in `folder` lacks, shared among the processes.

    A run that is killed, or that `stop` ends after a batch, resumes where it was. Runs may fill a cache at once.

    Returns:
        The features as an image source, and the records with unreadable images.

    Raises:
        UserError: a feature is not finite.
    """
    accelerator = encoder.accelerator
    cache = CachedImages(images, folder, encoder)
    if accelerator.is_main_process:
        cache.remove_unreadable()
    accelerator.wait_for_everyone()
    cache.read()
    stamps = []
    for record in tqdm(records, desc="looking for image features", unit=" images", disable=len(records) < 10_000):
        stamp = read_or_bad(record, images.stamp)
        stamps.append(b"" if isinstance(stamp, BadRecord) else stamp)
    missing = np.flatnonzero(cache.find(stamps) < 0)[accelerator.process_index :: accelerator.num_processes]
    accelerator.wait_for_everyone()
    loader = DataLoader(
        Subset(records, missing.tolist()),
        batch_size=batch,
        num_workers=workers,
        collate_fn=partial(cache.read_batch, encoder.read_pixels),
    )
    bad = cache.fill(encoder, loader, stop)
    accelerator.wait_for_everyone()
    cache.read()
    return cache, gather_object(bad)
