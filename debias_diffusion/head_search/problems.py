"""Searches for heads of a tower that hurt: each alone, all of those, every set, and a genetic algorithm."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ..ablation.suppression import Suppressed
from ..errors import UserError
from ..retrieval import recall_at_k
from ..tokens import TokenBatch
from .fitness import K1, K2, Margin
from .genetic import Generation, evolve, first_masks, population_size
from .population import Population, TextPopulation

KS = (1, 5, 10)
MOST_ENUMERATED = 16  # heads


class Problem(ABC):
    """Pairs of an image and a text on which ablations of one tower are judged.

    Args:
        margins: by name of a set of texts, such as the captions with sentences removed, the fitness on it.

    Attributes:
        population: of the tower.
    """

    population: Population | TextPopulation
    margins: dict[str, Margin]

    @property
    def shape(self) -> tuple[int, int]:
        """(blocks, heads of a block) of the tower."""
        return len(self.population.blocks), self.population.heads

    @abstractmethod
    def encode(self, masks: Tensor, progress: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Features of ablations, [ablations, heads of all blocks].

        Args:
            progress: whether to show a bar.

        Returns:
            images, and by name of a set its texts: [ablations, pairs, dim], with one ablation for the other tower.
        """

    @cached_property  # the margins need it, a probe, and what is said of a result
    def untouched(self) -> tuple[Tensor, dict[str, Tensor]]:
        """`encode` of the ablation of no head."""
        blocks, heads = self.shape
        return self.encode(torch.zeros(1, blocks * heads, dtype=torch.bool))

    def make_margins(self, k1: int = K1, k2: int = K2, seed: int = 0) -> None:
        """Sets `margins` by the untouched model. Raises UserError for too few pairs, and for features not finite."""
        images, texts = self.untouched
        for name, features in ({"images": images} | texts).items():
            _check_finite(features, name if name == "images" else f"texts ({name})")
        self.margins = {name: Margin.of(of_set[0], images[0], k1, k2, seed) for name, of_set in texts.items()}

    def fitness(self, encoded: tuple[Tensor, dict[str, Tensor]], generation: int | None) -> Tensor:
        """The mean over the sets of texts of `Margin`, [ablations]. Raises UserError if one is not finite."""
        images, texts = encoded
        fitness = sum(margin(images, texts[name], generation) for name, margin in self.margins.items()) / len(texts)
        _check_finite(fitness, "an ablation")
        return fitness

    def recalls(self, encoded: tuple[Tensor, dict[str, Tensor]]) -> list[dict[str, float]]:
        """Of the first set: R@1, 5 and 10 in both directions and their mean, "mean_r", of each ablation, in percent."""
        images, of_sets = encoded
        texts, rows = next(iter(of_sets.values())), []
        for number in range(max(len(images), len(texts))):
            # On the CPU, because not every device has the double precision of ranks.
            pair = (F.normalize(part[number % len(part)], dim=-1).cpu() for part in (images, texts))
            recalls = recall_at_k(*pair, [k for k in KS if k <= images.shape[1]])
            flat = {f"{way}_{k}": value for way, of_way in recalls.items() for k, value in of_way.items()}
            rows.append(flat | {"mean_r": sum(flat.values()) / len(flat)})
        return rows


def _check_finite(values: Tensor, label: str) -> None:
    if not values.isfinite().all():
        raise UserError(f"The features of {label} are not finite. Check the model's weights, and run it in float32.")


