"""The transformer blocks of open_clip's towers, with their attention as an argument."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from open_clip.transformer import ResidualAttentionBlock, Transformer
from torch.utils.checkpoint import checkpoint

from ..errors import UserError

# (query, key, value), each [..., heads, head_dim], to the attended values, of the query's shape.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def full_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options) -> torch.Tensor:
    """[batch, tokens, heads, head_dim] each: every token attends to all.

    `options` are those of `torch.nn.functional.scaled_dot_product_attention`, such as `attn_mask`.
    """
    parts = (part.transpose(-3, -2) for part in (query, key, value))
    return F.scaled_dot_product_attention(*parts, **options).transpose(-3, -2)


@dataclass(frozen=True)
class TowerInput:
    """Images or texts on their way through a tower, for who runs its blocks one by one.

    Attributes:
        hidden_states: the blocks' input, [..., tokens, width]; token 0 is CLS, or the SOT that all texts share.
        attend: the attention of every block but the last.
        attend_last: the attention of the last block, whose queries are those of the pooled tokens alone.
        pooled: of something of all tokens, that of the tokens whose state after the last block is pooled.
        project: these states to features [batch, embed_dim], not normalised.
    """

    hidden_states: torch.Tensor
    attend: Attention
    attend_last: Attention
    pooled: Callable[[torch.Tensor], torch.Tensor]
    project: Callable[[torch.Tensor], torch.Tensor]


causal_attention = partial(full_attention, is_causal=True)


def before_attention(block: ResidualAttentionBlock, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[..., width] -> query, key and value, each [..., heads, width / heads]"""
    attention = block.attn
    qkv = F.linear(block.ln_1(hidden_states), attention.in_proj_weight, attention.in_proj_bias)
    return tuple(part.unflatten(-1, (attention.num_heads, -1)) for part in qkv.chunk(3, dim=-1))


def after_attention(block: ResidualAttentionBlock, hidden_states: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """The block's input [..., width] and the attended values [..., heads, width / heads] -> its output [..., width]"""
    hidden_states = hidden_states + block.ls_1(block.attn.out_proj(attended.flatten(-2)))
    return hidden_states + block.ls_2(block.mlp(block.ln_2(hidden_states)))


def block_forward(
    block: ResidualAttentionBlock,
    hidden_states: torch.Tensor,
    attend: Attention,
    pooled: Callable[[torch.Tensor], torch.Tensor] | None = None,
    before: Callable = before_attention,
    after: Callable = after_attention,
) -> torch.Tensor:
    """One transformer block with its attention given as a function.

    Args:
        block: open_clip's block, whose weights are used in place.
        hidden_states: [..., width], any leading shape.
        attend: the attention; see `Attention`.
        pooled: chooses the tokens whose output is wanted. `attend` then gets the queries of these alone, and keys and
            values of all.
        before, after: the parts before and after the attention, for example compiled.
    """
    query, key, value = before(block, hidden_states)
    if pooled is not None:
        query, hidden_states = pooled(query), pooled(hidden_states)
    return after(block, hidden_states, attend(query, key, value))


def run_block(
    transformer: Transformer, number: int, hidden_states: torch.Tensor, attend: Attention, **parts
) -> torch.Tensor:
    """`block_forward` of a transformer's block of that number; under checkpointing it recomputes its activations."""
    run, block = partial(block_forward, **parts), transformer.resblocks[number]
    if transformer.grad_checkpointing and torch.is_grad_enabled():
        # A block draws no random numbers whose state would have to be kept.
        return checkpoint(run, block, hidden_states, attend, use_reentrant=False, preserve_rng_state=False)
    return run(block, hidden_states, attend)


def block_numbers(transformer: Transformer, blocks: Sequence[int]) -> list[int]:
    """Blocks by number from 0; a negative number counts from the last block, -1."""
    depth = len(transformer.resblocks)
    if outside := [block for block in blocks if not -depth <= block < depth]:
        raise UserError(f"There is no block {outside[0]}. Give numbers from 0 to {depth - 1}, or from -{depth} to -1.")
    return [block % depth for block in blocks]


def stack_states(states: Sequence[torch.Tensor], features: torch.Tensor, width: int) -> torch.Tensor:
    """States [batch, width] after each of some blocks -> [batch, blocks, width], also of no blocks."""
    return torch.stack(states, dim=1) if states else features.new_empty(len(features), 0, width)
