"""Records by the key of a training sample, with others in the place of unreadable ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from PIL import Image
from torch.utils.data import Dataset

from ..errors import UserError
from .bad_records import BadRecord, read_or_bad
from .batch import Key
from .images import ImageSource
from .records import Record

NO_SHORT_CAPTION = "no short caption"  # kind of a bad record
_ATTEMPTS = 20  # how many records in a row may be unreadable before a sample gives up


def without_short_caption(record: Record) -> BadRecord | None:
    """The bad record of one without a short caption."""
    if record.short is not None:
        return None
    return BadRecord(record.image, NO_SHORT_CAPTION, f"{record.image}: its entry has no usable short_caption")


@dataclass(eq=False, repr=False)
class RecordDataset(Dataset):
    """Samples by key, each a pure function of that key and the seed.

    A record whose image cannot be read is replaced by another of the epoch, which depends on the key alone, and named
    in the sample's `bad`; so every process stays in step and a restart draws the same. A subclass makes samples.

    Args:
        records: all of them.
        images: where their images come from.
        preprocess: an opened image to the tensor that a batch is made of.
        seed: of the draws.
        stand_ins: an epoch's records that replace others, by the place of these in it (see
            `training.batches.GlobalBatches.stand_ins`). None: there are none, and an unreadable image is an error.
        reads_short: whether a record without a short caption is bad, too.
    """

    records: Sequence[Record]
    images: ImageSource
    preprocess: Callable[[Image.Image], torch.Tensor]
    seed: int
    stand_ins: Callable[[int], Sequence[int]] | None
    reads_short: bool = field(default=False, kw_only=True)

    def __len__(self) -> int:
        return len(self.records)

    def read(self, key: Key) -> tuple[Record, torch.Tensor, list[BadRecord]]:
        """The record of a key, or its replacement, its image, and the bad records before it."""
        epoch, index, place = key
        record, bad = self.records[index], []
        for attempt in range(_ATTEMPTS):
            fault = without_short_caption(record) if self.reads_short else None
            image = fault or read_or_bad(record, lambda name: self.preprocess(self.images.open(name)))
            if not isinstance(image, BadRecord):
                return record, image, bad
            bad.append(image)
            stand_ins = self.stand_ins(epoch) if self.stand_ins else ()
            if attempt == len(stand_ins):
                break
            record = self.records[int(stand_ins[(place + attempt) % len(stand_ins)])]
        many = f"{len(bad)} images in a row" if len(bad) > 1 else "An image that no other may replace (--max-bad)"
        raise UserError(
            f"{many} cannot be read from {str(self.images.root)!r}, the last: {bad[-1].detail}. "
            "`train --check-data` names them all."
        )
