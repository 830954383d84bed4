"""Which samples each step sees: a pure function of the seed, so that a run can start at any step."""

from collections.abc import Iterator

import numpy as np

Key = tuple[int, int]  # (epoch, index of the record)


class GlobalBatches:
    """The samples of every step, the same however many processes share them.

    Each epoch is a permutation of all records. Batches are cut from the epochs laid end to end: the remainder of one
    opens the next one's first batch, in which no record occurs twice; what remains of the last is dropped.

    Args:
        records: how many there are.
        batch: samples a step over all processes, at most `records`.
        epochs: passes over the records.
        seed: of the permutations.
        max_steps: upper limit of steps.
    """

    def __init__(self, records: int, batch: int, epochs: int, seed: int, max_steps: int | None = None):
        self.records, self.batch, self.epochs, self.seed = records, batch, epochs, seed
        self.total_steps = min(records * epochs // batch, max_steps or records * epochs)

    @property
    def dropped(self) -> int:
        """Samples of the epochs that no step sees."""
        return self.records * self.epochs - self.total_steps * self.batch

    def __len__(self) -> int:
        return self.total_steps

    def iterate(self, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[list[Key]]:
        """This process's samples of each step from number `start` on; `world` must divide the batch."""
        local = self.batch // world
        step, rest = 0, np.empty((0, 2), dtype=np.int64)
        for epoch in range(self.epochs):
            order = self._order(epoch, carried=rest[:, 1])
            queue = np.concatenate([rest, np.stack([np.full_like(order, epoch), order], axis=1)])
            for at in range(0, len(queue) - self.batch + 1, self.batch):
                if step >= self.total_steps:
                    return
                if step >= start:
                    mine = queue[at + rank * local : at + (rank + 1) * local]
                    yield [(int(its_epoch), int(index)) for its_epoch, index in mine]
                step += 1
            rest = queue[len(queue) - len(queue) % self.batch :]

    def _order(self, epoch: int, carried: np.ndarray) -> np.ndarray:
        """The epoch's permutation; records carried over into its first batch do not occur again in that batch."""
        order = np.random.default_rng([self.seed, epoch]).permutation(self.records)
        if len(carried):
            repeated = np.isin(order, carried)
            head = self.batch - len(carried)
            wrong = np.flatnonzero(repeated[:head])
            right = head + np.flatnonzero(~repeated[head:])[: len(wrong)]
            order[wrong], order[right] = order[right], order[wrong]
        return order
