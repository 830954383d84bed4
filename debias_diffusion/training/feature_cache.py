"""On-disk cache of image features: computed once, used in every epoch and by every run that can share them.

The cache is a shared job whose items are of up to `ITEM` images. An image's features are found by its stamp (path, size
and times of change); where only that is new, as after a copy, by a digest of its pixels.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from ..data.bad_records import BadRecord, read_or_bad
from ..data.images import ImageSource
from ..data.records import Record
from ..data.workers import load_batches
from ..devices import autocast
from ..errors import UserError
from ..files import bytes_digest
from ..jobs import Job
from ..models.backbone import Backbone

ITEM = 512  # images of an item, at most
STAMP = 16  # bytes that identify one version of an image file, or its pixels
_OPENED = 128  # items kept open at once


class FeatureCache:
    """Image features by the stamp of their image, and by a digest of its pixels.

    An item, of safetensors, has stamps and digests [n, 16] and features [n, dim]; or stamps and digests alone, of
    images whose features were there.

    Args:
        job: the shared job of the caches of all keys.
        key: everything the features depend on besides the image, as `FrozenEncoder.key`.
    """

    def __init__(self, job: Job, key: dict):
        self.job, self.prefix = job, f"{job.key('features', key)}/"

    def read(self, names: Sequence[str]) -> None:
        """Reads which images the items of these names are of."""
        stamps, digests, with_features = [], [], []
        self._files: list[str] = []  # with features
        for name in names:
            with safe_open(file := str(self.job.folder / name), "numpy") as item:
                stamps.append(_as_keys(item.get_tensor("stamps")))
                digests.append(_as_keys(item.get_tensor("digests")))
                if "features" in item.keys():  # noqa: SIM118 (no mapping)
                    self._files.append(file)
                    with_features.append(digests[-1])
        self._ends = np.cumsum([len(part) for part in with_features])
        self._digests, self._stamps = _Index(with_features), _Index(stamps)
        # By the place of a stamp; the last is that of a stamp without a place, -1.
        self._rows = np.append(self._digests.find(np.concatenate([_NONE, *digests])), -1)

    def __len__(self) -> int:
        return len(self._digests.known)

    def find(self, stamps: Sequence[bytes]) -> np.ndarray:
        """The row of each stamp's features, -1 where there are none."""
        return self._rows[self._stamps.find(np.array(stamps, dtype=_NONE.dtype))]

    def has(self, digest: bytes) -> bool:
        """Whether there are features of an image with these pixels."""
        return bool(self._digests.find(np.array([digest], dtype=_NONE.dtype))[0] >= 0)

    def __getitem__(self, row: int) -> torch.Tensor:
        """[dim]."""
        part = int(np.searchsorted(self._ends, row, side="right"))
        start = self._ends[part - 1] if part else 0
        return _opened(self._files[part]).get_slice("features")[int(row - start)]

    def add(self, rows: Sequence[tuple[bytes, bytes]], features: Sequence[torch.Tensor]) -> None:
        """Writes an item: (stamp, digest) of each image, and its features [dim], or none where there are some."""
        tensors = {
            name: torch.frombuffer(bytearray(b"".join(column)), dtype=torch.uint8).view(-1, STAMP)
            for name, column in zip(("stamps", "digests"), zip(*rows, strict=True), strict=True)
        }
        tensors |= {"features": torch.stack(tuple(features)).float()} if features else {}
        name = f"{self.prefix}{'new' if features else 'known'}-{bytes_digest(chain(*rows))[:32]}.safetensors"
        with self.job.write(name) as temporary:
            save_file(tensors, temporary)


_NONE = np.empty(0, dtype=f"S{STAMP}")


def _as_keys(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).reshape(-1).view(_NONE.dtype)


class _Index:
    """Places of stamps or digests, sorted for binary search."""

    def __init__(self, parts: Sequence[np.ndarray]):
        known = np.concatenate([_NONE, *parts])
        self._order = np.argsort(known, kind="stable")
        self.known = known[self._order]

    def find(self, wanted: np.ndarray) -> np.ndarray:
        """The place of each, -1 where there is none."""
        if not len(self.known):
            return np.full(len(wanted), -1)
        at = np.searchsorted(self.known, wanted).clip(max=len(self.known) - 1)
        return np.where(self.known[at] == wanted, self._order[at], -1)


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
        return self.backbone.image_fingerprint() | {"precision": self.precision}

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


