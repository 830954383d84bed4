"""Features of the images that an evaluation looks at, encoded in pieces that are not encoded again."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from debias_diffusion.data import BadRecord, ImageSource, Record
from debias_diffusion.data.bad_records import read_or_bad
from debias_diffusion.errors import UserError
from debias_diffusion.retrieval import encode_readable, none_readable

from ..common.cache import Parts
from ..common.encoders import TwoTower

PIECE = 2048  # images whose features are kept at once


@dataclass(frozen=True)
class Encoded:
    """What an encoder makes of images.

    Attributes:
        features: of the readable images, [M, D], on the CPU.
        good: their positions among all, ascending, [M].
        bad: the other images, by name.
    """

    features: Tensor
    good: list[int]
    bad: list[BadRecord]


class ImageFeatures:
    """Encodes the same images with one encoder after the other, a piece at a time.

    Args:
        records: the images, at least one.
        images: what opens them.
        parts: where finished pieces are kept.
        batch_size: images encoded at once.
        device: where encoders run.

    Attributes:
        digest: changes with the images' names and order, and where their files could have changed.
    """

    def __init__(
        self, records: Sequence[Record], images: ImageSource, parts: Parts, batch_size: int, device: torch.device
    ):
        self.records, self.images, self.parts = records, images, parts
        self.batch_size, self.device = batch_size, device
        self.digest = self._stamps()
        self._first: list[int] | None = None

    def encode(self, encoder: TwoTower) -> Encoded:
        """The features of all images that can be read. What is finished comes from the disk.

        Raises:
            UserError: none of the images can be read, or other ones than for an earlier encoder.
        """
        features, good = [], []
        for start in range(0, len(self.records), PIECE):
            piece = self._piece(encoder, start)
            features.append(piece["features"])
            good += (start + piece["good"]).tolist()
        bad = [self._fault(self.records[index]) for index in sorted(set(range(len(self.records))) - set(good))]
        if not good:
            raise none_readable(self.records, self.images, bad)
        if self._first is None:
            self._first = good
        if good != self._first:
            name = self.records[min(set(good) ^ set(self._first))].image
            raise UserError(
                f"{name!r} and perhaps other images could be read for one encoder and not for another, so that their "
                f"numbers would be of other images. Delete {str(self.parts.folder)!r} and start again."
            )
        return Encoded(torch.cat([part for part in features if len(part)]), good, bad)

    def _piece(self, encoder: TwoTower, start: int) -> dict[str, Tensor]:
        """ "features" [n, D] of the n readable images of one piece, and their places in it, "good" [n]"""
        records = self.records[start : start + PIECE]

        def work() -> dict[str, Tensor]:
            title = f"images, {encoder.label}"
            features, good, _ = encode_readable(
                encoder.backbone, records, self.images, self.batch_size, self.device, title
            )
            return {"features": features, "good": torch.tensor(good, dtype=torch.long)}

        depends = encoder.depends | {"pixels": self.digest, "start": start, "count": len(records)}
        return self.parts.tensors("images", depends, work)

    def _fault(self, record: Record) -> BadRecord:
        """What is wrong with an image that is not among a piece's features, which may come from an earlier run."""
        image = read_or_bad(record, self.images.open)
        if isinstance(image, BadRecord):
            return image
        return BadRecord(record.image, "unreadable image", f"{record.image}: it could not be read when it was encoded")

    def _stamps(self) -> str:
        total = hashlib.sha256()
        for record in self.records:
            try:
                total.update(self.images.stamp(record.image))
            except (OSError, ValueError):
                total.update(f"no {record.image}\n".encode("utf-8", "surrogatepass"))
        return total.hexdigest()
