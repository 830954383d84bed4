"""Text heads suppressed with beta 0 as ordinary weights.

Under a causal mask SOT sees itself alone, so its value in a head is the same for every text: a head with beta 0 always
gives that value. What it adds to the residual stream moves into the bias of the block's output projection, and its
columns there become zero. Then every program that runs a CLIP text encoder runs the ablation.

Image heads cannot be folded so: there the value of CLS depends on the image, in all blocks but the first.
Heads replaced by their mean (see `means`) are ordinary weights in both towers.
"""

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..models.backbone import Backbone
from ..models.blocks import before_attention, block_forward, causal_attention
from .heads import Ablation, check_shape, noted, tower_shape
from .means import fold_constants


@torch.no_grad()
def fold_text(tower: nn.Module, sot: int, mask: Tensor) -> None:
    """Suppresses heads of a causal text tower with beta 0, in its weights.

    Args:
        tower: the module with the text tower's parts, as `TextTower` takes it.
        sot: id of the token that every text begins with.
        mask: True for ablated heads, [blocks, heads].
    """
    states = (tower.token_embedding.weight[sot] + tower.positional_embedding[0])[None, None]
    for block, ablated in zip(tower.transformer.resblocks, mask.tolist(), strict=True):
        value = before_attention(block, states)[2][0, 0]  # [heads, head_dim]
        states = block_forward(block, states, causal_attention)
        fold_constants(block, {head: value[head] for head, is_ablated in enumerate(ablated) if is_ablated})


def soft_heads(ablation: Ablation) -> list[str]:
    """The heads suppressed with a beta above 0, which no weights can express."""
    return [name for name, beta in ablation.by_name.items() if 0 < beta < 1]


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
    mask = torch.tensor(ablation.beta) == 0
    fold_text(backbone.text.tower, backbone.tokenizer.tokenizer.bos_token_id, mask)
    backbone.restore_text_attention()
