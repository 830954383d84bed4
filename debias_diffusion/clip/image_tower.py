"""The image tower of a CLIP block by block: states of CLS, and attention that can be replaced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from open_clip.transformer import ResidualAttentionBlock, Transformer, VisionTransformer
from torch import nn

from ..errors import UserError
from .blocks import (
    Attention,
    TowerInput,
    block_numbers,
    full_attention,
    run_block,
    stack_states,
)
from .regional_prompts import PromptSettings, RegionalPrompts

PROMPTS_AND_ATTENTION = (
    "This image tower has regional prompts, whose attention cannot be replaced. Give a model without them, for example "
    "one trained without prompts."
)


@dataclass(frozen=True)
class MaskedPatches:
    """A second view of each image, of which some patches are hidden (Fix-CLIP, section 3.2).

    Attributes:
        is_masked: [batch, patches] bool, as many True in each row.
        vector: [width], which stands in the place of masked patches; None leaves them out, so that the view is shorter.
    """

    is_masked: torch.Tensor
    vector: torch.Tensor | None


class ImageTower:
    """open_clip's vision transformer as parts: embed, run each block, project.

    Values and gradients equal open_clip's own forward up to rounding. Of the last block's output only CLS is computed,
    where the tower pools there. A method that changes the tokens between blocks runs the parts itself:

        hidden_states = tower.embed(images)
        for block in range(tower.depth):
            hidden_states = tower.run_block(block, add_prompt_tokens(hidden_states), attend)
        features = tower.project(hidden_states)

    Args:
        visual: the image tower of an open_clip model, whose weights are used in place.

    Attributes:
        changes: by number of the block, from 0, a function that makes another attention of the plain one.

    Raises:
        UserError: the tower is not open_clip's plain vision transformer.
    """

    def __init__(self, visual: nn.Module):
        if not has_plain_blocks(visual):
            raise UserError(
                f"The image tower is a {type(visual).__name__}, or its blocks are not plain ones of CLIP, so it cannot "
                "be run block by block. Give a CLIP with open_clip's own vision transformer, for example ViT-B-16."
            )
        self.visual = visual
        self.changes: dict[int, Callable[[Attention], Attention]] = {}

    @property
    def prompts(self) -> RegionalPrompts | None:
        return getattr(self.visual, "regional_prompts", None)

    @property
    def transformer(self) -> Transformer:
        return self.visual.transformer

    @property
    def patches(self) -> int:
        """The number of patches of an image."""
        return self.visual.grid_size[0] * self.visual.grid_size[1]

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return len(self.transformer.resblocks)

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """Preprocessed images [batch, 3, height, width] -> the blocks' input [batch, 1 + patches, width], CLS first"""
        return self.visual._embeds(images)

    def run_block(self, block: int, hidden_states: torch.Tensor, attend: Attention | None = None) -> torch.Tensor:
        """[batch, tokens, width] before block number `block`, from 0 -> the same after it.

        `attend` is its attention, [batch, tokens, heads, head_dim] each; None: with prompts, or as `changes` has it.
        """
        return run_block(self.transformer, block, hidden_states, attend or self._attention(block))

    def pack(self, hidden_states: torch.Tensor) -> TowerInput:
        """What `embed` gives, for who runs the blocks; `changes` are left to them. It must pool at CLS."""
        return TowerInput(hidden_states, full_attention, full_attention, _cls_of, self.project)

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] after the last block -> features [batch, embed_dim], not normalised."""
        pooled, _ = self.visual._pool(hidden_states)
        return pooled if self.visual.proj is None else pooled @ self.visual.proj

    def encode(self, images: torch.Tensor, blocks: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of preprocessed images, and states of CLS after some blocks, from 0, or from -1 for the last.

        Returns:
            features [batch, embed_dim], not normalised; states [batch, len(blocks), width], before any final norm.
        """
        hidden_states, states = self._run(self.embed(images), blocks)
        return self.project(hidden_states), states

    def encode_with_masked(
        self, images: torch.Tensor, blocks: Sequence[int] = (), masked: MaskedPatches | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """`encode` for a tower that pools at CLS, and the features of a second view with masked patches, if any.

        Both views go through the blocks as one batch, if they are of one length.

        Returns:
            features [batch, embed_dim] of the whole images, and of the masked view or None; states of CLS in the whole
            images after the blocks, [batch, len(blocks), width].
        """
        if masked is None:
            features, states = self.encode(images, blocks)
            return features, None, states
        # [batch, patches, width], before positions are added
        patches, batch = self.visual.conv1(images).flatten(2).transpose(1, 2), len(images)
        if masked.vector is not None:
            vector = masked.vector.to(patches.dtype)
            hidden = torch.where(masked.is_masked[..., None], vector, patches)
            views, states = self._run(self._with_cls(torch.cat([patches, hidden])), blocks)
            return *self.project(views).split(batch), states[:batch]
        visible = (~masked.is_masked).nonzero()[:, 1].view(batch, -1)  # numbers of patches, in order
        features, states = self.encode(images, blocks)
        hidden_states, _ = self._run(self._with_cls(patches, visible))
        return features, self.project(hidden_states), states

    def compile(self, **options) -> None:
        """Compiles all blocks together: every batch has the same number of tokens."""
        self._run = torch.compile(self._run, **options)

    def _with_cls(self, patches: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Patch embeddings -> the blocks' input [batch, 1 + patches, width]; `kept` [batch, visible] leaves out others.

        As `VisionTransformer._embeds` of open_clip, but for patch dropout.
        """
        visual, table = self.visual, self.visual.positional_embedding.to(patches.dtype)
        placed = patches + table[1:]
        if kept is not None:
            placed = placed.gather(1, kept[..., None].expand(-1, -1, placed.shape[-1]))
        cls = (visual.class_embedding.to(patches.dtype) + table[0]).expand(len(patches), 1, -1)
        return visual.ln_pre(torch.cat([cls, placed], dim=1))

    def _run(self, hidden_states: torch.Tensor, blocks: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks' input -> their output, of CLS alone where that is pooled, and CLS after some of them."""
        numbers, cls_states = block_numbers(self.transformer, blocks), {}
        cls_alone = self.visual.attn_pool is None and self.visual.pool_type == "tok"
        for block in range(self.depth):
            is_pooled = cls_alone and block == self.depth - 1
            pooled = {"pooled": _cls_of, "before": _before_attention_of_cls} if is_pooled else {}
            hidden_states = run_block(self.transformer, block, hidden_states, self._attention(block), **pooled)
            if block in numbers:
                cls_states[block] = hidden_states[:, 0]
        states = [cls_states[number] for number in numbers]
        return hidden_states, stack_states(states, hidden_states, hidden_states.shape[-1])

    def _attention(self, block: int) -> Attention:
        if self.prompts:
            return self.prompts.attention(self.transformer.resblocks[block], block)
        return self.changes[block](full_attention) if block in self.changes else full_attention

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Features [batch, embed_dim], not normalised."""
        return self.encode(images)[0]


def has_plain_blocks(visual: nn.Module) -> bool:
    """Whether `ImageTower` can run this image tower of open_clip."""
    return isinstance(visual, VisionTransformer) and all(
        type(block) is ResidualAttentionBlock for block in visual.transformer.resblocks
    )


def add_prompts(visual: nn.Module, settings: PromptSettings) -> None:
    """Registers new regional prompts in an image tower of open_clip, where its weights are."""
    visual.regional_prompts = RegionalPrompts(settings, visual.conv1.out_channels, ImageTower(visual).depth)


def _cls_of(tokens: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, ...] -> [batch, 1, ...]"""
    return tokens[:, :1]


def _before_attention_of_cls(block: ResidualAttentionBlock, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`before_attention`, with the query of CLS alone."""
    attention, normed = block.attn, block.ln_1(hidden_states)
    width = normed.shape[-1]
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    query = F.linear(normed[:, :1], weight[:width], bias[:width])
    key_value = F.linear(normed, weight[width:], bias[width:])
    return tuple(part.unflatten(-1, (attention.num_heads, -1)) for part in (query, *key_value.chunk(2, dim=-1)))
