"""Records to training samples, and samples to batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from PIL import Image
from torch.utils.data import Dataset

from ..errors import UserError
from ..methods.base import Batch, Caption, Key, Method
from ..text.tokens import CaptionTokenizer, TokenBatch
from .bad_records import BadRecord, read_or_bad
from .images import ImageSource
from .records import Record

NO_SHORT_CAPTION = "no short caption"  # kind of a bad record
_ATTEMPTS = 20  # how many records in a row may be unreadable before a sample gives up


@dataclass(frozen=True)
class Sample:
    """One pair of a step, as it was asked for by `key`."""

    key: Key
    sample_id: str
    image: torch.Tensor
    captions: list[Caption]
    bad: list[BadRecord] = field(default_factory=list)
    views: dict[str, torch.Tensor] = field(default_factory=dict)


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
    """

    records: Sequence[Record]
    images: ImageSource
    preprocess: Callable[[Image.Image], torch.Tensor]
    seed: int
    stand_ins: Callable[[int], Sequence[int]] | None

    def __len__(self) -> int:
        return len(self.records)

    def read(self, key: Key) -> tuple[Record, torch.Tensor, list[BadRecord]]:
        """The record of a key, or its replacement, its image, and the bad records before it."""
        bad = []
        for record in self._candidates(*key):
            image = self.fault(record) or read_or_bad(record, lambda name: self.preprocess(self.images.open(name)))
            if not isinstance(image, BadRecord):
                return record, image, bad
            bad.append(image)
        many = f"{len(bad)} images in a row" if len(bad) > 1 else "An image that no other may replace (--max-bad)"
        raise UserError(
            f"{many} cannot be read from {str(self.images.root)!r}, the last: {bad[-1].detail}. "
            "`train --check-data` names them all."
        )

    def fault(self, record: Record) -> BadRecord | None:
        """Why a record cannot be used, whatever its image."""
        return None

    def _candidates(self, epoch: int, index: int, place: int) -> Iterator[Record]:
        """The record asked for, then those that replace it, in order."""
        yield self.records[index]
        stand_ins = self.stand_ins(epoch) if self.stand_ins else ()
        for attempt in range(min(_ATTEMPTS - 1, len(stand_ins))):
            yield self.records[int(stand_ins[(place + attempt) % len(stand_ins)])]


def without_short_caption(record: Record) -> BadRecord | None:
    """The bad record of one without a short caption, for a method that needs it."""
    if record.short is not None:
        return None
    return BadRecord(record.image, NO_SHORT_CAPTION, f"{record.image}: its entry has no usable short_caption")


@dataclass(eq=False, repr=False)
class CaptionDataset(RecordDataset):
    """Image-caption pairs for a method, which draws and tokenizes the captions, and draws views of the image."""

    tokenizer: CaptionTokenizer
    recipe: Method

    def fault(self, record: Record) -> BadRecord | None:
        return without_short_caption(record) if self.recipe.reads_short else None

    def __getitem__(self, key: Key) -> Sample:
        record, image, bad = self.read(key)
        drawn_from = record.caption, self.tokenizer, self.seed, key[0], record.sample_id
        given = {"short": record.short} if self.recipe.reads_short else {}
        captions, views = self.recipe.captions(*drawn_from, **given), self.recipe.views(image, *drawn_from)
        return Sample(key, record.sample_id, image, captions, bad, views)


def collate(
    samples: list[Sample],
    tokenizer: CaptionTokenizer,
    recipe: Method,
    cached_features: bool = False,
    arrange: Callable[[TokenBatch], TokenBatch] = lambda tokens: tokens,
) -> Batch:
    """Samples to a Batch.

    Args:
        cached_features: whether a sample's image is its features.
        arrange: what else is made of the captions before the step, see `packing.arranged`.
    """
    return Batch(
        keys=[sample.key for sample in samples],
        sample_ids=[sample.sample_id for sample in samples],
        images=torch.stack([sample.image for sample in samples]),
        tokens=arrange(recipe.collate([sample.captions for sample in samples], tokenizer)),
        bad=[record for sample in samples for record in sample.bad],
        views={name: torch.stack([sample.views[name] for sample in samples]) for name in samples[0].views},
        cached_features=cached_features,
    )
