"""A genetic algorithm over sets of heads (AAT, section 4.2 and "implementation details").

Every draw is a function of the seed, the generation and the individual, so that a search that was stopped ends as one
that was not.
"""

import random
from collections.abc import Callable, Iterator
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

    def rng(step: str, number: int) -> random.Random:
        return random.Random(f"{seed}/{generation.number}/{step}/{number}")

    children, fitness = [], generation.fitness.tolist()
    for number in range(len(fitness)):
        draw = rng("select", number)
        parent = max([draw.randrange(len(fitness)) for _ in range(TOURNAMENT)], key=fitness.__getitem__)
        children.append(generation.masks[parent].clone())
    for number in range(0, len(children) - 1, 2):
        draw, (one, other) = rng("cross", number), children[number : number + 2]
        if draw.random() < CROSSOVER:
            start, end = sorted(draw.sample(range(len(one) + 1), 2))
            one[start:end], other[start:end] = other[start:end].clone(), one[start:end].clone()
    for number, child in enumerate(children):
        draw = rng("mutate", number)
        if draw.random() < MUTATION:
            child ^= torch.tensor([draw.random() < FLIP for _ in child])
    return torch.stack(children)


def has_converged(history: list[Generation]) -> bool:
    """Whether the best fitness has stopped to rise, or the individuals have become alike."""
    best = [generation.fitness.max().item() for generation in history]
    stalled = len(best) > PATIENCE and max(best[-PATIENCE:]) <= max(best[:-PATIENCE]) + GAIN
    return stalled or history[-1].diversity < DIVERSITY


def population_size(heads: int, efficient: bool = False) -> int:
    """Individuals of a generation, by the heads of all blocks: for ViT-B, ViT-L and larger ones."""
    sizes = (48, 48, 64) if efficient else (48, 96, 128)
    return sizes[0 if heads <= 144 else 1 if heads <= 384 else 2]


def evolve(masks: Tensor, score: Callable[[Tensor, int], Tensor], generations: int, seed: int) -> Iterator[Generation]:
    """The generations up to convergence, at most `generations`.

    Args:
        masks: the first individuals, [individuals, heads of all blocks].
        score: (masks, number of the generation) -> fitness, [individuals].
    """
    history: list[Generation] = []
    while len(history) < generations and not (history and has_converged(history)):
        if history:
            masks = next_masks(history[-1], seed)
        history.append(Generation(len(history), masks, score(masks, len(history))))
        yield history[-1]
