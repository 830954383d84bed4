"""A genetic algorithm over sets of heads (AAT, section 4.2 and "implementation details").

Every draw is a function of the seed, the generation and the individual, so that a search that was stopped ends as one
that was not.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CROSSOVER, MUTATION, FLIP, TOURNAMENT = 0.9, 0.5, 0.05, 3
PATIENCE, GAIN = 15, 1e-4  # generations without a gain of the best fitness
DIVERSITY = 0.02  # mean Hamming distance, as a share of the heads


@dataclass(frozen=True)
class Generation:
    """One generation.

    Attributes:
        number: from 0.
        masks: True for ablated heads, [individuals, heads of all blocks].
        fitness: [individuals]
    """

    number: int
    masks: Tensor
    fitness: Tensor

    @property
    def winner(self) -> Tensor:
        """[heads of all blocks] the fittest individual."""
        return self.masks[self.fitness.argmax()]

    @property
    def diversity(self) -> float:
        """The mean Hamming distance of two individuals, as a share of the heads."""
        ones, count = self.masks.double().mean(dim=0), len(self.masks)
        return (2 * ones * (1 - ones)).mean().item() * count / max(1, count - 1)


def first_masks(individuals: int, heads: int, seed: int) -> Tensor:
    """The first generation: each individual ablates a share of its own of the heads, drawn from 0 to 1."""
    rows = []
    for number in range(individuals):
        rng = random.Random(f"{seed}/first/{number}")
        share = rng.random()
        rows.append([rng.random() < share for _ in range(heads)])
    return torch.tensor(rows)


def next_masks(generation: Generation, seed: int) -> Tensor:
    """The individuals that follow: tournaments, two-point crossover of neighbours, flipped bits. No elitism."""
    parents = [_tournament(generation, _rng(seed, generation, "select", n)) for n in range(len(generation.masks))]
    children = [generation.masks[parent].clone() for parent in parents]
    for first in range(0, len(children) - 1, 2):
        _cross(children[first], children[first + 1], _rng(seed, generation, "cross", first))
    for number, child in enumerate(children):
        _mutate(child, _rng(seed, generation, "mutate", number))
    return torch.stack(children)


def _rng(seed: int, generation: Generation, step: str, number: int) -> random.Random:
    return random.Random(f"{seed}/{generation.number}/{step}/{number}")


def _tournament(generation: Generation, rng: random.Random) -> int:
    """The fittest of a few drawn individuals."""
    candidates = [rng.randrange(len(generation.masks)) for _ in range(TOURNAMENT)]
    return max(candidates, key=lambda number: generation.fitness[number].item())


def _cross(one: Tensor, other: Tensor, rng: random.Random) -> None:
    """Exchanges what lies between two points, in place."""
    if rng.random() < CROSSOVER:
        start, end = sorted(rng.sample(range(len(one) + 1), 2))
        one[start:end], other[start:end] = other[start:end].clone(), one[start:end].clone()


def _mutate(child: Tensor, rng: random.Random) -> None:
    """Flips bits, in place."""
    if rng.random() < MUTATION:
        child ^= torch.tensor([rng.random() < FLIP for _ in range(len(child))])


def has_converged(history: list[Generation]) -> bool:
    """Whether the best fitness has stopped to rise, or the individuals have become alike."""
    best = [generation.fitness.max().item() for generation in history]
    stalled = len(best) > PATIENCE and max(best[-PATIENCE:]) <= max(best[:-PATIENCE]) + GAIN
    return stalled or history[-1].diversity < DIVERSITY


def population_size(heads: int, efficient: bool = False) -> int:
    """Individuals of a generation, by the heads of all blocks: for ViT-B, ViT-L and larger ones."""
    sizes = (48, 48, 64) if efficient else (48, 96, 128)
    return sizes[0 if heads <= 144 else 1 if heads <= 384 else 2]


def evolve(
    masks: Tensor,
    score: Callable[[Tensor, int], Tensor],
    generations: int,
    seed: int,
    history: Sequence[Generation] = (),
    on_generation: Callable[[Generation], None] = lambda generation: None,
) -> list[Generation]:
    """All generations up to convergence, at most `generations`.

    Args:
        masks: the first individuals, [individuals, heads of all blocks].
        score: (masks, number of the generation) -> fitness, [individuals].
        history: the generations of an earlier run, which this one continues.
        on_generation: called with each new generation.
    """
    history = list(history)
    while len(history) < generations and not (history and has_converged(history)):
        if history:
            masks = next_masks(history[-1], seed)
        history.append(Generation(len(history), masks, score(masks, len(history))))
        on_generation(history[-1])
    return history
