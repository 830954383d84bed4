"""Training on a long and a short caption of each image, as in DeBias-CLIP; Long-CLIP's recipe is in `fix_clip`.

debias-clip           drop the summary, draw a random subset of the rest, pad in front (Algorithm 1); w = 0.1
debias-clip-sdxl      as debias-clip, and words keep the hidden states that SDXL's UNet reads (see `keep_states`)
smart-clip-sampling   one caption, cut after a random number of sentences, and one loss: SmartCLIP's sampling (section
                      C.5) without its mask network, which research/ has
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from ..clip.backbone import Backbone
from ..data.batch import Batch, Caption, draw_generator
from ..errors import UserError
from ..method_settings import DualCaptionSettings
from ..text.sentences import split_sentences
from ..text.tokens import CaptionTokenizer, TokenBatch
from .base import Method, Term, image_features
from .keep_states import KeepStates
from .objectives import DualCaptionLoss, check_components
from .sampling import GIVEN, find_sampler, join_sentences, numbered


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


def fixed_padding(count: int) -> Padding:
    """min(`count`, n_post) pads ("Pad 20" and "Pad 40" in Table S5)."""
    return Padding(lambda n_post, rng: min(count, n_post))


PADDINGS: dict[str, Padding] = {
    "random": Padding(random_padding),
    "none": fixed_padding(0),
    "pad-20": fixed_padding(20),
    "pad-40": fixed_padding(40),
    "pre-sot": Padding(random_padding, before_sot=True),
}


def find_padding(name: str) -> Padding:
    """The padding of that name in PADDINGS; "pad-N" for any N from 0. Raises UserError with the near matches."""
    return PADDINGS.get(name) or numbered(name, "padding", PADDINGS, "pad", fixed_padding, least=0)


@dataclass(frozen=True)
class DualCaption(DualCaptionSettings, Method):
    """A long caption against the image, and a short one against the image's principal components.

    A caption without weight is not encoded: a `short_weight` of 1 leaves only the short one, 0 only the long one.
    """

    def __post_init__(self):
        super().__post_init__()
        if not self.reads_short:
            find_sampler(self.sampling)
        find_padding(self.padding)

    @property
    def reads_short(self) -> bool:
        return self.sampling == GIVEN

    @property
    def has_long(self) -> bool:
        return self.short_weight < 1

    @property
    def has_short(self) -> bool:
        return self.short_weight > 0

    @property
    def text_names(self) -> list[str]:
        """The features of the captions, in their order in a batch."""
        return ["long_text"] * self.has_long + ["short_text"] * self.has_short

    def fit(self, batch: int, embed_dim: int) -> "DualCaption":
        most = min(batch // self.component_parts - 1, embed_dim)
        return self if self.components < most else replace(self, components=max(1, most // 2))

    def check(self, batch: int, embed_dim: int) -> None:
        if self.has_short and self.components:
            if batch % self.component_parts:
                raise UserError(f"batch is {batch}, but must be a multiple of component_parts, {self.component_parts}.")
            check_components(self.components, batch // self.component_parts, embed_dim)

    def prepare(self, backbone: Backbone) -> "DualCaption":
        backbone.pooling = self.pooling
        return self

    def captions(
        self, caption: str, tokenizer: CaptionTokenizer, seed: int, epoch: int, sample_id: str, short: str | None = None
    ) -> list[Caption]:
        """Algorithm 1, lines 1 to 12: the long caption, if it has weight, then the short one, if it has."""
        rng = draw_generator(seed, epoch, sample_id)
        if self.sampling != GIVEN:
            short = join_sentences(find_sampler(self.sampling)(split_sentences(caption), rng))
        texts: list[Any] = [caption] * self.has_long + [short] * self.has_short
        padding = find_padding(self.padding)
        *rows, last = tokenizer.text_ids(texts)
        n_pre = padding.draw(tokenizer.n_post(last), rng) if self.has_short else 0
        return [*map(Caption, rows), Caption(last, n_pre)]

    def collate(self, samples: Sequence[list[Caption]], tokenizer: CaptionTokenizer) -> TokenBatch:
        return super().collate(samples, tokenizer, find_padding(self.padding).before_sot)

    def encode(self, backbone: Backbone, batch: Batch, modules: Any = None) -> dict[str, Tensor]:
        """{"image", "long_text", "short_text"}, each [batch, embed_dim]; no text without weight."""
        image = image_features(backbone, batch)
        texts = backbone.encode_text(batch.tokens).unflatten(0, (-1, len(batch)))
        return {"image": image.to(texts.dtype), **dict(zip(self.text_names, texts, strict=True))}

    @cached_property
    def terms(self) -> list[Term]:
        weights = self.short_weight, self.components, self.label_smoothing, self.component_parts
        return [DualCaptionLoss(*weights), *([KeepStates(self.keep_states)] if self.keep_states else [])]

    def describe(self) -> str:
        padding = f", {self.padding} padding, w = {self.short_weight:g}" if self.has_short else ""
        components = f", {self.components} components" if self.has_short and self.components else ""
        components += f" of each of {self.component_parts} parts" if components and self.component_parts > 1 else ""
        short = "given short captions" if self.reads_short else f"{self.sampling} sentences"
        decay = ", weight decay on all parameters" if self.decay == "all" else ""
        captions = f"{short}{padding}{components}, {self.pooling} pooling{decay}"
        return "; ".join([captions, *filter(None, (term.describe() for term in self.terms))])


RECIPES = {
    "debias-clip": DualCaption(sampling="random", padding="random", short_weight=0.1),
    "debias-clip-sdxl": DualCaption(sampling="random", padding="random", short_weight=0.1, keep_states=3.0),
    "smart-clip-sampling": DualCaption(sampling="opening", padding="none", short_weight=1.0, components=0),
}
