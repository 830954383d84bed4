"""On-disk cache of image features: computed once, used in every epoch and by every run that can share them.

The cache is a shared job whose items are of up to `ITEM` images. An image's features are found by its stamp (path, size
and times of change); where only that is new, as after a copy, by a digest of its pixels.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm import tqdm

from ..data.bad_records import BadRecord, read_or_bad
from ..data.images import ImageSource, pixels_digest
from ..data.records import Record
from ..data.workers import load_batches
from ..devices import autocast
from ..errors import UserError
from ..files import bytes_digest
from ..jobs import Job
from ..models.backbone import Backbone

ITEM = 512  # images of an item, about
_KEY = np.dtype("S16")  # a stamp or a digest
_OPENED = 128  # items kept open at once


class FeatureCache:
    """Image features by the stamp of their image, and by a digest of its pixels.

    An item, of safetensors, has stamps and digests [n, 16] and features [n, dim].

    Args:
        job: the shared job of the caches of all keys.
        key: everything the features depend on besides the image, as `FrozenEncoder.key`.
    """

    def __init__(self, job: Job, key: dict):
        self.job, self.prefix = job, f"{job.key('features', key)}/"

    def read(self, names: Sequence[str]) -> None:
        """Reads which images the items of these names are of."""
        self._files = [str(self.job.folder / name) for name in names]
        rows = {name: [np.empty(0, _KEY)] for name in ("stamps", "digests")}
        for file in self._files:
            with safe_open(file, "numpy") as item:
                for name, parts in rows.items():
                    parts.append(item.get_tensor(name).reshape(-1).view(_KEY))
        self._ends = np.cumsum([len(part) for part in rows["stamps"][1:]])
        self._stamps, self._digests = (_Index(np.concatenate(parts)) for parts in rows.values())

    def find(self, stamps: Sequence[bytes]) -> np.ndarray:
        """The row of each stamp's features, -1 where there are none."""
        return self._stamps.find(stamps)

    def find_pixels(self, digest: bytes) -> int:
        """The row of the features of an image with these pixels, -1 where there is none."""
        return int(self._digests.find([digest])[0])

    def __getitem__(self, row: int) -> torch.Tensor:
        """[dim]."""
        part = int(np.searchsorted(self._ends, row, side="right"))
        start = self._ends[part - 1] if part else 0
        return _opened(self._files[part]).get_slice("features")[int(row - start)]

    def add(self, rows: Sequence[tuple[bytes, bytes, torch.Tensor]]) -> None:
        """Writes an item: stamp, digest and features [dim] of each image."""
        stamps, digests, features = zip(*rows, strict=True)
        keys = {name: b"".join(column) for name, column in (("stamps", stamps), ("digests", digests))}
        name = f"{self.prefix}{bytes_digest(keys.values())[:32]}.safetensors"
        tensors = {
            name: torch.frombuffer(bytearray(part), dtype=torch.uint8).view(-1, 16) for name, part in keys.items()
        }
        with self.job.write(name) as temporary:
            save_file(tensors | {"features": torch.stack(features).float()}, temporary)


class _Index:
    """Rows of stamps or digests, sorted for binary search."""

    def __init__(self, keys: np.ndarray):
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def find(self, keys: Sequence[bytes]) -> np.ndarray:
        """The row of each, -1 where there is none."""
        if not len(self._keys):
            return np.full(len(keys), -1)
        keys = np.array(keys, _KEY)
        at = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        return np.where(self._keys[at] == keys, self._order[at], -1)


@lru_cache(maxsize=_OPENED)
def _opened(file: str) -> safe_open:
    return safe_open(file, "pt")


class CachedImages:
    """An image source whose images are their features, [embed_dim], from a cache.

    An image that has changed since its features were computed has another stamp, and so none.
    """

    def __init__(self, images: ImageSource, cache: FeatureCache):
        self.images, self.cache, self.root = images, cache, images.root

    def open(self, image: str) -> torch.Tensor:
        """Raises OSError, or the source's error, if the image is missing, changed or unreadable."""
        row = int(self.cache.find([self.images.stamp(image)])[0])
        if row < 0:
            self.images.open(image)  # raises for a missing or unreadable image
            raise OSError("has changed since its features were computed")
        return self.cache[row]


