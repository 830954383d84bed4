"""What a training step reads: captions as token ids, and the samples of one process; and what draws them."""

import random
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..text.tokens import TokenBatch

Key = tuple[int, int, int]  # (epoch, index of the record, position in the epoch)


def draw_generator(seed: int, epoch: int, sample_id: str) -> random.Random:
    """The random numbers of one sample in one epoch: a pure function of its arguments.

    So neither the number of workers or processes nor a restart changes what is drawn.
    """
    return random.Random(f"{seed}/{epoch}/{sample_id}")


@dataclass(frozen=True)
class Caption:
    """One tokenized caption, how many PADs stand in front of it, and whether the table for short captions reads it."""

    ids: list[int]
    n_pre: int = 0
    is_short: bool = False


@dataclass(frozen=True)
class Batch:
    """The samples of one step on one process.

    Attributes:
        sample_ids: of each sample, or of the one that stands in for it.
        images: [batch, 3, height, width] pixels; [batch, embed_dim] image features where `cached_features` is set.
        tokens: the method's captions, one kind after the other: `len(tokens)` is a multiple of the batch, and all rows
            share one prefix.
        bad: the bad records that were replaced.
        views: what the method's `views` drew, stacked: each [batch, ...]. Integers, such as ids, stay on the CPU, where
            a step can read them without a wait for the device.
        cached_features: whether `images` holds features of a frozen image tower instead of pixels.
    """

    sample_ids: list[str]
    images: Tensor
    tokens: TokenBatch
    bad: list
    views: dict[str, Tensor] = field(default_factory=dict)
    cached_features: bool = False

    def __len__(self) -> int:
        return len(self.sample_ids)

    def to(self, device: torch.device) -> "Batch":
        views = {
            name: view if view.dtype == torch.long else view.to(device, non_blocking=True)
            for name, view in self.views.items()
        }
        images = self.images.to(device, non_blocking=True)
        return replace(self, images=images, tokens=self.tokens.to(device), views=views)

    def pin_memory(self) -> "Batch":
        views = {name: view.pin_memory() for name, view in self.views.items()}
        return replace(self, images=self.images.pin_memory(), tokens=self.tokens.pin_memory(), views=views)

    def chunks(self, size: int) -> "list[Batch]":
        """The batch in chunks of `size` samples; the last may be smaller. `bad` stays with the whole batch."""
        if size >= len(self):
            return [self]
        kinds = len(self.tokens) // len(self)
        rows = [slice(start, min(start + size, len(self))) for start in range(0, len(self), size)]
        return [
            replace(
                self,
                sample_ids=self.sample_ids[part],
                images=self.images[part],
                tokens=self.tokens.select(
                    [kind * len(self) + row for kind in range(kinds) for row in range(part.start, part.stop)]
                ),
                bad=[],
                views={name: view[part] for name, view in self.views.items()},
            )
            for part in rows
        ]
