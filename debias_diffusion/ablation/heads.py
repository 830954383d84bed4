"""Suppressed heads of a tower: named, applied to a model, noted in its configuration, or written into its weights.

Two ablations are ordinary weights, which every program runs. What a head always gives moves through the block's output
projection into its bias, and the head's columns of the projection become 0.

- Text heads suppressed with beta 0. Under a causal mask SOT sees itself alone, so its value in a head, which such a
  head gives, is the same for every text. An image head cannot be folded so: there the value of CLS depends on the
  image, in all blocks but the first.
- Heads of either tower replaced by their mean. This is not in the paper, which suppresses: it is what a head gives on
  average over texts or images, and over their tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn

from ..clip.backbone import Backbone
from ..clip.blocks import Attention, before_attention, block_forward, causal_attention, full_attention
from ..clip.image_tower import ImageTower
from ..errors import UserError, reason
from ..limits import Tower
from ..text.tokens import TokenBatch
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
            if not 0 <= beta <= 1:
                raise UserError(f"beta of head {name} is {beta}, but must be from 0 to 1.")

    @classmethod
    def of_rows(cls, tower: Tower, beta: Iterable[Iterable[float]], means: Tensor | None = None) -> "Ablation":
        """From rows of any kind, such as JSON's. Raises TypeError or ValueError where they hold no numbers."""
        return cls(tower, tuple(tuple(map(float, row)) for row in beta), means)

    @classmethod
    def of_mask(cls, tower: Tower, mask: Tensor, beta: float) -> "Ablation":
        """From the ablated heads, [blocks, heads], and the beta of all of them."""
        return cls.of_rows(tower, [[beta if ablated else 1.0 for ablated in row] for row in mask.tolist()])

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

    def apply(self, backbone: Backbone) -> None:
        """Gives the tower this attention, and notes it in the model's configuration; means go into the weights instead.

        Raises:
            UserError: the tower has other blocks or heads, no class token, or no causal mask.
        """
        check_shape(self.beta, *tower_shape(backbone, self.tower))
        betas = {block: torch.tensor(row) for block, row in enumerate(self.beta) if min(row) < 1}
        if not betas:
            raise UserError("No head is ablated: beta is 1 everywhere.")
        if self.means is not None:
            for block, row, means in zip(tower_blocks(backbone, self.tower), self.beta, self.means, strict=True):
                fold_constants(block, [beta < 1 for beta in row], means)
        elif self.tower == "image":
            attends = {block: Suppressed(beta) for block, beta in betas.items()}
            backbone.replace_image_attention(attends, self.description())
        else:
            changes = {block: partial(Suppressed, beta) for block, beta in betas.items()}
            backbone.replace_text_attention(changes, self.description())


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


# ---- what heads give on average


class _Mean:
    """The mean of what the heads of a block give."""

    def __init__(self):
        self.total, self.rows = torch.zeros(()), 0

    def around(self, attend: Attention, last: bool = False) -> Attention:
        """The same attention, with its results counted; `last`: CLS alone, [batch, tokens, heads, head_dim]."""

        def counted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            attended = attend(query, key, value)
            rows = (attended[:, :1] if last else attended).flatten(0, -3)
            self.total = self.total + rows.cpu().double().sum(dim=0)
            self.rows += len(rows)
            return attended

        return counted

    @property
    def value(self) -> Tensor:
        """[heads, head_dim]"""
        return (self.total / self.rows).float()


@torch.inference_mode()
def image_means(tower: ImageTower, embedded: Tensor, batch: int = 64) -> Tensor:
    """What each head gives on average over images and tokens, in the last block over CLS, [blocks, heads, head_dim].

    Args:
        embedded: the blocks' input, [images, tokens, width].
    """
    means = [_Mean() for _ in range(tower.depth)]
    for states in embedded.split(batch):
        for block, mean in enumerate(means):
            states = tower.run_block(block, states, mean.around(full_attention, last=block + 1 == tower.depth))
    return torch.stack([mean.value for mean in means])


@torch.inference_mode()
def text_means(backbone: Backbone, texts: Sequence[TokenBatch]) -> Tensor:
    """What each head gives on average over texts and tokens, in the last block over EOT, [blocks, heads, head_dim].

    What texts share, their SOT, counts once for each batch.

    Args:
        texts: in batches, on the model's device.
    """
    means = [_Mean() for _ in backbone.text.tower.transformer.resblocks]
    backbone.text.changes = {block: mean.around for block, mean in enumerate(means)}
    try:
        for batch in texts:
            backbone.encode_text(batch)
    finally:
        backbone.text.changes = {}
    return torch.stack([mean.value for mean in means])


# ---- into the weights


@torch.no_grad()
def fold_constants(block: nn.Module, ablated: Sequence[bool], constants: Tensor) -> None:
    """Lets heads of a block always give the same, in place.

    Args:
        block: open_clip's block.
        ablated: whether each head does.
        constants: what these give, [heads, head_dim].
    """
    projection = block.attn.out_proj
    width = projection.in_features // block.attn.num_heads
    for head, is_ablated in enumerate(ablated):
        if is_ablated:
            columns = slice(head * width, (head + 1) * width)
            projection.bias += projection.weight[:, columns] @ constants[head].to(projection.weight)
            projection.weight[:, columns] = 0


def soft_heads(ablation: Ablation) -> list[str]:
    """The heads suppressed with a beta above 0, which no weights can express."""
    return [name for name, beta in ablation.by_name.items() if 0 < beta < 1]


@torch.no_grad()
def fold_text_heads(backbone: Backbone) -> None:
    """Writes the suppressed text heads that a model's configuration notes into its weights, and removes the note.

    The features stay the same. A model that notes none is left alone.

    Raises:
        UserError: a head is suppressed with a beta above 0.
    """
    ablation = noted(backbone, "text")
    if ablation is None:
        return
    if soft := soft_heads(ablation):
        raise UserError(
            f"Head {soft[0]} of the text tower is suppressed with a beta above 0, which cannot be written into "
            "weights. Search with --beta 0, or export it as open_clip."
        )
    check_shape(ablation.beta, *tower_shape(backbone, "text"))
    tower, sot = backbone.text.tower, backbone.tokenizer.tokenizer.bos_token_id
    states = (tower.token_embedding.weight[sot] + tower.positional_embedding[0])[None, None]
    for block, row in zip(tower.transformer.resblocks, ablation.beta, strict=True):
        value = before_attention(block, states)[2][0, 0]  # [heads, head_dim]
        states = block_forward(block, states, causal_attention)
        fold_constants(block, [beta == 0 for beta in row], value)
    backbone.restore_text_attention()
