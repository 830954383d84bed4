"""A recipe: which captions, which objective, which hyper-parameters. Each reads like its paper.

debias-clip   drop the summary, draw a random subset of the rest, pad in front (Algorithm 1); w = 0.1
long-clip     the summary as the short caption, no padding in front; both losses alike
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .captions import SAMPLERS, draw_generator, join_sentences, split_sentences
from .errors import UserError, near_matches
from .objectives import Features, dual_caption_objective
from .tokens import CaptionTokenizer


def random_padding(n_post: int, rng: random.Random) -> int:
    """n_pre ~ U{0, ..., n_post} (Algorithm 1, line 10)."""
    return rng.randint(0, n_post)


def no_padding(n_post: int, rng: random.Random) -> int:
    return 0


PADDINGS: dict[str, Callable[[int, random.Random], int]] = {"random": random_padding, "none": no_padding}


@dataclass(frozen=True)
class CaptionPair:
    """One sample's captions as ids: the long one, and the short one with its pads in front."""

    long_ids: list[int]
    short_ids: list[int]
    n_pre: int


@dataclass(frozen=True)
class Recipe:
    """How short captions are made and what the step minimises.

    Attributes:
        sampling: the sentences of the short caption, a name in `captions.SAMPLERS`.
        padding: how many PADs stand before it, a name in `PADDINGS`.
        short_weight: w of L = w * L_short + (1 - w) * L_long, in [0, 1].
        components: principal components of the images that the short captions are compared with.
        label_smoothing: in [0, 1); 0.1 in Long-CLIP's code.
    """

    sampling: str
    padding: str
    short_weight: float
    components: int = 32
    label_smoothing: float = 0.1

    def __post_init__(self):
        if not 0 <= self.short_weight <= 1:
            raise UserError(f"short_weight must be in [0, 1], got {self.short_weight}")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")

    def captions(self, caption: str, tokenizer: CaptionTokenizer, seed: int, epoch: int, sample_id: str) -> CaptionPair:
        """Algorithm 1, lines 1 to 12: a pure function of its arguments."""
        rng = draw_generator(seed, epoch, sample_id)
        short = join_sentences(SAMPLERS[self.sampling](split_sentences(caption), rng))
        long_ids, short_ids = tokenizer.text_ids([caption, short])
        return CaptionPair(long_ids, short_ids, PADDINGS[self.padding](tokenizer.n_post(short_ids), rng))

    def losses(self, features: Features, scale: torch.Tensor):
        """Algorithm 1, lines 14 to 16; see `objectives.dual_caption_objective`."""
        return dual_caption_objective(features, scale, self.short_weight, self.components, self.label_smoothing)


RECIPES = {
    "debias-clip": Recipe(sampling="random", padding="random", short_weight=0.1),
    "long-clip": Recipe(sampling="summary", padding="none", short_weight=0.5),
}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises UserError with the near matches."""
    if name not in RECIPES:
        raise UserError(f"Unknown recipe {name!r}.{near_matches(name, RECIPES)} Choose one of: {', '.join(RECIPES)}.")
    return RECIPES[name]
