"""How good an ablation is: the margin by which texts prefer their image (AAT, equation 3)."""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError

K1, K2 = 10, 10  # hard and random negatives of each text; the paper gives no numbers


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
        drawn = []
        for text, hard in enumerate(self.hard.tolist()):
            rng = random.Random(f"{self.seed}/{generation}/{text}")
            taken, further = {text, *hard}, []
            while len(further) < self.k2:
                image = rng.randrange(len(self.hard))
                if image not in taken:
                    taken.add(image)
                    further.append(image)
            drawn.append(hard + further)
        return torch.tensor(drawn, device=self.hard.device)

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
