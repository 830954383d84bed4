"""Which heads of a tower are suppressed, and how much: named, applied to a model, and noted in its configuration."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn

from ..errors import UserError, reason
from ..limits import Tower
from ..models.backbone import Backbone
from .means import fold_means
from .suppression import Suppressed

TOWERS: tuple[Tower, ...] = get_args(Tower)
ABLATED = 0.5  # where each head has a beta of its own, those below it count as ablated
KIND = "suppression"  # of attention, in a model's configuration
MEAN = "mean"  # of what a search leaves, where heads are replaced by their mean


@dataclass(frozen=True)
class Ablation:
    """Suppressed heads of one tower, or heads replaced by their mean.

    Attributes:
        tower: "image" or "text".
        beta: of each head, from 0 to 1, by block: [blocks][heads]. 1 leaves a head as it is.
        means: None for suppression; else what heads with a beta below 1 give instead, [blocks, heads, head_dim].
    """

    tower: Tower
    beta: tuple[tuple[float, ...], ...]
    means: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        for name, beta in self.by_name.items():
            if not (0 <= beta <= 1 and math.isfinite(beta)):
                raise UserError(f"beta of head {name} is {beta}, but must be from 0 to 1.")

    @classmethod
    def of_rows(cls, tower: Tower, beta: Iterable[Iterable[float]]) -> "Ablation":
        """From rows of any kind, such as JSON's. Raises TypeError or ValueError where they hold no numbers."""
        return cls(tower, tuple(tuple(map(float, row)) for row in beta))

    @classmethod
    def of_mask(cls, tower: Tower, mask: Tensor, beta: float) -> "Ablation":
        """From the ablated heads, [blocks, heads], and the beta of all of them."""
        return cls(tower, tuple(tuple(beta if ablated else 1.0 for ablated in row) for row in mask.tolist()))

    @classmethod
    def of_names(cls, tower: Tower, names: Iterable[str], beta: float, blocks: int, heads: int) -> "Ablation":
        """From names such as "3-7", the seventh head of block 3, both from 0.

        Raises:
            UserError: a name is none, or there is no such head.
        """
        mask = torch.zeros(blocks, heads, dtype=torch.bool)
        for name in names:
            block, _, head = name.partition("-")
            if not (block.isdecimal() and head.isdecimal() and int(block) < blocks and int(head) < heads):
                raise UserError(
                    f"There is no head {name!r}. Give BLOCK-HEAD, from 0-0 to {blocks - 1}-{heads - 1}, such as 0-1."
                )
            mask[int(block), int(head)] = True
        return cls.of_mask(tower, mask, beta)

    @property
    def by_name(self) -> dict[str, float]:
        """beta of every head, by names such as "3-7"."""
        return {f"{block}-{head}": beta for block, row in enumerate(self.beta) for head, beta in enumerate(row)}

    @property
    def names(self) -> list[str]:
        """The suppressed heads."""
        return self.names_below(1)

    def names_below(self, limit: float) -> list[str]:
        """The heads with a smaller beta."""
        return [name for name, beta in self.by_name.items() if beta < limit]

    def description(self) -> dict:
        """JSON values that identify the attention."""
        return {"kind": KIND if self.means is None else MEAN, "beta": [list(row) for row in self.beta]}

    def with_means(self, means: Tensor) -> "Ablation":
        """The same heads replaced by their mean."""
        return replace(self, means=means)

    def apply(self, backbone: Backbone) -> None:
        """Gives the tower this attention, and notes it in the model's configuration; means go into the weights instead.

        Raises:
            UserError: the tower has other blocks or heads, no class token, or no causal mask.
        """
        attends = {
            block: Suppressed(torch.tensor(row)) for block, row in enumerate(self.beta) if any(b < 1 for b in row)
        }
        check_shape(self.beta, *tower_shape(backbone, self.tower))
        if not attends:
            raise UserError("No head is ablated: beta is 1 everywhere.")
        if self.means is not None:
            self._fold_means(tower_blocks(backbone, self.tower))
            return
        if self.tower == "image":
            backbone.replace_image_attention(attends, self.description())
        else:
            changes = {block: partial(Suppressed, attend.beta) for block, attend in attends.items()}
            backbone.replace_text_attention(changes, self.description())

    def _fold_means(self, blocks: Sequence[nn.Module]) -> None:
        attention = blocks[0].attn
        expected = (len(blocks), attention.num_heads, attention.embed_dim // attention.num_heads)
        if self.means.shape != expected or not self.means.isfinite().all():
            raise UserError(
                f"The means have the shape {tuple(self.means.shape)}, or are not finite; the tower's have {expected}. "
                "Search again."
            )
        fold_means(blocks, torch.tensor(self.beta) < 1, self.means)


def check_shape(beta: Iterable[Iterable[float]], blocks: int, heads: int) -> None:
    """Raises UserError unless there is a beta for each head."""
    rows = [len(row) for row in beta]
    if rows != [heads] * blocks:
        raise UserError(
            f"beta has rows of {sorted(set(rows))} heads for {len(rows)} blocks, but the tower has {blocks} blocks of "
            f"{heads} heads."
        )


def tower_shape(backbone: Backbone, tower: Tower) -> tuple[int, int]:
    """(blocks, heads of a block) of a tower.

    Raises:
        UserError: the image tower has no class token, or the text tower no causal mask.
    """
    if tower == "text" and backbone.family.sot and not backbone.family.causal:
        raise UserError(f"The text tower of a {backbone.family.name} has no causal mask. Ablate its image tower.")
    if not backbone.family.sot:
        raise UserError(
            f"A {backbone.family.name} has no class token and no SOT that attention could be moved to. Give a CLIP, "
            "such as ViT-B-16."
        )
    if tower == "image" and backbone.image.visual.pool_type != "tok":
        pooling = backbone.image.visual.pool_type
        raise UserError(f"The image tower pools by {pooling!r}, not at a class token. Give another CLIP.")
    blocks = tower_blocks(backbone, tower)
    return len(blocks), blocks[0].attn.num_heads


def tower_blocks(backbone: Backbone, tower: Tower) -> Sequence[nn.Module]:
    """open_clip's blocks of a tower, in order."""
    return (backbone.text.tower if tower == "text" else backbone.image.visual).transformer.resblocks


def noted(backbone: Backbone, tower: Tower) -> Ablation | None:
    """The suppressed heads of a tower that a model's configuration notes; None for none, and for other attention.

    Raises:
        UserError: the note cannot be read.
    """
    description = backbone.image_attention if tower == "image" else backbone.text_attention
    if not description or description.get("kind") != KIND:
        return None
    try:
        return Ablation.of_rows(tower, description["beta"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"The suppressed heads in the model's configuration cannot be read ({reason(error)}). Export it again."
        ) from error


def apply_saved(backbone: Backbone) -> None:
    """Applies the ablations that a model's configuration notes.

    Raises:
        UserError: they cannot be read, or are of another shape than its towers.
    """
    for tower in TOWERS:
        if ablation := noted(backbone, tower):
            ablation.apply(backbone)
