"""The image tower of a CLIP block by block: states of CLS, and attention that can be replaced."""

from collections.abc import Mapping, Sequence

import torch
from open_clip.transformer import ResidualAttentionBlock, VisionTransformer
from torch import nn

from ..errors import UserError
from .blocks import Attention, block_numbers, full_attention, run_block, stack_states


class ImageTower:
    """open_clip's vision transformer as parts: embed, run each block, project.

    Values and gradients equal open_clip's own forward up to rounding. `Backbone.encode_image` uses that forward unless
    attention was replaced.
    A method that changes the tokens between blocks runs the parts itself:

        hidden_states = tower.embed(images)
        for block in range(tower.depth):
            hidden_states = tower.run_block(block, add_prompt_tokens(hidden_states), attend)
        features = tower.project(hidden_states)

    Args:
        visual: the image tower of an open_clip model, whose weights are used in place.

    Attributes:
        attends: the attention of each block, by number from 0, that does not have the plain one.

    Raises:
        UserError: the tower is not open_clip's plain vision transformer.
    """

    def __init__(self, visual: nn.Module):
        if not isinstance(visual, VisionTransformer):
            kind = type(getattr(visual, "trunk", visual)).__name__
            raise UserError(
                f"The image tower is a {kind}{' of timm' if hasattr(visual, 'trunk') else ''}, which cannot be run "
                "block by block. Give a CLIP with open_clip's own vision transformer, for example ViT-B-16."
            )
        if not all(type(block) is ResidualAttentionBlock for block in visual.transformer.resblocks):
            raise UserError("The image tower's blocks are not plain CLIP blocks. Give another, such as ViT-B-16.")
        self.visual = visual
        self.attends: dict[int, Attention] = {}

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return len(self.visual.transformer.resblocks)

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """Preprocessed images [batch, 3, height, width] -> the blocks' input [batch, 1 + patches, width], CLS first"""
        return self.visual._embeds(images)

    def run_block(self, block: int, hidden_states: torch.Tensor, attend: Attention | None = None) -> torch.Tensor:
        """[batch, tokens, width] before one block -> the same after it.

        Args:
            block: its number, from 0.
            attend: its attention, [batch, tokens, heads, head_dim] each; None: as `attends` has it, else the plain one.
        """
        attend = attend or self.attends.get(block, full_attention)
        return run_block(self.visual.transformer, block, hidden_states, attend)

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] after the last block -> features [batch, embed_dim], not normalised."""
        pooled, _ = self.visual._pool(hidden_states)
        return pooled if self.visual.proj is None else pooled @ self.visual.proj

    def encode(
        self, images: torch.Tensor, blocks: Sequence[int] = (), attends: Mapping[int, Attention] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features, and the states of CLS after some blocks.

        Args:
            images: [batch, 3, height, width], preprocessed.
            blocks: numbers from 0, or from -1 for the last block.
            attends: replaces the tower's `attends` in this pass.

        Returns:
            features [batch, embed_dim], not normalised; states [batch, len(blocks), width], before any final norm.
        """
        numbers, cls_states = block_numbers(self.visual.transformer, blocks), {}
        hidden_states = self.embed(images)
        for block in range(self.depth):
            attend = None if attends is None else attends.get(block, full_attention)
            hidden_states = self.run_block(block, hidden_states, attend)
            if block in numbers:
                cls_states[block] = hidden_states[:, 0]
        features = self.project(hidden_states)
        return features, stack_states([cls_states[number] for number in numbers], features, hidden_states.shape[-1])

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Features [batch, embed_dim], not normalised."""
        return self.encode(images)[0]
