"""Records to training samples, and samples to batches."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from PIL import Image
from torch.utils.data import Dataset

from ..errors import UserError
from ..recipes import CaptionPair, Recipe
from ..tokens import CaptionTokenizer, TokenBatch
from .images import ImageFolder
from .sharegpt4v import BadRecord, Record

# What Pillow raises for files that are missing, cut short, absurdly large or no images.
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)

_ATTEMPTS = 20  # how many records in a row may be unreadable before a sample gives up


@dataclass(frozen=True)
class Sample:
    """One pair of a step: `key` is (epoch, index of the record that was asked for)."""

    key: tuple[int, int]
    image: torch.Tensor
    captions: CaptionPair
    bad: list[BadRecord] = field(default_factory=list)


class CaptionDataset(Dataset):
    """Image-caption pairs by (epoch, index), each a pure function of that key and the seed.

    An image that cannot be read is replaced by that of another record, drawn from the same key, and named in the
    sample's `bad`; so every process stays in step and a restart draws the same.
    """

    def __init__(
        self,
        records: Sequence[Record],
        images: ImageFolder,
        preprocess,
        tokenizer: CaptionTokenizer,
        recipe: Recipe,
        seed: int,
    ):
        self.records = records
        self.images = images
        self.preprocess = preprocess
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.seed = seed

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        replacements = random.Random(f"replacement/{self.seed}/{epoch}/{self.records[index].sample_id}")
        bad = []
        for _ in range(_ATTEMPTS):
            record = self.records[index]
            try:
                image = self.preprocess(self.images.open(record.image))
            except UNREADABLE as error:
                bad.append(unreadable(record, error))
                index = replacements.randrange(len(self.records))
                continue
            captions = self.recipe.captions(record.caption, self.tokenizer, self.seed, epoch, record.sample_id)
            return Sample(key, image, captions, bad)
        raise UserError(
            f"{_ATTEMPTS} images in a row cannot be read from {str(self.images.root)!r}, the last: {bad[-1].detail}. "
            "`train --check-data` names them all."
        )


def unreadable(record: Record, error: Exception) -> BadRecord:
    """A record whose image cannot be used, with the kind of fault."""
    kinds = {FileNotFoundError: "missing image", Image.DecompressionBombError: "absurdly large image"}
    return BadRecord(record.image, kinds.get(type(error), "unreadable image"), f"{record.image}: {error}")


@dataclass(frozen=True)
class Batch:
    """The samples of one step on one process.

    Attributes:
        keys: (epoch, index) of each sample.
        images: [batch, 3, height, width]
        tokens: the long captions, then the short ones: 2 * batch captions with one shared prefix.
        bad: records that had to be replaced.
    """

    keys: list[tuple[int, int]]
    images: torch.Tensor
    tokens: TokenBatch
    bad: list[BadRecord]

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.keys, self.images.to(device, non_blocking=True), self.tokens.to(device), self.bad)

    def pin_memory(self) -> "Batch":
        return Batch(self.keys, self.images.pin_memory(), self.tokens.pin_memory(), self.bad)


class Collate:
    """Samples to a Batch (a class, so that worker processes can be given it)."""

    def __init__(self, tokenizer: CaptionTokenizer):
        self.tokenizer = tokenizer

    def __call__(self, samples: list[Sample]) -> Batch:
        long_ids = [sample.captions.long_ids for sample in samples]
        short_ids = [sample.captions.short_ids for sample in samples]
        n_pre = [0] * len(samples) + [sample.captions.n_pre for sample in samples]
        return Batch(
            keys=[sample.key for sample in samples],
            images=torch.stack([sample.image for sample in samples]),
            tokens=self.tokenizer.batch(long_ids + short_ids, n_pre),
            bad=[record for sample in samples for record in sample.bad],
        )
