"""The samples of each step: a pure function of the seed, so that a run can resume at any step."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from ..methods.base import Key


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

    def stand_ins(self, epoch: int) -> np.ndarray:
        """The indices of the records that replace unreadable ones in `epoch`, by their place in it.

        They are those half an epoch away, so that in data of more than two batches no batch has a record twice, but for
        the first of an epoch, in which the remainder of the one before may hold it already.
        """
        return _half_an_epoch_on(self.records, self.seed, epoch)

    def _order(self, epoch: int, carried: np.ndarray) -> np.ndarray:
        """The epoch's records in order; those carried over into its first batch do not occur twice in it."""
        order = _permutation(self.records, self.seed, epoch).copy()
        if len(carried):
            repeated = np.isin(order, carried)
            head = self.batch - len(carried)
            wrong = np.flatnonzero(repeated[:head])
            right = head + np.flatnonzero(~repeated[head:])[: len(wrong)]
            order[wrong], order[right] = order[right], order[wrong]
        return order


@lru_cache(maxsize=2)
def _permutation(records: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(records)


@lru_cache(maxsize=2)  # workers look it up for every unreadable image
def _half_an_epoch_on(records: int, seed: int, epoch: int) -> np.ndarray:
    return np.roll(_permutation(records, seed, epoch), -(records // 2))
