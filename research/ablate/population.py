"""Features of many ablations of one tower at once: what they share is computed once.

Ablations that agree in their first blocks share these blocks' states: a population is a tree of distinct beginnings.
Queries, keys, values and attention are computed once for a parent, because the closed form gives a head's output with
and without suppression; what follows the attention, once for each child. Of the last block only CLS or EOT is computed.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from debias_diffusion.ablation.suppression import attend_with_share, suppress
from debias_diffusion.clip.blocks import TowerInput, after_attention, before_attention
from debias_diffusion.clip.image_tower import ImageTower
from debias_diffusion.clip.text_tower import TextTower
from debias_diffusion.text.tokens import TokenBatch


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


@torch.inference_mode()
def head_means(tower: ImageTower | TextTower, batches: Iterable[Tensor | TokenBatch]) -> Tensor:
    """What each head gives on average over tokens, in the last block over the pooled ones, [blocks, heads, head_dim].

    What texts share, their SOT, counts once for each batch.

    Args:
        batches: of images as `ImageTower.embed` gives them, or of texts, on the model's device.
    """
    blocks = tower.transformer.resblocks
    totals, counts, last = [torch.zeros((), dtype=torch.double) for _ in blocks], [0] * len(blocks), len(blocks) - 1
    for batch in batches:
        packed = tower.pack(batch)
        states = packed.hidden_states
        for number, block in enumerate(blocks):
            query, key, value = before_attention(block, states)
            if number < last:
                attended = packed.attend(query, key, value)
            else:
                states = packed.pooled(states)
                if isinstance(tower, TextTower):  # whose attention differs for few queries
                    attended = packed.attend_last(packed.pooled(query), key, value)
                else:
                    attended = packed.pooled(packed.attend(query, key, value))
            rows = attended.flatten(0, -3)
            totals[number] = totals[number] + rows.cpu().double().sum(dim=0)
            counts[number] += len(rows)
            states = after_attention(block, states, attended)
    return torch.stack([(total / count).float() for total, count in zip(totals, counts, strict=True)])
