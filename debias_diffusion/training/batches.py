"""Which samples each step sees: a pure function of the seed, so that a run can start at any step."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from ..data.dataset import Key


class GlobalBatches:
    """The samples of every step, the same however many processes share them.

    Each epoch is a permutation of all records, of which the last few are its reserve: they stand in for those that turn
    out to be unreadable, and are trained on in other epochs. Batches are cut from the epochs laid end to end: the
    remainder of one opens the next one's first batch, in which no record occurs twice; what remains of the last is
    dropped.

    Args:
        records: how many there are.
        batch: samples a step over all processes, at most `records - spare`.
        epochs: passes over the records.
        seed: of the permutations.
        max_steps: upper limit of steps.
        spare: records of each epoch's reserve.
    """

    def __init__(self, records: int, batch: int, epochs: int, seed: int, max_steps: int | None = None, spare: int = 0):
        self.records, self.batch, self.epochs, self.seed, self.spare = records, batch, epochs, seed, spare
        self.an_epoch = records - spare
        self.total_steps = min(self.an_epoch * epochs // batch, max_steps or records * epochs)

    @property
    def dropped(self) -> int:
        """Samples of the epochs that no step sees."""
        return self.an_epoch * self.epochs - self.total_steps * self.batch

    @property
    def remainder(self) -> int:
        """Of these, the samples that were too few for another step."""
        return self.dropped if self.dropped < self.batch else 0

    def __len__(self) -> int:
        return self.total_steps

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
                    mine = queue[at + rank * local : at + (rank + 1) * local]
                    yield [tuple(key) for key in mine.tolist()]
                step += 1
            rest = queue[len(queue) - len(queue) % self.batch :]

    def reserve(self, epoch: int) -> np.ndarray:
        """The records, by index, that stand in for others in `epoch`."""
        return _permutation(self.records, self.seed, epoch)[self.an_epoch :]

    def _order(self, epoch: int, carried: np.ndarray) -> np.ndarray:
        """The epoch's records in order; those carried over into its first batch do not occur again in that batch."""
        order = _permutation(self.records, self.seed, epoch)[: self.an_epoch].copy()
        if len(carried):
            repeated = np.isin(order, carried)
            head = self.batch - len(carried)
            wrong = np.flatnonzero(repeated[:head])
            right = head + np.flatnonzero(~repeated[head:])[: len(wrong)]
            order[wrong], order[right] = order[right], order[wrong]
        return order


@lru_cache(maxsize=2)  # workers look the reserve up for every unreadable image
def _permutation(records: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(records)