class FrozenEncoder(ABC):
    """A model that is not trained and makes a row of numbers of each image, such as an image tower.

    Attributes:
        accelerator: on whose device it is.
        key: everything but the image itself that the features depend on, as JSON values.
    """

    accelerator: Accelerator
    key: dict

    @abstractmethod
    def read_pixels(self, image: Image.Image) -> torch.Tensor:
        """An opened image as the tensor that `encode` takes a batch of."""

    @abstractmethod
    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[batch, ...] pixels, on any device, to [batch, dim]. Raises UserError for features that are not finite."""


@dataclass(frozen=True)
class FrozenTower(FrozenEncoder):
    """An image tower that is not trained: on the accelerator's device, in `eval()` mode."""

    backbone: Backbone
    accelerator: Accelerator
    precision: str

    @property
    def key(self) -> dict:
        return {"image tower": self.backbone.image_digest(), "precision": self.precision}

    def read_pixels(self, image: Image.Image) -> torch.Tensor:
        return self.backbone.read_pixels(image)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        with autocast(self.precision, self.accelerator.device):
            features = self.backbone.encode_image(pixels.to(self.accelerator.device))
        return check_features(features, "image tower", self.precision)


def check_features(features: torch.Tensor, model: str, precision: str) -> torch.Tensor:
    """The features. Raises UserError unless all are finite."""
    if not features.isfinite().all():
        raise UserError(f"The {model}'s features are not finite in {precision}. Choose another --precision.")
    return features


class _Images(Dataset):
    """(stamp, digest, pixels, None) of each image, (stamp, digest, None, features) if its pixels have some, or its
    BadRecord."""

    def __init__(self, records: Sequence[Record], images: ImageSource, cache: FeatureCache, read_pixels: Callable):
        self.records, self.images, self.cache, self.read_pixels = records, images, cache, read_pixels

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple | BadRecord:
        return read_or_bad(self.records[index], self._read)

    def _read(self, name: str) -> tuple[bytes, bytes, torch.Tensor | None, torch.Tensor | None]:
        # The stamp first: if the image is replaced before its pixels are read, the new stamp must not find them.
        stamp, image = self.images.stamp(name), self.images.open(name)
        digest = pixels_digest(image)
        row = self.cache.find_pixels(digest)
        return (stamp, digest, self.read_pixels(image), None) if row < 0 else (stamp, digest, None, self.cache[row])


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
    with Job.open(folder, "cache", shared=True) as job:
        cache = FeatureCache(job, encoder.key)
        names = _undamaged(cache) if accelerator.is_main_process else []
        cache.read(*broadcast_object_list([names]))
        stamps = []
        for record in tqdm(records, desc="looking for image features", unit=" images", disable=len(records) < 10_000):
            stamp = read_or_bad(record, images.stamp)
            stamps.append(b"" if isinstance(stamp, BadRecord) else stamp)
        missing = np.flatnonzero(cache.find(stamps) < 0)[accelerator.process_index :: accelerator.num_processes]
        dataset = Subset(_Images(records, images, cache, encoder.read_pixels), missing.tolist())
        loader = DataLoader(dataset, batch_size=batch, num_workers=workers, collate_fn=list)
        bad = _fill(encoder, loader, cache, stop)
        accelerator.wait_for_everyone()
        cache.read(job.names(cache.prefix))
    return CachedImages(images, cache), gather_object(bad)


def _undamaged(cache: FeatureCache) -> list[str]:
    """Names of the items. Damaged ones are removed."""
    names = cache.job.names(cache.prefix)
    damaged = [name for name in names if cache.job.path(name, damaged="absent") is None]
    for name in damaged:
        cache.job.remove(name)
    return [name for name in names if name not in damaged]


@torch.inference_mode()
def _fill(encoder: FrozenEncoder, loader: DataLoader, cache: FeatureCache, stop: Callable[[], bool]) -> list[BadRecord]:
    bad, rows = [], []
    bar = tqdm(
        total=len(loader.dataset),
        desc="image features",
        unit=" images",
        disable=not encoder.accelerator.is_main_process,
    )
    with bar, load_batches(loader) as batches:
        for batch in batches:
            bad += [image for image in batch if isinstance(image, BadRecord)]
            good = [image for image in batch if not isinstance(image, BadRecord)]
            unknown = [pixels for _, _, pixels, _ in good if pixels is not None]
            encoded = iter(encoder.encode(torch.stack(unknown)).cpu() if unknown else ())
            rows += [(*keys, next(encoded) if known is None else known) for *keys, _, known in good]
            bar.update(len(batch))
            if len(rows) >= ITEM:
                cache.add(rows)
                rows = []
            if stop():
                break
    if rows:
        cache.add(rows)
    return bad
