"""Heads replaced by their mean: they always give the same, so that ordinary weights hold the ablation of either tower.

This is not in the paper, which suppresses (see `suppression`). What a head gives on average over texts or images, and
over their tokens, goes through the output projection into its bias, and the head's columns of the projection become 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..models.backbone import Backbone
from ..models.blocks import Attention, full_attention
from ..models.image_tower import ImageTower
from ..tokens import TokenBatch


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


@torch.no_grad()
def fold_constants(block: nn.Module, constants: dict[int, Tensor]) -> None:
    """Lets heads of a block always give the same, in place.

    Args:
        block: open_clip's block.
        constants: by head, what it gives, [head_dim].
    """
    projection, heads = block.attn.out_proj, block.attn.num_heads
    width = projection.in_features // heads
    for head, constant in constants.items():
        columns = slice(head * width, (head + 1) * width)
        projection.bias += projection.weight[:, columns] @ constant.to(projection.weight)
        projection.weight[:, columns] = 0


def fold_means(blocks: Sequence[nn.Module], mask: Tensor, means: Tensor) -> None:
    """Replaces heads by their mean, in the weights.

    Args:
        blocks: open_clip's blocks of a tower.
        mask: True for the heads to replace, [blocks, heads].
        means: from `image_means` or `text_means`.
    """
    for block, replaced, mean in zip(blocks, mask.tolist(), means, strict=True):
        fold_constants(block, {head: mean[head] for head, is_replaced in enumerate(replaced) if is_replaced})
