"""A recipe: which captions, which objective, which hyper-parameters. Each reads like its paper.

debias-clip           drop the summary, draw a random subset of the rest, pad in front (Algorithm 1); w = 0.1
long-clip             the summary as the short caption, no padding in front; both losses alike
smart-clip-sampling   one caption, cut after a random number of sentences, and one loss: SmartCLIP's sampling (section
                      C.5), not its mask network. Table S6: sampling `ordered` is "Start at 2", `details` "Only drop 1"
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import UserError, near_matches
from ..models.text_tower import POOLINGS
from ..sentences import split_sentences
from ..tokens import CaptionTokenizer, TokenBatch
from .objectives import Features, dual_caption_objective
from .sampling import draw_generator, find_sampler, join_sentences, numbered


@dataclass(frozen=True)
class Padding:
    """How many PADs stand before a short caption, and where (section C.4, Table S5).

    Attributes:
        draw: (n_post, generator) to n_pre, in [0, n_post].
        before_sot: whether the pads stand before SOT instead of after it.
    """

    draw: Callable[[int, random.Random], int]
    before_sot: bool = False


def random_padding(n_post: int, rng: random.Random) -> int:
    """n_pre ~ U{0, ..., n_post} (Algorithm 1, line 10; "Random" in Table S5)."""
    return rng.randint(0, n_post)


def no_padding(n_post: int, rng: random.Random) -> int:
    return 0


def fixed_padding(count: int) -> Padding:
    """min(`count`, n_post) pads ("Pad 20" and "Pad 40" in Table S5)."""
    return Padding(lambda n_post, rng: min(count, n_post))


PADDINGS: dict[str, Padding] = {
    "random": Padding(random_padding),
    "none": Padding(no_padding),
    "pad-20": fixed_padding(20),
    "pad-40": fixed_padding(40),
    "pre-sot": Padding(random_padding, before_sot=True),
}


def find_padding(name: str) -> Padding:
    """The padding of that name in PADDINGS; "pad-N" for any N from 0. Raises UserError with the near matches."""
    return numbered(name, "padding", PADDINGS, "pad", fixed_padding, least=0)


@dataclass(frozen=True)
class Caption:
    """One caption as ids, with the pads in front of it."""

    ids: list[int]
    n_pre: int = 0


@dataclass(frozen=True)
class Recipe:
    """How short captions are made and what the step minimises.

    Attributes:
        sampling: the sentences of the short caption, a name that `captions.find_sampler` knows.
        padding: how many PADs stand before it, a name that `find_padding` knows.
        short_weight: w of L = w * L_short + (1 - w) * L_long, in [0, 1]. A caption without weight is not encoded: 1
            leaves only the short one, 0 only the whole one.
        components: principal components of the images that the short captions are compared with; 0 compares them with
            the images as they are.
        label_smoothing: in [0, 1); 0.1 in Long-CLIP's code. Not used by the sigmoid loss.
        pooling: "eot", or "average" over all tokens that are not pads (section E.2).
    """

    sampling: str
    padding: str
    short_weight: float
    components: int = 32
    label_smoothing: float = 0.1
    pooling: str = "eot"

    def __post_init__(self):
        find_sampler(self.sampling)
        find_padding(self.padding)
        if not 0 <= self.short_weight <= 1:
            raise UserError(f"short_weight must be in [0, 1], got {self.short_weight}")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")
        if self.components < 0:
            raise UserError(f"components must be at least 1, or 0 for the images as they are, got {self.components}")
        if self.pooling not in POOLINGS:
            raise UserError(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")

    @property
    def has_long(self) -> bool:
        return self.short_weight < 1

    @property
    def has_short(self) -> bool:
        return self.short_weight > 0

    def captions(
        self, caption: str, tokenizer: CaptionTokenizer, seed: int, epoch: int, sample_id: str
    ) -> list[Caption]:
        """Algorithm 1, lines 1 to 12: the long caption, if it has weight, then the short one, if it has.

        A pure function of its arguments.
        """
        rng = draw_generator(seed, epoch, sample_id)
        short = join_sentences(find_sampler(self.sampling)(split_sentences(caption), rng))
        texts = [caption] * self.has_long + [short] * self.has_short
        captions = [Caption(ids) for ids in tokenizer.text_ids(texts)]
        if self.has_short:
            n_pre = find_padding(self.padding).draw(tokenizer.n_post(captions[-1].ids), rng)
            captions[-1] = Caption(captions[-1].ids, n_pre)
        return captions

    def batch(self, samples: list[list[Caption]], tokenizer: CaptionTokenizer) -> TokenBatch:
        """Every sample's `captions` as one batch: all long captions, then all short ones."""
        rows = [caption for kind in zip(*samples, strict=True) for caption in kind]
        before_sot = find_padding(self.padding).before_sot
        return tokenizer.batch([row.ids for row in rows], [row.n_pre for row in rows], before_sot)

    def features(self, stacked: torch.Tensor) -> Features:
        """[batch, 1 + captions, dim], each sample's image and then its `captions`, as what the objective takes."""
        image, *texts = stacked.unbind(1)
        return Features(image, texts[0] if self.has_long else None, texts[-1] if self.has_short else None)

    def losses(self, features: Features, scale: torch.Tensor, bias: torch.Tensor | None = None):
        """Algorithm 1, lines 14 to 16; see `objectives.dual_caption_objective`."""
        return dual_caption_objective(features, scale, bias, self.short_weight, self.components, self.label_smoothing)


RECIPES = {
    "debias-clip": Recipe(sampling="random", padding="random", short_weight=0.1),
    "long-clip": Recipe(sampling="summary", padding="none", short_weight=0.5),
    "smart-clip-sampling": Recipe(sampling="opening", padding="none", short_weight=1.0, components=0),
}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises UserError with the near matches."""
    if name not in RECIPES:
        raise UserError(f"Unknown recipe {name!r}.{near_matches(name, RECIPES)} Choose one of: {', '.join(RECIPES)}.")
    return RECIPES[name]
