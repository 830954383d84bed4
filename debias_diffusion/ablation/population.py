"""Features of many ablations of one tower at once: what they share is computed once.

Ablations that agree in their first blocks share these blocks' states: a population is a tree of distinct beginnings.
Queries, keys, values and attention are computed once for a parent, because the closed form gives a head's output with
and without suppression; what follows the attention, once for each child. Of the last block only CLS or EOT is computed.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..clip.blocks import TowerInput, after_attention, before_attention
from ..clip.image_tower import ImageTower
from ..clip.text_tower import TextTower
from ..text.tokens import TokenBatch
from .suppression import attend_with_share, suppress


class Population:
    """Ablations of one tower, all with the same beta, or of heads replaced by their means.

    Args:
        tower: an image tower with a class token, or a causal text tower, in evaluation mode.
        beta: of the ablated heads, from 0 to 1.
        means: what ablated heads give instead of being suppressed, [blocks, heads, head_dim].

    Attributes:
        children: how many times a block's second half was computed for one batch, so far.
    """

    def __init__(self, tower: ImageTower | TextTower, beta: float, means: Tensor | None = None):
        self.tower, self.beta, self.means = tower, beta, means
        self.blocks = tower.transformer.resblocks
        self.heads = self.blocks[0].attn.num_heads
        self.children = 0

    @torch.inference_mode()
    def features(self, batches: Iterable[Tensor | TokenBatch], masks: Tensor) -> Tensor:
        """Features of every ablation and image or text, [ablations, images or texts, embed_dim], not normalised.

        Args:
            batches: of images, the blocks' input, from `ImageTower.embed`, [images, tokens, width]; or of texts.
            masks: True for ablated heads, [ablations, blocks, heads]; equal ones are computed once.
        """
        distinct, places = torch.unique(masks.flatten(1), dim=0, return_inverse=True)
        distinct = distinct.view(-1, *masks.shape[1:])
        parts = []
        for batch in batches:
            packed = self.tower.pack(batch)
            leaves = self._grow(packed, packed.hidden_states, distinct, torch.arange(len(distinct)))
            parts.append(torch.stack([leaves[number] for number in range(len(distinct))]))
        return torch.cat(parts, dim=1)[places]

    def _grow(
        self, packed: TowerInput, states: Tensor, masks: Tensor, numbers: Tensor, depth: int = 0
    ) -> dict[int, Tensor]:
        """The features of the ablations below one node of the tree, by their numbers.

        Depth first, so that no more states are held than the path to a leaf has blocks.
        """
        block, is_last = self.blocks[depth], depth + 1 == len(self.blocks)
        query, key, value = before_attention(block, states)
        if is_last:
            query, states = packed.pooled(query), packed.pooled(states)
        attended, share = attend_with_share(query, key, value, packed.attend_last if is_last else packed.attend)
        if self.means is None:
            beta = attended.new_full((self.heads,), self.beta)
            ablated = suppress(attended, share, value[..., :1, :, :], beta)
        else:
            ablated = self.means[depth].to(attended)
        leaves = {}
        here, child_of = torch.unique(masks[numbers, depth], dim=0, return_inverse=True)
        for child, mask in enumerate(here):
            chosen = torch.where(mask.to(attended.device)[:, None], ablated, attended)
            below = after_attention(block, states, chosen)
            self.children += 1
            members = numbers[child_of == child]
            if is_last:
                leaves |= dict.fromkeys(members.tolist(), packed.project(below))
            else:
                leaves |= self._grow(packed, below, masks, members, depth + 1)
        return leaves
