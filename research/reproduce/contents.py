"""What settings name, by contents: results of data or models that were replaced since are others."""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from debias_diffusion.data.images import ImageSource
from debias_diffusion.data.records import Record
from debias_diffusion.data.retrieval import images_digest
from debias_diffusion.data.sources import data_digest, is_toy_scenes, open_data, read_captions
from debias_diffusion.encoders.hub import location_digest
from debias_diffusion.encoders.resolve import may_be_hub_id
from debias_diffusion.errors import UserError
from debias_diffusion.eval.image_features import stamps_digest
from debias_diffusion.eval.retrieval_sets import read_retrieval_set
from debias_diffusion.files import read_checked, with_checksum, write_json
from debias_diffusion.toyworld.shipped import shipped

_DATA = ("data", "images", "dataset", "root")
_WITHOUT_EFFECT = ("feature_cache", "latent_cache")  # which are there from the first run on


class Contents:
    """Digests of data and models by their names.

    Images are read once: the digest of their pixels is kept in a file, and holds while they have the same stamps.

    Args:
        folder: of these files; None: nothing is kept.
        read: whether images are read. Otherwise those without a note have no digest.
    """

    def __init__(self, folder: Path | None = None, read: bool = True):
        self._folder, self._read = folder, read
        self._data = cache(self._data_digests)
        self._model = cache(self._of_model)

    def of(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings with digests in place of the data and models that they name."""
        rest = {name: part for name, part in settings.items() if name not in (*_DATA, *_WITHOUT_EFFECT)}
        named = {name: self._model(part) if isinstance(part, str) else part for name, part in rest.items()}
        limit, datasets = settings.get("limit"), settings.get("dataset") or []
        given = {name: settings.get(name) for name in _DATA} | {"limit": limit if isinstance(limit, int) else None}
        given["dataset"] = (datasets,) if isinstance(datasets, str) else tuple(datasets)
        return named | {"data": self._data(**given)}

    def _of_model(self, name: str) -> str:
        """A model's files, or its commit on the hub, by digest; any other name or setting as it is."""
        before, colon, place = name.rpartition(":")
        path = shipped(place)
        is_known = os.path.exists(path) or may_be_hub_id(place)
        return f"{before}{colon}{location_digest(path)}" if is_known else name

    def _data_digests(
        self, data: str | None, images: str | None, dataset: tuple[str, ...], root: str | None, limit: int | None
    ) -> Any:
        """Of captions and images. What cannot be read keeps its names: it is not there yet, or its use says why."""
        if not dataset and (data is None or is_toy_scenes(data)):  # drawn by this package, whose commit is recorded
            return data
        try:
            return [self._of_benchmark(name, root, limit) for name in dataset] or self._of_pairs(data, images, limit)
        except UserError:
            return [data, images, list(dataset), root]

    def _of_pairs(self, data: str, images: str | None, limit: int | None) -> list[str | None]:
        try:
            captions, source = open_data(data, images)
        except UserError:
            captions, source = read_captions(data), None
        return [data_digest(data, captions), source and self._of_images(captions.records[:limit], source)]

    def _of_benchmark(self, name: str, root: str, limit: int | None) -> list[str | None]:
        benchmark = read_retrieval_set(name, root)
        return [name, benchmark.digest, self._of_images(benchmark.records[:limit], benchmark.images)]

    def _of_images(self, records: Sequence[Record], images: ImageSource) -> str | None:
        if self._folder is None:
            return images_digest(records, images)
        file = self._folder / f"images-{stamps_digest(records, images)}.json"
        if (kept := read_checked(file)) is None:
            if not self._read:
                return None
            kept = {"digest": images_digest(records, images)}
            write_json(file, with_checksum(kept))
        return kept["digest"]
