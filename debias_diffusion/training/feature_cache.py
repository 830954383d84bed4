"""On-disk cache of image features: computed once, used in every epoch and by every run that can share them."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from ..data import BadRecord, ImageSource, Record
from ..data.bad_records import read_or_bad
from ..data.workers import load_batches
from ..errors import UserError
from ..files import folder_lock, json_digest, write_json
from ..models.backbone import Backbone
from .step import autocast

STAMP = 16  # bytes that identify one version of an image file
_CHECKSUM = 8  # bytes of a checksum over stamp and features
_ROW = STAMP + _CHECKSUM


def cache_key(backbone: Backbone, precision: str) -> dict:
    """Everything but the image itself that its features depend on."""
    return backbone.image_fingerprint() | {"precision": precision}


class FeatureCache:
    """Image features by the stamp of their image.

    A subfolder per key holds one pair of files for each process that wrote there: rows of float32 features, and rows of
    stamps and checksums. Both only grow; an incomplete row that a kill left is cut off before more is written. Damaged
    features are never returned; an image whose stamp is damaged has none.

    Args:
        folder: of the caches of all keys.
        key: everything the features depend on besides the image (see `cache_key`).
        dim: numbers in a feature.
    """

    def __init__(self, folder: str | os.PathLike, key: dict, dim: int):
        self.folder, self.key, self.dim = Path(folder) / json_digest(key)[:32], key, dim
        self.read()

    def read(self) -> None:
        """Maps the files on disk."""
        self._parts: list[np.ndarray] = []
        stamps = [np.empty((0, _ROW), dtype=np.uint8)]
        for features in sorted(self.folder.glob("features-*")):
            written = np.fromfile(_stamps_of(features), dtype=np.uint8) if _stamps_of(features).exists() else stamps[0]
            rows = min(len(written) // _ROW, features.stat().st_size // (4 * self.dim))
            if rows:
                self._parts.append(np.memmap(features, dtype=np.float32, mode="r", shape=(rows, self.dim)))
                stamps.append(written[: rows * _ROW].reshape(rows, _ROW))
        self._ends = np.cumsum([len(part) for part in self._parts])
        self._rows = np.concatenate(stamps)
        # Sorted for binary search; equal stamps mean equal features.
        known = np.ascontiguousarray(self._rows[:, :STAMP]).reshape(-1).view(f"S{STAMP}")
        self._order = np.argsort(known, kind="stable")
        self._known = known[self._order]

    def __len__(self) -> int:
        return len(self._known)

    def find(self, stamps: Sequence[bytes]) -> np.ndarray:
        """The row of each stamp's features, -1 where there are none."""
        wanted = np.frombuffer(b"".join(stamps), dtype=f"S{STAMP}")
        if not len(self):
            return np.full(len(wanted), -1)
        at = np.searchsorted(self._known, wanted).clip(max=len(self) - 1)
        return np.where(self._known[at] == wanted, self._order[at], -1)

    def __getitem__(self, row: int) -> torch.Tensor:
        """[dim]. Raises UserError where they are damaged."""
        part = int(np.searchsorted(self._ends, row, side="right"))
        start = self._ends[part - 1] if part else 0
        features, noted = self._parts[part][row - start].copy(), self._rows[row].tobytes()
        if _checksum(noted[:STAMP], features) != noted[STAMP:]:
            file = Path(self._parts[part].filename)
            raise UserError(
                f"The image features in {str(file)!r} are damaged: row {row - start} and its checksum do not agree. "
                f"Remove that file and {_stamps_of(file).name!r} beside it, and start the same command again, which "
                "computes them again."
            )
        return torch.from_numpy(features)

    def writer(self, process: int) -> "FeatureWriter":
        """A writer for `process` alone; the first process also writes the key, whose digest names the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if process == 0:
            write_json(self.folder / "key.json", self.key)
        return FeatureWriter(self.folder / f"features-{process:04d}", self.dim)


def _checksum(stamp: bytes, features: np.ndarray) -> bytes:
    return hashlib.blake2b(stamp + features.tobytes(), digest_size=_CHECKSUM).digest()


def _stamps_of(features: Path) -> Path:
    return features.with_name(features.name.replace("features", "stamps"))


class FeatureWriter:
    """Adds rows to one process's files."""

    def __init__(self, path: Path, dim: int):
        self._features, self._stamps = path, _stamps_of(path)
        for file in (self._features, self._stamps):
            file.touch()
        rows = min(self._features.stat().st_size // (4 * dim), self._stamps.stat().st_size // _ROW)
        os.truncate(self._features, rows * 4 * dim)
        os.truncate(self._stamps, rows * _ROW)

    def add(self, stamps: Sequence[bytes], features: torch.Tensor) -> None:
        """Adds rows [n, dim], on disk when this returns."""
        rows = features.float().cpu().contiguous().numpy()
        _append(self._features, rows.tobytes())
        # After the features: a stamp must not stand without features, and features without a stamp are cut off.
        noted = [stamp + _checksum(stamp, row) for stamp, row in zip(stamps, rows, strict=True)]
        _append(self._stamps, b"".join(noted))


def _append(path: Path, content: bytes) -> None:
    with open(path, "ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


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
        dim: numbers in the features of an image.
    """

    accelerator: Accelerator
    key: dict
    dim: int

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
        return cache_key(self.backbone, self.precision)

    @property
    def dim(self) -> int:
        return self.backbone.config["model_cfg"]["embed_dim"]

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
    """(stamp, pixels) of each image without features, or its BadRecord."""

    def __init__(self, records: Sequence[Record], indices: Sequence[int], images: ImageSource, read_pixels):
        self.records, self.indices, self.images, self.read_pixels = records, indices, images, read_pixels

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> tuple[bytes, torch.Tensor] | BadRecord:
        return read_or_bad(self.records[self.indices[position]], self._read)

    def _read(self, image: str) -> tuple[bytes, torch.Tensor]:
        # The stamp first: if the image is replaced before its pixels are read, the new stamp must not find them.
        stamp = self.images.stamp(image)
        return stamp, self.read_pixels(self.images.open(image))


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

    A run that is killed, or that `stop` ends after a batch, resumes where it was.

    Returns:
        The features as an image source, and the records with unreadable images.

    Raises:
        UserError: another run is filling this cache, or a feature is not finite.
    """
    accelerator, cache = encoder.accelerator, FeatureCache(folder, encoder.key, encoder.dim)
    missing = _without_features(records, images, cache)[accelerator.process_index :: accelerator.num_processes]
    dataset = _Missing(records, missing, images, encoder.read_pixels)
    loader = DataLoader(dataset, batch_size=batch, num_workers=workers, collate_fn=list)
    cache.folder.mkdir(parents=True, exist_ok=True)
    # Each process takes its share of the same list, so none may add to the cache before all have read it.
    accelerator.wait_for_everyone()
    taken = f"Another run is filling {str(cache.folder)!r}. Wait for it, or give another --feature-cache."
    with folder_lock(cache.folder, taken) if accelerator.is_main_process else nullcontext():
        bad = _fill(encoder, loader, cache, stop)
        accelerator.wait_for_everyone()
    cache.read()
    return CachedImages(images, cache), gather_object(bad)


def _without_features(records: Sequence[Record], images: ImageSource, cache: FeatureCache) -> list[int]:
    stamps = []
    for record in tqdm(records, desc="looking for image features", unit=" images", disable=len(records) < 10_000):
        stamp = read_or_bad(record, images.stamp)
        stamps.append(bytes(STAMP) if isinstance(stamp, BadRecord) else stamp)
    return np.flatnonzero(cache.find(stamps) < 0).tolist()


@torch.inference_mode()
def _fill(encoder: FrozenEncoder, loader: DataLoader, cache: FeatureCache, stop: Callable[[], bool]) -> list[BadRecord]:
    bad: list[BadRecord] = []
    accelerator, total = encoder.accelerator, len(loader.dataset)
    bar = tqdm(total=total, desc="image features", unit=" images", disable=not accelerator.is_main_process)
    writer = cache.writer(accelerator.process_index)
    with bar, load_batches(loader) as batches:
        for rows in batches:
            bad += [row for row in rows if isinstance(row, BadRecord)]
            good = [row for row in rows if not isinstance(row, BadRecord)]
            if good:
                stamps, pixels = zip(*good, strict=True)
                writer.add(stamps, encoder.encode(torch.stack(pixels)))
            bar.update(len(rows))
            if stop():
                break
    return bad
