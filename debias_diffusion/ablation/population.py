"""Features of many ablations of one tower at once: what they share is computed once.

Ablations that agree in their first blocks share these blocks' states: a population is a tree of distinct beginnings.
Queries, keys, values and attention are computed once for a parent, because the closed form gives a head's output with
and without suppression; what follows the attention, once for each child. Of the last block only CLS or EOT is computed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..clip.blocks import Attention, after_attention, before_attention, full_attention
from ..clip.image_tower import ImageTower
from ..clip.text_tower import TextTower
from ..text.tokens import TokenBatch
from .suppression import attend_with_share, suppress


@dataclass(frozen=True)
class _Stem:
    """What all ablations of some images or texts grow from.

    Attributes:
        states: the blocks' input, [..., tokens, width].
        count: images or texts.
        attend, attend_last: the attention of a block, and of the last one.
        pooled: of something of all tokens, that of the tokens that are pooled.
        project: the pooled tokens' states to features, [count, embed_dim].
        axis: of `states`, the one of the tokens; token 0 is CLS, or SOT.
    """

    states: Tensor
    count: int
    attend: Attention
    attend_last: Attention
    pooled: Callable[[Tensor], Tensor]
    project: Callable[[Tensor], Tensor]
    axis: int


class _Tree:
    """The features of ablations of one tower, all with the same beta, or of heads replaced by their means.

    Args:
        blocks: open_clip's blocks of the tower.
        beta: of the ablated heads, from 0 to 1.
        means: what ablated heads give instead of being suppressed, [blocks, heads, head_dim].

    Attributes:
        children: how many times a block's second half was computed for one image or text, so far.
    """

    def __init__(self, blocks: Sequence[nn.Module], beta: float, means: Tensor | None = None):
        self.blocks, self.beta, self.means = list(blocks), beta, means
        self.heads = self.blocks[0].attn.num_heads
        self.children = 0

    @torch.inference_mode()
    def _features(self, stems: Iterable[_Stem], masks: Tensor) -> Tensor:
        """[ablations, images or texts, embed_dim] of masks [ablations, blocks, heads]; equal ones computed once."""
        distinct, places = torch.unique(masks.flatten(1), dim=0, return_inverse=True)
        distinct = distinct.view(-1, *masks.shape[1:])
        parts = []
        for stem in stems:
            leaves: dict[int, Tensor] = {}
            for numbers, features in self._grow(stem, stem.states, distinct, torch.arange(len(distinct)), 0):
                leaves |= dict.fromkeys(numbers.tolist(), features)
            parts.append(torch.stack([leaves[number] for number in range(len(distinct))]))
        return torch.cat(parts, dim=1)[places]

    def _grow(
        self, stem: _Stem, states: Tensor, masks: Tensor, numbers: Tensor, depth: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(numbers of ablations, their features) below one node of the tree.

        Depth first, so that no more states are held than the path to a leaf has blocks.
        """
        block, is_last = self.blocks[depth], depth + 1 == len(self.blocks)
        query, key, value = before_attention(block, states)
        if is_last:
            query, states = stem.pooled(query), stem.pooled(states)
        attended, share = attend_with_share(query, key, value, stem.attend_last if is_last else stem.attend)
        if self.means is None:
            first = value.narrow(stem.axis, 0, 1)
            ablated = suppress(attended, share, first, attended.new_full((self.heads,), self.beta))
        else:
            ablated = self.means[depth].to(attended)
        here, child_of = torch.unique(masks[numbers, depth], dim=0, return_inverse=True)
        for child, mask in enumerate(here):
            chosen = torch.where(mask.to(attended.device)[:, None], ablated, attended)
            below = after_attention(block, states, chosen)
            self.children += stem.count
            members = numbers[child_of == child]
            if is_last:
                yield members, stem.project(below)
            else:
                yield from self._grow(stem, below, masks, members, depth + 1)


class Population(_Tree):
    """Ablations of an image tower.

    Args:
        tower: an image tower with a class token, in evaluation mode.
        beta, means: see `_Tree`.
        batch: images whose states are held at once.
    """

    def __init__(self, tower: ImageTower, beta: float, batch: int = 64, means: Tensor | None = None):
        super().__init__(tower.visual.transformer.resblocks, beta, means)
        self.tower, self.batch = tower, batch

    def features(self, embedded: Tensor, masks: Tensor, progress: bool = False) -> Tensor:
        """Features of every ablation and image, [ablations, images, embed_dim], not normalised.

        Args:
            embedded: the blocks' input, from `ImageTower.embed`, [images, tokens, width].
            masks: True for ablated heads, [ablations, blocks, heads]; equal ones are computed once.
            progress: whether to show a bar, over images.
        """
        parts = tqdm(embedded.split(self.batch), desc="ablations", disable=not progress)
        return self._features(map(self._stem, parts), masks)

    def _stem(self, states: Tensor) -> _Stem:
        attend = full_attention
        return _Stem(states, len(states), attend, attend, lambda part: part[:, :1], self.tower.project, axis=1)


class TextPopulation(_Tree):
    """Ablations of a causal text tower, on packed texts.

    Args:
        tower: in evaluation mode.
        beta, means: see `_Tree`.
    """

    def __init__(self, tower: TextTower, beta: float, means: Tensor | None = None):
        super().__init__(tower.tower.transformer.resblocks, beta, means)
        self.tower = tower

    def features(self, batches: Iterable[TokenBatch], masks: Tensor) -> Tensor:
        """Features of every ablation and text, [ablations, texts, embed_dim], not normalised.

        Args:
            batches: the texts.
            masks: True for ablated heads, [ablations, blocks, heads]; equal ones are computed once.
        """
        return self._features(map(self._stem, batches), masks)

    def _stem(self, tokens: TokenBatch) -> _Stem:
        packed = self.tower.pack(tokens)

        def pooled(part: Tensor) -> Tensor:
            return part if packed.rows is None else part.index_select(0, packed.rows)

        return _Stem(
            packed.hidden_states,
            len(tokens.lengths),
            packed.attend,
            packed.attend_last,
            pooled,
            packed.project,
            axis=0,
        )
