"""Text towers: a causal one that computes only what its mask does not hide, and one without a mask."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from open_clip.transformer import Transformer
from torch import nn

from ..errors import UserError
from ..text.tokens import TokenBatch
from .blocks import (
    Attention,
    TowerInput,
    after_attention,
    before_attention,
    block_numbers,
    causal_attention,
    run_block,
    stack_states,
)
from .packing import Layout, attend_all, attend_last

_SHORT_POSITIONS = "short_positional_embedding"  # a buffer of the tower, in no state dict

# Where the text feature is read: at EOT (at the last slot where there is no causal mask), or as the mean of all states
# from SOT to EOT without pads (DeBias-CLIP, section E.2).
POOLINGS = ("eot", "average")


class TextTower:
    """A causal text tower that computes each caption only up to EOT, and the shared beginning once.

    Under a causal mask nothing after EOT changes the pooled state, so it is skipped. All rows begin with `[SOT, PAD,
    PAD, ...]` (`[PAD, PAD, ...]` where pads stand before SOT): these states are computed once for the longest prefix,
    and each caption attends to as many as it has pads. Values and gradients equal those of the padded rows up to
    rounding.

    Args:
        tower: the module with the text tower's parts: an `open_clip.CLIP`, or a `CustomTextCLIP`'s `text`.

    Attributes:
        pooling: one of `POOLINGS`.
        changes: by number of the block, from 0, a function that makes another attention of its ordinary one. Token 0 of
            the packed rows that it gets is the SOT that all captions share.
    """

    def __init__(self, tower: Any):  # torch types a module's parts as Tensor | Module
        self.tower = tower
        self.pooling = "eot"
        self.changes: dict[int, Callable[[Attention], Attention]] = {}
        self._before, self._after = before_attention, after_attention

    @property
    def transformer(self) -> Transformer:
        return self.tower.transformer

    @property
    def context_length(self) -> int:
        return self.tower.positional_embedding.shape[0]

    @property
    def short_positions(self) -> torch.Tensor | None:
        """[positions, width] the table of captions that `TokenBatch.is_short` marks; None: they cannot be read."""
        return getattr(self.tower, _SHORT_POSITIONS, None)

    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        """[batch, embed_dim] features of the captions, projected, not normalised."""
        return self.encode(tokens)[0]

    def encode(self, tokens: TokenBatch, blocks: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """Features, and the states of EOT after some blocks, by number from 0, or from -1 for the last.

        Returns:
            features [batch, embed_dim], projected, not normalised; states [batch, len(blocks), width], before the final
            norm.
        """
        self._check_changes(tokens)
        layout = Layout.of(tokens)
        packed = self._pack(tokens, layout)
        numbers, eot_states, hidden_states = block_numbers(self.transformer, blocks), {}, packed.hidden_states
        last = len(self.transformer.resblocks) - 1
        for block in range(last):
            hidden_states = self._run(block, hidden_states, packed.attend)
            if block in numbers:
                eot_states[block] = hidden_states.index_select(0, layout.last)
        hidden_states = self._run(last, hidden_states, packed.attend_last, pooled=packed.pooled)
        eot_states[last] = hidden_states.index_select(0, layout.last) if self.pooling == "average" else hidden_states
        features = packed.project(hidden_states)
        states = [eot_states[number].index_select(0, layout.back) for number in numbers]
        return features, stack_states(states, features, hidden_states.shape[-1])

    def pack(self, tokens: TokenBatch) -> TowerInput:
        """Packed states [tokens, width], for who runs the blocks; `changes` are left to them. Token 0 must be SOT."""
        self._check_sot(tokens)
        return self._pack(tokens, Layout.of(tokens))

    def _pack(self, tokens: TokenBatch, layout: Layout) -> TowerInput:
        attend, is_average = partial(attend_all, layout), self.pooling == "average"

        def project(states: torch.Tensor) -> torch.Tensor:
            states = self.tower.ln_final(states)
            return self.project(_average(tokens, layout, states) if is_average else states.index_select(0, layout.back))

        if is_average:
            return TowerInput(self._embed(tokens, layout), attend, attend, lambda states: states, project)
        # Of the last block's output only EOT is read.
        pooled = partial(torch.index_select, dim=0, index=layout.last)
        return TowerInput(self._embed(tokens, layout), attend, partial(attend_last, layout), pooled, project)

    def _embed(self, tokens: TokenBatch, layout: Layout) -> torch.Tensor:
        """[longest prefix + sum of lengths, width] the blocks' input"""
        ids, table = torch.cat([tokens.prefix_ids, tokens.ids[layout.ids]]), self.tower.positional_embedding
        if tokens.is_short is not None:
            table = torch.cat([table, self.short_positions.to(table.dtype)])
        return self.tower.token_embedding(ids) + table[layout.positions]

    def penultimate_states(self, tokens: TokenBatch, pad: int) -> torch.Tensor:
        """`hidden_states[-2]` of transformers' CLIPTextModel, as SDXL's UNet reads it: of every token, pads included.

        Args:
            pad: the id that fills a row after EOT: EOT itself for SDXL's first encoder, 0 for its second. Pads before
                a text stay as they are.

        Returns:
            [batch, context_length, width], after the block before the last, without the final norm.
        """
        self._check_changes(tokens)
        tower = self.tower
        hidden_states = tower.token_embedding(replace(tokens, pad=pad).padded()) + tower.positional_embedding
        for block in range(len(self.transformer.resblocks) - 1):
            hidden_states = self._run(block, hidden_states, causal_attention)
        return hidden_states

    def final_states(self, tokens: TokenBatch) -> torch.Tensor:
        """[batch, context_length, width] of every position, pads too, after the last block and the final norm."""
        states = self.penultimate_states(tokens, tokens.pad)
        return self.tower.ln_final(self._run(len(self.transformer.resblocks) - 1, states, causal_attention))

    def token_states(self, tokens: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """`penultimate_states` of the batch's own tokens alone.

        Returns:
            states [longest prefix, width] of the shared beginning, and [sum of lengths, width] in the order of
            `tokens.ids`.
        """
        self._check_changes(tokens)
        layout = Layout.of(tokens)
        hidden_states = self._embed(tokens, layout)
        for block in range(len(self.transformer.resblocks) - 1):
            hidden_states = self._run(block, hidden_states, partial(attend_all, layout))
        prefix, texts = hidden_states.tensor_split([layout.n_prefix])
        return prefix, texts.index_select(0, layout.ids.argsort())

    def _run(self, block: int, hidden_states: torch.Tensor, attend: Attention, **pooled: Callable) -> torch.Tensor:
        attend = self.changes[block](attend) if block in self.changes else attend
        parts = {"before": self._before, "after": self._after} | pooled
        return run_block(self.transformer, block, hidden_states, attend, **parts)

    def _check_changes(self, tokens: TokenBatch) -> None:
        if self.changes:
            self._check_sot(tokens)

    @staticmethod
    def _check_sot(tokens: TokenBatch) -> None:
        if not tokens.shared_sot:
            raise UserError(
                "Pads stand before SOT, and the replaced attention of this text tower takes the first token for SOT. "
                "Put the pads after SOT, or use the model with the plain attention."
            )

    def checkpoint_activations(self) -> None:
        """Keeps only each block's input for the backward pass, which recomputes the rest."""
        self.transformer.grad_checkpointing = True

    def compile(self, **options) -> None:
        """Compiles everything but the attention, for any number of tokens, because every batch has another."""
        parts = (before_attention, after_attention)
        self._before, self._after = (torch.compile(part, dynamic=True, **options) for part in parts)

    def project(self, pooled: torch.Tensor) -> torch.Tensor:
        """[batch, width] -> [batch, embed_dim]"""
        projection = self.tower.text_projection
        if projection is None:
            return pooled
        return projection(pooled) if isinstance(projection, nn.Linear) else pooled @ projection


class PaddedTextTower(TextTower):
    """A text tower without a causal mask, on the literal padded rows.

    Every state depends on every slot of its row, pads included, and the last slot is pooled: nothing can be skipped or
    shared between captions.
    """

    def encode(self, tokens: TokenBatch, blocks: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """Features, and the states after some blocks of the last slot, which is the pooled one here."""
        numbers, after_blocks = block_numbers(self.transformer, blocks), {}
        hidden_states = self.tower.token_embedding(tokens.padded()) + self.tower.positional_embedding
        if numbers:
            indices = sorted(set(numbers))
            hidden_states, intermediates = self.transformer.forward_intermediates(hidden_states, indices=indices)
            after_blocks = dict(zip(indices, intermediates, strict=True))
        else:
            hidden_states = self.transformer(hidden_states)
        features = self.project(self._pool(self.tower.ln_final(hidden_states), tokens))
        states = [after_blocks[number][:, -1] for number in numbers]
        return features, stack_states(states, features, hidden_states.shape[-1])

    def _pool(self, states: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
        if self.pooling == "eot":
            return states[:, -1]
        slots, start = torch.arange(states.shape[1]), tokens.n_prefix[:, None]
        inside = (start <= slots) & (slots < start + tokens.lengths[:, None])
        sums = (inside.to(states)[..., None] * states).sum(dim=1)
        return sums / tokens.lengths.to(states)[:, None]

    def _check_changes(self, tokens: TokenBatch) -> None:
        """Raises UserError, of what only a causal text tower has."""
        raise UserError(
            "This text tower has no causal mask, and SDXL's UNet reads the hidden states of a CLIPTextModel, which has "
            "one. Give a CLIP, for example ViT-L-14."
        )

    def compile(self, **options) -> None:
        """Compiles all blocks together: every batch has the same number of slots."""
        self.transformer.compile(**options)


def _average(tokens: TokenBatch, layout: Layout, states: torch.Tensor) -> torch.Tensor:
    """The mean of each caption's states from SOT to EOT, without pads: [tokens, width] -> [batch, width]

    The shared SOT counts once in every caption.
    """
    prefix, captions = states.tensor_split([layout.n_prefix])
    groups = zip(layout.groups, captions.split(layout.tokens), strict=True)
    sums = torch.cat([group.pad(packed[:, None]).sum(dim=2)[:, 0] for group, packed in groups])[layout.back]
    n_shared = int(tokens.shared_sot)
    counts = (tokens.lengths + n_shared).to(states)
    return (sums + prefix[:n_shared].sum(dim=0)) / counts[:, None]


def set_positions(model: nn.Module, table: torch.Tensor) -> None:
    """Gives open_clip's two-tower another table of text positions, [positions, width], and its context length."""
    tower = getattr(model, "text", model)
    tower.positional_embedding = nn.Parameter(table)
    for module in {model, tower}:
        module.context_length = len(table)
    if hasattr(tower, "num_pos"):
        tower.num_pos = len(table)
    if tower.attn_mask is not None:
        mask = torch.full((len(table),) * 2, -torch.inf).triu_(1).to(table)
        tower.register_buffer("attn_mask", mask, persistent=False)


def set_short_positions(tower: nn.Module, table: torch.Tensor | None) -> None:
    """Gives a text tower the table of positions of short captions, [positions, width], or takes it away."""
    table = None if table is None else table.detach().clone().to(tower.positional_embedding)
    tower.register_buffer(_SHORT_POSITIONS, table, persistent=False)