class ImageProblem(Problem):
    """Ablations of an image tower.

    Args:
        population: of the tower.
        embedded: the blocks' input of each image, [pairs, tokens, width].
        texts: by name of the set, features [pairs, dim].
    """

    def __init__(self, population: Population, embedded: Tensor, texts: dict[str, Tensor]):
        self.population, self.embedded, self.texts = population, embedded, texts

    def encode(self, masks: Tensor, progress: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        images = self.population.features(self.embedded, masks.view(len(masks), *self.shape), progress)
        return images, self._texts()

    def encode_betas(self, beta: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """`encode` of one ablation with a beta for each head, [blocks, heads]."""
        parts = torch.arange(len(self.embedded), device=self.embedded.device).split(self.population.batch)
        return torch.cat([self.features(part, beta) for part in parts])[None], self._texts()

    def features(self, images: Tensor, beta: Tensor) -> Tensor:
        """Features of the images of these numbers with a beta for each head, [blocks, heads]; differentiable."""
        tower, states = self.population.tower, self.embedded[images]
        for block in range(tower.depth):
            states = tower.run_block(block, states, Suppressed(beta[block]))
        return tower.project(states)

    def _texts(self) -> dict[str, Tensor]:
        return {name: of_set[None] for name, of_set in self.texts.items()}


class TextProblem(Problem):
    """Ablations of a text tower.

    Args:
        population: of the tower.
        images: features, [pairs, dim].
        texts: by name of the set, the texts in batches.
    """

    def __init__(self, population: TextPopulation, images: Tensor, texts: dict[str, Sequence[TokenBatch]]):
        self.population, self.images, self.texts = population, images, texts

    def encode(self, masks: Tensor, progress: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        masks, features = masks.view(len(masks), *self.shape), {}
        for name, batches in self.texts.items():
            shown = tqdm(batches, desc=f"ablations, {name}", disable=not progress)
            features[name] = self.population.features(shown, masks).float()
        return self.images[None], features


def single_heads(blocks: int, heads: int) -> Tensor:
    """One ablation for each head, [heads of all blocks, heads of all blocks]."""
    return torch.eye(blocks * heads, dtype=torch.bool)


def every_mask(blocks: int, heads: int) -> Tensor:
    """All sets of heads, [2 ** heads of all blocks, heads of all blocks].

    Raises:
        UserError: they are too many.
    """
    if blocks * heads > MOST_ENUMERATED:
        raise UserError(
            f"The tower has {blocks * heads} heads, too many to try every set of them; up to {MOST_ENUMERATED} can be. "
            "Search with ga or bp."
        )
    return torch.tensor(list(product([False, True], repeat=blocks * heads)))


def probe(problem: Problem) -> list[dict[str, float]]:
    """The recalls of the untouched model, then those with each head ablated alone."""
    alone = problem.encode(single_heads(*problem.shape), progress=True)
    return [*problem.recalls(problem.untouched), *problem.recalls(alone)]


def better_alone(recalls: Sequence[dict[str, float]]) -> Tensor:
    """[heads of all blocks] the heads whose ablation alone raises mean-R; `recalls` from `probe`."""
    untouched, *alone = (row["mean_r"] for row in recalls)
    return torch.tensor([mean_r > untouched for mean_r in alone])


def best_alone(recalls: Sequence[dict[str, float]]) -> Tensor:
    """[heads of all blocks] the head whose ablation alone raises mean-R most (Table 1); none if none raises it."""
    better = better_alone(recalls)
    best = torch.tensor([row["mean_r"] for row in recalls[1:]], dtype=torch.float64).argmax()
    return better & (torch.arange(len(better)) == best)


def genetic_search(
    problem: Problem,
    generations: int = 100,
    efficient: bool = False,
    seed: int = 0,
    history: Sequence[Generation] = (),
    on_generation: Callable[[Generation], None] = lambda generation: None,
) -> tuple[Tensor, list[Generation]]:
    """The best winner of a generation, judged with all wrong images, and all generations.

    Args:
        efficient: fewer individuals; those that ablate more than 60% of the heads are not evaluated.
        history, on_generation: of a search that was stopped, which continues to the same bits; see `evolve`.
    """
    blocks, heads = problem.shape
    scored = _Scored(problem, most=0.6 if efficient else 1.0)
    first = first_masks(population_size(blocks * heads, efficient), blocks * heads, seed)
    with tqdm(total=generations, initial=len(history), desc="generations, at most", unit=" generations") as bar:

        def show(generation: Generation) -> None:
            on_generation(generation)
            bar.update()
            bar.set_postfix(best=f"{generation.fitness.max():.4f}", alike=f"{1 - generation.diversity:.0%}")

        history = evolve(first, scored, generations, seed, history, show)
    winners = torch.unique(torch.stack([generation.winner for generation in history]), dim=0)
    return winners[problem.fitness(problem.encode(winners), None).argmax()], history


class _Scored:
    """The fitness of masks; features of the last generation's are not computed again."""

    def __init__(self, problem: Problem, most: float):
        self.problem, self.most = problem, most
        self.known: dict[bytes, tuple[Tensor, dict[str, Tensor]]] = {}

    def __call__(self, masks: Tensor, generation: int) -> Tensor:
        keys = [mask.numpy().tobytes() for mask in masks]
        allowed = masks.double().mean(dim=1) <= self.most
        new = {
            key: mask for key, mask, fits in zip(keys, masks, allowed, strict=True) if fits and key not in self.known
        }
        if new:
            images, texts = self.problem.encode(torch.stack(list(new.values())))
            for number, key in enumerate(new):
                one = slice(number, number + 1)
                self.known[key] = _part(images, one), {name: _part(of_set, one) for name, of_set in texts.items()}
        self.known = {key: self.known[key] for key in keys if key in self.known}
        fitness = torch.full((len(masks),), -torch.inf, dtype=torch.float64)
        for number, key in enumerate(keys):
            if key in self.known:
                fitness[number] = self.problem.fitness(self.known[key], generation)[0].item()
        return fitness


def _part(features: Tensor, part: slice) -> Tensor:
    """Of some ablations; features of the other tower are the same for all."""
    return features if len(features) == 1 else features[part]
