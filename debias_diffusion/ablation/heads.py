"""Suppressed heads of a tower: named, applied to a model, noted in its configuration, or written into its weights.

Two ablations are ordinary weights, which every program runs. What a head always gives moves through the block's output
projection into its bias, and the head's columns of the projection become 0.

- Text heads suppressed with beta 0. Under a causal mask SOT sees itself alone, so its value in a head, which such a
  head gives, is the same for every text. An image head cannot be folded so: there the value of CLS depends on the
  image, in all blocks but the first.
- Heads of either tower replaced by their mean. This is not in the paper, which suppresses: it is what a head gives on
  average over texts or images, and over their tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from ..clip.backbone import Backbone
from ..clip.blocks import before_attention, block_forward, causal_attention
from ..errors import UserError, explain_failure
from ..limits import Tower
from .suppression import Suppressed

TOWERS: tuple[Tower, ...] = get_args(Tower)
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
            if not 0 <= beta <= 1:
                raise UserError(f"beta of head {name} is {beta}, but must be from 0 to 1.")

    @classmethod
    def of_rows(cls, tower: Tower, beta: Iterable[Iterable[float]], means: Tensor | None = None) -> "Ablation":
        """From rows of any kind, such as JSON's. Raises TypeError or ValueError where they hold no numbers."""
        return cls(tower, tuple(tuple(map(float, row)) for row in beta), means)

    @property
    def by_name(self) -> dict[str, float]:
        """beta of every head, by names such as "3-7"."""
        return {f"{block}-{head}": beta for block, row in enumerate(self.beta) for head, beta in enumerate(row)}

    @property
    def names(self) -> list[str]:
        """The suppressed heads."""
        return self.names_below(1)

    @property
    def soft_names(self) -> list[str]:
        """The heads suppressed with a beta above 0, which no weights can express."""
        return [name for name, beta in self.by_name.items() if 0 < beta < 1]

    def names_below(self, limit: float) -> list[str]:
        """The heads with a smaller beta."""
        return [name for name, beta in self.by_name.items() if beta < limit]

    def description(self) -> dict:
        """JSON values that identify the attention."""
        return {"kind": KIND if self.means is None else MEAN, "beta": [list(row) for row in self.beta]}

    def apply(self, backbone: Backbone) -> None:
        """Gives the tower this attention, noted in the model's configuration; means go into the weights instead."""
        blocks, heads = tower_shape(backbone, self.tower)
        rows = [len(row) for row in self.beta]
        if rows != [heads] * blocks:
            raise UserError(
                f"beta has rows of {sorted(set(rows))} heads for {len(rows)} blocks, but the tower has {blocks} blocks "
                f"of {heads} heads."
            )
        if not self.names:
            raise UserError("No head is ablated: beta is 1 everywhere.")
        if self.means is not None:
            self._fold(backbone)
            return
        betas = {block: torch.tensor(row) for block, row in enumerate(self.beta) if min(row) < 1}
        changes = {block: partial(Suppressed, beta) for block, beta in betas.items()}
        backbone.replace_attention(self.tower, changes, self.description())

    @torch.no_grad()
    def _fold(self, backbone: Backbone) -> None:
        """Lets the heads with a beta below 1 always give their means, by their blocks' weights."""
        blocks = backbone.tower(self.tower).transformer.resblocks
        for block, row, means in zip(blocks, self.beta, self.means, strict=True):
            projection = block.attn.out_proj
            for head, (beta, mean) in enumerate(zip(row, means, strict=True)):
                if beta < 1:
                    columns = slice(head * len(mean), (head + 1) * len(mean))
                    projection.bias += projection.weight[:, columns] @ mean.to(projection.weight)
                    projection.weight[:, columns] = 0


def tower_shape(backbone: Backbone, tower: Tower) -> tuple[int, int]:
    """(blocks, heads of a block) of a tower; UserError for one whose attention cannot be moved to its first token."""
    if tower == "text" and not backbone.family.causal:
        raise UserError(
            f"The text tower of a {backbone.family.name} has no causal mask, so attention cannot be moved to its SOT. "
            "Ablate its image tower, or give a CLIP, such as ViT-B-16."
        )
    if tower == "image" and (pooling := backbone.image.visual.pool_type) != "tok":
        raise UserError(f"The image tower pools by {pooling!r}, not at a class token. Give another CLIP.")
    blocks = backbone.tower(tower).transformer.resblocks
    return len(blocks), blocks[0].attn.num_heads


def suppressed_heads(backbone: Backbone, tower: Tower) -> Ablation | None:
    """The suppressed heads of a tower that a model's configuration notes; None for none, and for other attention."""
    description = backbone.image_attention if tower == "image" else backbone.text_attention
    if not description or description.get("kind") != KIND:
        return None
    with explain_failure("The suppressed heads in the model's configuration cannot be read", "Export it again."):
        return Ablation.of_rows(tower, description["beta"])


@torch.no_grad()
def fold_text_heads(backbone: Backbone) -> None:
    """Writes the suppressed text heads that a model's configuration notes, if any, into its weights; removes the note.

    The features stay the same. Raises UserError where a head is suppressed with a beta above 0.
    """
    ablation = suppressed_heads(backbone, "text")
    if ablation is None:
        return
    if soft := ablation.soft_names:
        raise UserError(
            f"Head {soft[0]} of the text tower is suppressed with a beta above 0, which cannot be written into "
            "weights. Search with --beta 0, or export it as open_clip."
        )
    tower, values = backbone.text.tower, []
    sot = tower.token_embedding.weight[backbone.tokenizer.tokenizer.bos_token_id]
    states = (sot + tower.positional_embedding[0])[None, None]
    for block in tower.transformer.resblocks:
        values.append(before_attention(block, states)[2][0, 0])  # [heads, head_dim]
        states = block_forward(block, states, causal_attention)
    backbone.replace_attention("text", {}, None)
    replace(ablation, means=torch.stack(values)).apply(backbone)
