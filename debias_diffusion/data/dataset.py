"""Records to training samples, and samples to batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from PIL import Image
from torch.utils.data import Dataset

from ..errors import UserError
from ..methods.dual_caption import Caption, Recipe
from ..tokens import CaptionTokenizer, TokenBatch
from .bad_records import BadRecord, read_or_bad
from .images import ImageSource
from .records import Record

_ATTEMPTS = 20  # how many records in a row may be unreadable before a sample gives up

Key = tuple[int, int, int]  # (epoch, index of the record, its place in the epoch)


@dataclass(frozen=True)
class Sample:
    """One pair of a step, as it was asked for by `key`."""

    key: Key
    sample_id: str
    image: torch.Tensor
    captions: list[Caption]
    bad: list[BadRecord] = field(default_factory=list)


class CaptionDataset(Dataset):
    """Image-caption pairs by key, each a pure function of that key and the seed.

    A record whose image cannot be read is replaced by one of the epoch's reserve, which depends on the key alone, and
    named in the sample's `bad`; so every process stays in step and a restart draws the same.

    Args:
        records: all of them.
        images: where their images come from.
        preprocess: an opened image to the tensor that a batch is made of.
        tokenizer, recipe: what becomes of the captions.
        seed: of the draws.
        reserve: an epoch's records that stand in for others, by index (see `training.batches.GlobalBatches.reserve`).
            None: there are none, and an unreadable image is an error.
    """

    def __init__(
        self,
        records: Sequence[Record],
        images: ImageSource,
        preprocess: Callable[[Image.Image], torch.Tensor],
        tokenizer: CaptionTokenizer,
        recipe: Recipe,
        seed: int,
        reserve: Callable[[int], Sequence[int]] | None = None,
    ):
        self.records = records
        self.images = images
        self.preprocess = preprocess
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.seed = seed
        self.reserve = reserve

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, key: Key) -> Sample:
        epoch = key[0]
        bad = []
        for record in self._candidates(*key):
            image = read_or_bad(record, lambda name: self.preprocess(self.images.open(name)))
            if isinstance(image, BadRecord):
                bad.append(image)
                continue
            captions = self.recipe.captions(record.caption, self.tokenizer, self.seed, epoch, record.sample_id)
            return Sample(key, record.sample_id, image, captions, bad)
        many = f"{len(bad)} images in a row" if len(bad) > 1 else "An image that no reserve (--max-bad) stands in for"
        raise UserError(
            f"{many} cannot be read from {str(self.images.root)!r}, the last: {bad[-1].detail}. "
            "`train --check-data` names them all."
        )

    def _candidates(self, epoch: int, index: int, place: int) -> Iterator[Record]:
        """The record asked for, then the reserve's, in an order in which neighbours begin at different ones."""
        yield self.records[index]
        reserve = self.reserve(epoch) if self.reserve else ()
        for attempt in range(min(_ATTEMPTS - 1, len(reserve))):
            yield self.records[int(reserve[(place + attempt) % len(reserve)])]


@dataclass(frozen=True)
class Batch:
    """The samples of one step on one process.

    Attributes:
        keys: of each sample.
        sample_ids: of each sample, or of the one that stands in for it.
        images: [batch, 3, height, width] pixels, or [batch, embed_dim] image features.
        tokens: each kind of caption after the other: `len(tokens)` is a multiple of the batch, with one shared prefix.
        bad: records that had to be replaced.
    """

    keys: list[Key]
    sample_ids: list[str]
    images: torch.Tensor
    tokens: TokenBatch
    bad: list[BadRecord]

    def __len__(self) -> int:
        return len(self.keys)

    def to(self, device: torch.device) -> "Batch":
        return replace(self, images=self.images.to(device, non_blocking=True), tokens=self.tokens.to(device))

    def pin_memory(self) -> "Batch":
        return replace(self, images=self.images.pin_memory(), tokens=self.tokens.pin_memory())

    def chunks(self, size: int) -> "list[Batch]":
        """The batch in parts of `size` samples, the last one perhaps smaller. `bad` stays with the whole."""
        if size >= len(self):
            return [self]
        starts, kinds = range(0, len(self), size), len(self.tokens) // len(self)
        parts = [range(start, min(start + size, len(self))) for start in starts]
        return [
            Batch(
                self.keys[part.start : part.stop],
                self.sample_ids[part.start : part.stop],
                self.images[part.start : part.stop],
                self.tokens.select([kind * len(self) + sample for kind in range(kinds) for sample in part]),
                [],
            )
            for part in parts
        ]


class Collate:
    """Samples to a Batch (a class, so that worker processes can be given it)."""

    def __init__(self, tokenizer: CaptionTokenizer, recipe: Recipe):
        self.tokenizer, self.recipe = tokenizer, recipe

    def __call__(self, samples: list[Sample]) -> Batch:
        return Batch(
            keys=[sample.key for sample in samples],
            sample_ids=[sample.sample_id for sample in samples],
            images=torch.stack([sample.image for sample in samples]),
            tokens=self.recipe.batch([sample.captions for sample in samples], self.tokenizer),
            bad=[record for sample in samples for record in sample.bad],
        )
