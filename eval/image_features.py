"""Features of an evaluation's images, encoded and cached in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from debias_diffusion.data.bad_records import BadRecord, check_share, print_left_out, read_or_bad
from debias_diffusion.data.images import ImageSource
from debias_diffusion.data.records import Record
from debias_diffusion.errors import UserError
from debias_diffusion.files import bytes_digest
from debias_diffusion.retrieval import encode_images, none_readable

from .session import Session, TwoTower

PIECE = 2048  # images whose features are in one file of the cache


@dataclass(frozen=True)
class Encoded:
    """Encoded images.

    Attributes:
        features: of the readable images, [M, D], on the CPU.
        good: their positions among all, ascending, [M].
        bad: the unreadable images.
    """

    features: Tensor
    good: list[int]
    bad: list[BadRecord]


class ImageFeatures:
    """Encodes the same images with one encoder after the other, in pieces, kept in the session's cache.

    Args:
        records: the images, at least one.
        images: what opens them.
        bad: bad records of the data that count with unreadable images, see `bad_records.check_share`.

    Attributes:
        digest: of the images' names and order, and of what shows that their files have changed.
    """

    def __init__(self, session: Session, records: Sequence[Record], images: ImageSource, bad: Sequence[BadRecord] = ()):
        self.session, self.records, self.images, self.bad = session, records, images, list(bad)
        self.digest = bytes_digest(map(self._stamp, records))
        self._first: list[int] | None = None

    def encode(self, encoder: TwoTower) -> Encoded:
        """The features of all readable images. Finished pieces come from the cache; unreadable images are named once.

        Raises:
            UserError: no image is readable, more are bad than the share `max_bad`, or not the same images are readable
                as for an earlier encoder.
        """
        features, good = [], []
        for start in range(0, len(self.records), PIECE):
            piece = self._piece(encoder, start)
            features.append(piece["features"])
            good += (start + piece["good"]).tolist()
        bad = [self._explain(self.records[index]) for index in sorted(set(range(len(self.records))) - set(good))]
        if not good:
            raise none_readable(self.records, self.images, bad)
        if self._first is None:
            self._first = good
            print_left_out(bad)
            self.session.left_out += bad
        check_share([*self.bad, *bad], len(self.records) + len(self.bad), self.session.config.max_bad)
        if good != self._first:
            name = self.records[min(set(good) ^ set(self._first))].image
            raise UserError(
                f"{name!r} and perhaps other images could be read for one encoder and not for another, so that their "
                f"numbers would be of other images. Delete {str(self.session.cache.folder)!r} and start again."
            )
        return Encoded(torch.cat([part for part in features if len(part)]), good, bad)

    def _piece(self, encoder: TwoTower, start: int) -> dict[str, Tensor]:
        """The n readable images of one piece: "features" [n, D], and "good", their positions in the piece, [n]."""
        records = self.records[start : start + PIECE]

        def compute() -> dict[str, Tensor]:
            title = f"images, {encoder.label}"
            batch_size, device = self.session.config.batch_size, self.session.device
            features, good, _ = encode_images(
                encoder.backbone, records, self.images, batch_size, device, title, require_any=False
            )
            return {"features": features, "good": torch.tensor(good, dtype=torch.long)}

        depends = encoder.depends | {"pixels": self.digest, "start": start, "count": len(records)}
        return self.session.cache.tensors("images", depends, compute)

    def _explain(self, record: Record) -> BadRecord:
        """Why an image is missing from the features of its piece, which may come from an earlier run."""
        image = read_or_bad(record, self.images.open)
        if isinstance(image, BadRecord):
            return image
        return BadRecord(record.image, "unreadable image", f"{record.image}: it could not be read when it was encoded")

    def _stamp(self, record: Record) -> bytes:
        try:
            return self.images.stamp(record.image)
        except (OSError, ValueError):
            return f"no {record.image}\n".encode("utf-8", "surrogatepass")
