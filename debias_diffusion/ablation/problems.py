"""Searches for heads of a tower that lower recall: each alone, all of those, every set, and a genetic algorithm.

How good an ablation is: the margin by which texts prefer their image (AAT, equation 3).
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ..data.retrieval import TIE, recall_at_k
from ..errors import UserError
from ..text.tokens import TokenBatch
from .genetic import Generation, evolve, first_masks, population_size
from .population import Population, TextPopulation
from .suppression import Suppressed

KS = (1, 5, 10)
K1, K2 = 10, 10  # hard and random negatives of each text; the paper gives no numbers
MOST_ENUMERATED = 16  # heads
_PART = 256  # ablations whose features are held at once


@dataclass(frozen=True)
class Margin:
    """Fitness on pairs of a text and an image each.

    Attributes:
        hard: for each text, the images that the untouched model likes best among the wrong ones, [pairs, k1].
        k2: random wrong images beside them, drawn anew for each generation.
        seed: of these draws.
    """

    hard: Tensor
    k2: int = K2
    seed: int = 0

    @classmethod
    def of(cls, texts: Tensor, images: Tensor, k1: int = K1, k2: int = K2, seed: int = 0) -> "Margin":
        """From the untouched model's features of both, [pairs, dim] each.

        Raises:
            UserError: there are not more than k1 + k2 wrong images for each text.
        """
        check_count(len(texts), k1, k2)
        wrong = _similarity(images, texts).fill_diagonal_(-torch.inf)
        return cls(wrong.topk(k1, dim=1).indices, k2, seed)

    def negatives(self, generation: int) -> Tensor:
        """[pairs, k1 + k2] wrong images of each text, none twice."""
        rows = []
        for text, hard in enumerate(self.hard.tolist()):
            rng = random.Random(f"{self.seed}/{generation}/{text}")
            taken, further = {text, *hard}, []
            while len(further) < self.k2:
                image = rng.randrange(len(self.hard))
                if image not in taken:
                    taken.add(image)
                    further.append(image)
            rows.append(hard + further)
        return torch.tensor(rows, device=self.hard.device)

    def __call__(self, images: Tensor, texts: Tensor, generation: int | None) -> Tensor:
        """The mean margin of each ablation, [ablations].

        Args:
            images, texts: features, [ablations, pairs, dim], one of them with a single ablation where the other tower
                is ablated.
            generation: whose random negatives are taken; None takes every wrong image.
        """
        negatives = None if generation is None else self.negatives(generation)
        margins = []
        for number in range(max(len(images), len(texts))):
            similarity = _similarity(images[number % len(images)], texts[number % len(texts)])
            positive = similarity.diagonal().clone()
            wrong = similarity.fill_diagonal_(-torch.inf) if negatives is None else similarity.gather(1, negatives)
            margins.append((positive - wrong.amax(dim=1)).mean())
        return torch.stack(margins)


def check_count(pairs: int, k1: int = K1, k2: int = K2) -> None:
    """Raises UserError unless there are more than k1 + k2 wrong images for each text."""
    if pairs < k1 + k2 + 1:
        raise UserError(
            f"{pairs} pairs are too few: {k1} hard and {k2} random wrong images for each text need at least "
            f"{k1 + k2 + 1}. Give more."
        )


def _similarity(images: Tensor, texts: Tensor) -> Tensor:
    """[texts, images] cosines."""
    return F.normalize(texts, dim=-1) @ F.normalize(images, dim=-1).T


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
        self.margins = {name: Margin.of(features[0], images[0], k1, k2, seed) for name, features in texts.items()}

    def fitness(self, encoded: tuple[Tensor, dict[str, Tensor]], generation: int | None) -> Tensor:
        """The mean over the sets of texts of `Margin`, [ablations]. Raises UserError if one is not finite."""
        images, texts = encoded
        fitness = sum(margin(images, texts[name], generation) for name, margin in self.margins.items()) / len(texts)
        _check_finite(fitness, "an ablation")
        return fitness

    def recalls(self, encoded: tuple[Tensor, dict[str, Tensor]]) -> list[dict[str, float]]:
        """Of the first set: R@1, 5 and 10 in both directions and their mean, "mean_r", of each ablation, in percent."""
        images, sets = encoded
        texts, rows = next(iter(sets.values())), []
        for number in range(max(len(images), len(texts))):
            # On the CPU, because not every device has the double precision of ranks.
            pair = (F.normalize(part[number % len(part)], dim=-1).cpu() for part in (images, texts))
            recalls = recall_at_k(*pair, [k for k in KS if k <= images.shape[1]])
            flat = {f"{direction}_{k}": value for direction, by_k in recalls.items() for k, value in by_k.items()}
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
        return {name: features[None] for name, features in self.texts.items()}


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
    blocks, heads = problem.shape
    alone = problem.encode(torch.eye(blocks * heads, dtype=torch.bool), progress=True)
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
    """The `fittest` of the generations' winners, and all generations.

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
    return fittest(problem, winners), history


def fittest(problem: Problem, masks: Tensor) -> Tensor:
    """[heads of all blocks] the best of these ablations by all wrong images; of no head where none raises the fitness.

    Less than a tie of similarities is no rise: of pairs that are all alike every ablation has a fitness of about 0.
    """
    parts = tqdm(masks.split(_PART), desc="sets of heads", unit=" parts", disable=len(masks) <= _PART)
    fitness = torch.cat([problem.fitness(problem.encode(part), None) for part in parts])
    return masks[fitness.argmax()] & bool(fitness.max() - problem.fitness(problem.untouched, None)[0] > TIE)


class _Scored:
    """The fitness of masks; features of the last generation's are not computed again."""

    def __init__(self, problem: Problem, most: float):
        self.problem, self.most = problem, most
        self.known: dict[bytes, tuple[Tensor, dict[str, Tensor]]] = {}

    def __call__(self, masks: Tensor, generation: int) -> Tensor:
        allowed = masks.double().mean(dim=1) <= self.most
        by_key = {mask.numpy().tobytes(): mask for mask in masks[allowed]}
        if new := [key for key in by_key if key not in self.known]:
            images, texts = self.problem.encode(torch.stack([by_key[key] for key in new]))
            for number, key in enumerate(new):
                one = slice(number, number + 1)
                self.known[key] = _part(images, one), {name: _part(part, one) for name, part in texts.items()}
        self.known = {key: self.known[key] for key in by_key}
        fitness = {key: self.problem.fitness(encoded, generation)[0].item() for key, encoded in self.known.items()}
        scores = [fitness.get(mask.numpy().tobytes(), -torch.inf) for mask in masks]
        return torch.tensor(scores, dtype=torch.float64)


def _part(features: Tensor, part: slice) -> Tensor:
    """Of some ablations; features of the other tower are the same for all."""
    return features if len(features) == 1 else features[part]
