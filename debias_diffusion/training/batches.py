"""The samples of each step: a pure function of the seed, so that a run can resume at any step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from ..data.bad_records import BadRecord, read_or_bad, without_short_caption
from ..data.batch import Batch, Caption, Key
from ..data.images import ImageSource
from ..data.records import Record
from ..errors import UserError
from ..methods import Method
from ..text.tokens import CaptionTokenizer, TokenBatch

_ATTEMPTS = 20  # how many records in a row may be unreadable before a sample gives up


class GlobalBatches:
    """The samples of every step, the same however many processes share them.

    Each epoch is a permutation of all records. Batches are cut from the concatenated epochs: the remainder of one opens
    the first batch of the next, in which no record occurs twice; the remainder of the last is dropped.

    Args:
        records: their number.
        batch: samples a step over all processes, at most `records`.
        epochs: passes over the records.
        seed: of the permutations.
        max_steps: upper limit of steps.

    Attributes:
        total_steps: steps of the run.
    """

    def __init__(self, records: int, batch: int, epochs: int, seed: int, max_steps: int | None = None):
        self.records, self.batch, self.epochs, self.seed = records, batch, epochs, seed
        self.total_steps = min(records * epochs // batch, max_steps or records * epochs)

    @property
    def remainder(self) -> int:
        """Samples of the last epoch that are too few for another step."""
        left = self.records * self.epochs - self.total_steps * self.batch
        return left if left < self.batch else 0

    def iterate(self, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[list[Key]]:
        """This process's samples of each step from number `start` on; `world` must divide the batch."""
        local = self.batch // world
        step, rest = 0, np.empty((0, 3), dtype=np.int64)
        for epoch in range(self.epochs):
            order = self._order(epoch, carried=rest[:, 1])
            keys = np.stack([np.full_like(order, epoch), order, np.arange(len(order))], axis=1)
            queue = np.concatenate([rest, keys])
            for at in range(0, len(queue) - self.batch + 1, self.batch):
                if step >= self.total_steps:
                    return
                if step >= start:
                    share = queue[at + rank * local : at + (rank + 1) * local]
                    yield [tuple(key) for key in share.tolist()]
                step += 1
            rest = queue[len(queue) - len(queue) % self.batch :]

    def permutation(self, epoch: int) -> np.ndarray:
        """The indices of all records, by their place in an epoch."""
        return _permutation(self.records, self.seed, epoch)

    def _order(self, epoch: int, carried: np.ndarray) -> np.ndarray:
        """The epoch's records in order; those carried over into its first batch do not occur twice in it."""
        order = self.permutation(epoch).copy()
        if len(carried):
            repeated = np.isin(order, carried)
            head = self.batch - len(carried)
            wrong = np.flatnonzero(repeated[:head])
            right = head + np.flatnonzero(~repeated[head:])[: len(wrong)]
            order[wrong], order[right] = order[right], order[wrong]
        return order


@lru_cache(maxsize=2)  # workers look it up for every unreadable image
def _permutation(records: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(records)


@dataclass(eq=False, repr=False)
class RecordDataset(Dataset):
    """Samples by key, each a pure function of that key and the seed.

    A record whose image cannot be read is replaced by another of the epoch, which depends on the key alone, and named
    in the sample's `bad`; so every process stays in step and a restart draws the same. It is one half an epoch away, so
    that in data of more than two batches no batch has a record twice, but for the first of an epoch, in which the
    remainder of the one before may hold it already. A subclass makes samples.

    Args:
        records: all of them.
        images: where their images come from.
        preprocess: an opened image to the tensor that a batch is made of.
        seed: of the draws.
        stand_ins: the indices of an epoch's records, by their place in it. None: an unreadable image is an error.
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
            record = self.records[int(stand_ins[(place + len(stand_ins) // 2 + attempt) % len(stand_ins)])]
        many = f"{len(bad)} images in a row" if len(bad) > 1 else "An image that no other may replace (--max-bad)"
        raise UserError(
            f"{many} cannot be read from {str(self.images.root)!r}, the last: {bad[-1].detail}. "
            "`train --check-data` names them all."
        )


@dataclass(frozen=True)
class Sample:
    """One pair of a step."""

    sample_id: str
    image: torch.Tensor
    captions: list[Caption]
    bad: list[BadRecord] = field(default_factory=list)
    views: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class CaptionDataset(RecordDataset):
    """Image-caption pairs for a method, which draws and tokenizes the captions, and draws views of the image."""

    tokenizer: CaptionTokenizer
    method: Method

    def __getitem__(self, key: Key) -> Sample:
        record, image, bad = self.read(key)
        drawn_from = record.caption, self.tokenizer, self.seed, key[0], record.sample_id
        captions, views = self.method.captions(*drawn_from, record.short), self.method.views(image, *drawn_from)
        return Sample(record.sample_id, image, captions, bad, views)


def collate(
    samples: list[Sample],
    tokenizer: CaptionTokenizer,
    method: Method,
    cached_features: bool = False,
    arrange: Callable[[TokenBatch], TokenBatch] = lambda tokens: tokens,
) -> Batch:
    """Samples to a Batch.

    Args:
        cached_features: whether a sample's image is its features.
        arrange: what else is made of the captions before the step, see `packing.arranged`.
    """
    return Batch(
        sample_ids=[sample.sample_id for sample in samples],
        images=torch.stack([sample.image for sample in samples]),
        tokens=arrange(method.collate([sample.captions for sample in samples], tokenizer)),
        bad=[record for sample in samples for record in sample.bad],
        views={name: torch.stack([sample.views[name] for sample in samples]) for name in samples[0].views},
        cached_features=cached_features,
    )
