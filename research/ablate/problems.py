"""Searches for heads of a tower that lower recall: each alone, all of those, every set, and a genetic algorithm.

How good an ablation is: the margin by which texts prefer their image (AAT, equation 3).
"""

import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from debias_diffusion.clip.image_tower import ImageTower
from debias_diffusion.data.retrieval import TIE, recall_at_k
from debias_diffusion.errors import UserError
from debias_diffusion.jobs import Job
from debias_diffusion.text.tokens import TokenBatch

from .genetic import Generation, evolve, first_masks, population_size
from .population import Population

# Features of ablations: images, and by name of a set its texts, [ablations, pairs, dim]; of the other tower one.
Encoded = tuple[Tensor, dict[str, Tensor]]
KS = (1, 5, 10)
K1, K2 = 10, 10  # hard and random negatives of each text; the paper gives no numbers
MOST_ENUMERATED = 16  # heads
_PART = 256  # ablations whose features are held at once


class Margin:
    """Fitness on pairs of a text and an image each.

    Args:
        texts, images: the untouched model's features, [pairs, dim] each.
        k1: hard negatives of each text, the images that the untouched model likes best among the wrong ones.
        k2: random wrong images beside them, drawn anew for each generation.
        seed: of these draws.

    Raises:
        UserError: there are not more than k1 + k2 wrong images for each text.
    """

    def __init__(self, texts: Tensor, images: Tensor, k1: int = K1, k2: int = K2, seed: int = 0):
        if len(texts) < k1 + k2 + 1:
            raise UserError(
                f"{len(texts)} pairs are too few: {k1} hard and {k2} random wrong images for each text need at least "
                f"{k1 + k2 + 1}. Give more."
            )
        wrong = _similarity(images, texts).fill_diagonal_(-torch.inf)
        self.hard, self.k2, self.seed = wrong.topk(k1, dim=1).indices, k2, seed

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
        for pair in zip(*torch.broadcast_tensors(images, texts), strict=True):
            similarity = _similarity(*pair)
            positive = similarity.diagonal().clone()
            wrong = similarity.fill_diagonal_(-torch.inf) if negatives is None else similarity.gather(1, negatives)
            margins.append((positive - wrong.amax(dim=1)).mean())
        return torch.stack(margins)


def _similarity(images: Tensor, texts: Tensor) -> Tensor:
    """[texts, images] cosines."""
    return F.normalize(texts, dim=-1) @ F.normalize(images, dim=-1).T


class Problem:
    """Pairs of an image and a text on which ablations of one tower are judged.

    Args:
        population: of the tower.
        images: of an image tower the blocks' input of each image, [pairs, tokens, width]; else features, [pairs, dim].
        texts: by name of a set of texts, such as the captions with sentences removed: of a text tower the texts in
            batches; else features, [pairs, dim].
        batch: images whose states are held at once.
        k1, k2, seed: of the fitness, see `Margin`.

    Attributes:
        shape: (blocks, heads of a block) of the tower.
        untouched: `encode` of the ablation of no head.
        margins: by name of a set, the fitness on it.

    Raises:
        UserError: there are too few pairs, or features are not finite.
    """

    def __init__(
        self,
        population: Population,
        images: Tensor,
        texts: Mapping[str, Tensor | Sequence[TokenBatch]],
        batch: int = 64,
        k1: int = K1,
        k2: int = K2,
        seed: int = 0,
    ):
        self.population, self.images, self.texts, self.batch = population, images, texts, batch
        self.shape = blocks, heads = len(population.blocks), population.heads
        self.untouched = images, sets = self.encode(torch.zeros(1, blocks * heads, dtype=torch.bool))
        for name, features in ({"images": images} | sets).items():
            _check_finite(features, name if name == "images" else f"texts ({name})")
        self.margins = {name: Margin(features[0], images[0], k1, k2, seed) for name, features in sets.items()}

    def encode(self, masks: Tensor, progress: bool = False) -> Encoded:
        """Features of ablations, [ablations, heads of all blocks].

        Args:
            progress: whether to show a bar.
        """
        masks = masks.view(len(masks), *self.shape)

        def features(name: str, batches: Sequence) -> Tensor:
            shown = tqdm(batches, desc=f"ablations, {name}", disable=not progress)
            return self.population.features(shown, masks)

        if isinstance(self.population.tower, ImageTower):
            images = features("images", self.images.split(self.batch))
            return images, {name: texts[None] for name, texts in self.texts.items()}
        return self.images[None], {name: features(name, texts) for name, texts in self.texts.items()}

    def fitness(self, encoded: Encoded, generation: int | None) -> Tensor:
        """The mean over the sets of texts of `Margin`, [ablations]. Raises UserError if one is not finite."""
        images, texts = encoded
        fitness = sum(margin(images, texts[name], generation) for name, margin in self.margins.items()) / len(texts)
        _check_finite(fitness, "an ablation")
        return fitness