class _Missing(Dataset):
    """(stamp, digest, pixels) of each image without features, or its BadRecord; no pixels where a digest has some."""

    def __init__(self, records: Sequence[Record], indices: Sequence[int], images: ImageSource, cache, read_pixels):
        self.records, self.indices, self.images = records, indices, images
        self.cache, self.read_pixels = cache, read_pixels

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> tuple[bytes, bytes, torch.Tensor | None] | BadRecord:
        return read_or_bad(self.records[self.indices[position]], self._read)

    def _read(self, name: str) -> tuple[bytes, bytes, torch.Tensor | None]:
        # The stamp first: if the image is replaced before its pixels are read, the new stamp must not find them.
        stamp, image = self.images.stamp(name), self.images.open(name)
        digest = hashlib.blake2b(b"%d %d " % image.size + image.tobytes(), digest_size=STAMP).digest()
        return stamp, digest, None if self.cache.has(digest) else self.read_pixels(image)


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
        cache.read(_undamaged(cache, accelerator))
        missing = _without_features(records, images, cache)[accelerator.process_index :: accelerator.num_processes]
        dataset = _Missing(records, missing, images, cache, encoder.read_pixels)
        loader = DataLoader(dataset, batch_size=batch, num_workers=workers, collate_fn=list)
        bad = _fill(encoder, loader, cache, stop)
        accelerator.wait_for_everyone()
        cache.read(job.names(cache.prefix))
    return CachedImages(images, cache), gather_object(bad)


def _undamaged(cache: FeatureCache, accelerator: Accelerator) -> list[str]:
    """Names of the items, on every process the same; each checks a part of them, and damaged ones are removed."""
    (names,) = broadcast_object_list([cache.job.names(cache.prefix)])
    for name in names[accelerator.process_index :: accelerator.num_processes]:
        if cache.job.path(name, damaged="absent") is None:
            cache.job.remove(name)
    # What is left is listed when all have finished, and before any may add to it.
    accelerator.wait_for_everyone()
    left = set(cache.job.names(cache.prefix))
    accelerator.wait_for_everyone()
    return [name for name in names if name in left]


def _without_features(records: Sequence[Record], images: ImageSource, cache: FeatureCache) -> list[int]:
    stamps = []
    for record in tqdm(records, desc="looking for image features", unit=" images", disable=len(records) < 10_000):
        stamp = read_or_bad(record, images.stamp)
        stamps.append(bytes(STAMP) if isinstance(stamp, BadRecord) else stamp)
    return np.flatnonzero(cache.find(stamps) < 0).tolist()


@torch.inference_mode()
def _fill(encoder: FrozenEncoder, loader: DataLoader, cache: FeatureCache, stop: Callable[[], bool]) -> list[BadRecord]:
    bad, new, features, known = [], [], [], []  # (stamp, digest) of images; `known` are those whose features are there

    def write(least: int) -> None:
        for rows, of_rows in ((new, features), (known, [])):
            if len(rows) >= least:
                cache.add(rows, of_rows)
                rows.clear(), of_rows.clear()

    total = len(loader.dataset)
    bar = tqdm(total=total, desc="image features", unit=" images", disable=not encoder.accelerator.is_main_process)
    with bar, load_batches(loader) as batches:
        for rows in batches:
            bad += [row for row in rows if isinstance(row, BadRecord)]
            good = [row for row in rows if not isinstance(row, BadRecord)]
            known += [(stamp, digest) for stamp, digest, pixels in good if pixels is None]
            read = [row for row in good if row[2] is not None]
            if read:
                new += [(stamp, digest) for stamp, digest, _ in read]
                features += encoder.encode(torch.stack([pixels for *_, pixels in read])).cpu()
            write(least=ITEM)
            bar.update(len(rows))
            if stop():
                break
    write(least=1)
    return bad