def recalls(encoded: Encoded) -> list[dict[str, float]]:
    """Of the first set, of each ablation, in percent: R@1, 5 and 10 in both directions, and the means "mean_r" of both
    and "mean_r_text_to_image"."""
    images, sets = encoded
    rows = []
    for pair in zip(*torch.broadcast_tensors(images, next(iter(sets.values()))), strict=True):
        # On the CPU, because not every device has the double precision of ranks.
        features = (F.normalize(part, dim=-1).cpu() for part in pair)
        by_direction = recall_at_k(*features, [k for k in KS if k <= images.shape[1]])
        flat = {f"{direction}_{k}": value for direction, by_k in by_direction.items() for k, value in by_k.items()}
        t2i = by_direction["text_to_image"].values()
        rows.append(flat | {"mean_r": sum(flat.values()) / len(flat), "mean_r_text_to_image": sum(t2i) / len(t2i)})
    return rows


def _check_finite(values: Tensor, label: str) -> None:
    if not values.isfinite().all():
        raise UserError(f"The features of {label} are not finite. Check the model's weights, and run it in float32.")


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


def probe(problem: Problem) -> dict[str, dict[str, float]]:
    """The recalls of the untouched model, by "none", then those with each head ablated alone, by its name."""
    blocks, heads = problem.shape
    names = ["none", *(f"{block}-{head}" for block in range(blocks) for head in range(heads))]
    alone = problem.encode(torch.eye(blocks * heads, dtype=torch.bool), progress=True)
    return dict(zip(names, [*recalls(problem.untouched), *recalls(alone)], strict=True))


def better_alone(recalls: Iterable[dict[str, float]], score: str, best: bool = False) -> Tensor:
    """[heads of all blocks] the heads whose ablation alone raises a recall, if any.

    Args:
        recalls: the values of `probe`.
        score: "mean_r_text_to_image", as in the paper (Tables 1, 2, 12 and 17), or another of `recalls`.
        best: only the head that raises it most (Table 1).
    """
    mean_r = torch.tensor([row[score] for row in recalls], dtype=torch.float64)
    better, highest = mean_r[1:] > mean_r[0], mean_r[1:].argmax()
    return better & (torch.arange(len(better)) == highest) if best else better


def genetic_search(
    problem: Problem,
    generations: int = 100,
    efficient: bool = False,
    seed: int = 0,
    job: Job | None = None,
    individuals: int | None = None,
) -> tuple[Tensor, list[Generation]]:
    """The `fittest` of the generations' winners, and all generations.

    Args:
        efficient: fewer individuals; those that ablate more than 60% of the heads are not evaluated.
        job: notes each generation, from which a stopped search continues to the same bits.
        individuals: of a generation; None: `population_size`.
    """
    heads, most = math.prod(problem.shape), 0.6 if efficient else 1.0
    known: dict[bytes, Encoded] = {}  # of the last generation, whose features are not computed again

    def score(masks: Tensor, generation: int) -> Tensor:
        nonlocal known
        if job and (name := f"generation-{generation:04}") in job:
            return torch.tensor(job.notes(name)["fitness"], dtype=torch.float64)
        started = time.monotonic()
        by_key = {mask.numpy().tobytes(): mask for mask in masks if mask.double().mean() <= most}
        if new := {key: mask for key, mask in by_key.items() if key not in known}:
            images, texts = problem.encode(torch.stack(list(new.values())))
            parts = (part.expand(len(new), -1, -1).split(1) for part in (images, *texts.values()))
            for key, image, *sets in zip(new, *parts, strict=True):
                known[key] = image, dict(zip(texts, sets, strict=True))
        known = {key: known[key] for key in by_key}
        fitness = {key: problem.fitness(encoded, generation)[0].item() for key, encoded in known.items()}
        scores = [fitness.get(mask.numpy().tobytes(), -torch.inf) for mask in masks]
        if job:
            bits = ["".join("01"[ablated] for ablated in mask) for mask in masks.tolist()]
            job.note(name, masks=bits, fitness=scores, seconds=time.monotonic() - started)
        return torch.tensor(scores, dtype=torch.float64)

    first = first_masks(individuals or population_size(heads, efficient), heads, seed)
    bar = tqdm(evolve(first, score, generations, seed), "generations, at most", generations, unit=" generations")
    history = []
    for generation in bar:
        history.append(generation)
        bar.set_postfix(best=f"{generation.fitness.max():.4f}", alike=f"{1 - generation.diversity:.0%}")
    winners = torch.stack([generation.masks[generation.fitness.argmax()] for generation in history]).unique(dim=0)
    return fittest(problem, winners), history


def fittest(problem: Problem, masks: Tensor) -> Tensor:
    """[heads of all blocks] the best of these ablations by all wrong images; of no head where none raises the fitness.

    Less than a tie of similarities is no rise: of pairs that are all alike every ablation has a fitness of about 0.
    """
    parts = tqdm(masks.split(_PART), desc="sets of heads", unit=" parts", disable=len(masks) <= _PART)
    fitness = torch.cat([problem.fitness(problem.encode(part), None) for part in parts])
    return masks[fitness.argmax()] & bool(fitness.max() - problem.fitness(problem.untouched, None)[0] > TIE)
