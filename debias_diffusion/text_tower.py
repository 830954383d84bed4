"""Text towers: one that computes what its causal mask does not hide and nothing else, and one without a mask."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from open_clip.transformer import ResidualAttentionBlock
from torch import nn

from .tokens import TokenBatch

# Captions of like length attend together, in at most so many groups without and so many with pads in front: more
# would waste calls, fewer would waste padding.
_GROUPS = 8

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def block_forward(block: ResidualAttentionBlock, hidden_states: torch.Tensor, attend: Attention) -> torch.Tensor:
    """One transformer block with its attention given as a function.

    Args:
        block: open_clip's block, whose weights are used where they are.
        hidden_states: [..., width], any leading shape.
        attend: (query, key, value), each [..., heads, width / heads], to the attended values of the same shape.
    """
    attention = block.attn
    qkv = F.linear(block.ln_1(hidden_states), attention.in_proj_weight, attention.in_proj_bias)
    query, key, value = (part.unflatten(-1, (attention.num_heads, -1)) for part in qkv.chunk(3, dim=-1))
    attended = attention.out_proj(attend(query, key, value).flatten(-2))
    hidden_states = hidden_states + block.ls_1(attended)
    return hidden_states + block.ls_2(block.mlp(block.ln_2(hidden_states)))


@dataclass(frozen=True)
class _Group:
    """Captions that attend together, padded to the longest of them.

    Attributes:
        rows: [tokens] where the group's tokens lie among all captions' tokens.
        slots: [tokens] where they lie in the padded group, flattened.
        size, text: captions, and tokens of the longest: the padded group's shape.
        prefix: how much of the shared prefix the caption that sees most of it sees.
        mask: [size, 1, text, prefix + text], True where a token may look; None where a causal mask says it all.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    size: int
    text: int
    prefix: int
    mask: torch.Tensor | None

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """[all tokens, heads, head_dim] -> [size, heads, text, head_dim]"""
        # Every slot is written once, so that forward and backward are plain, deterministic copies.
        empty = packed.new_zeros(self.size * self.text, *packed.shape[1:])
        padded = empty.index_copy(0, self.slots, packed.index_select(0, self.rows))
        return padded.unflatten(0, (self.size, self.text)).transpose(1, 2)

    def behind(self, shared: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The padded group's own states behind the part of the shared ones [prefix, heads, head_dim] it sees."""
        shared = shared[: self.prefix].transpose(0, 1).expand(self.size, -1, -1, -1)
        return torch.cat([shared, own], dim=2)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[size, heads, text, head_dim] -> [tokens, heads, head_dim], in the order of `rows`"""
        return padded.transpose(1, 2).flatten(0, 1).index_select(0, self.slots)


class _Layout:
    """Where each caption's tokens lie in a packed batch: the prefix first, then the captions one after the other."""

    def __init__(self, tokens: TokenBatch, device: torch.device):
        self.n_prefix = len(tokens.prefix_ids)
        lengths, n_prefix = tokens.lengths, tokens.n_prefix
        starts = lengths.cumsum(0) - lengths
        within = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
        # A caption's own tokens follow the part of the prefix it sees.
        own = within + n_prefix.repeat_interleave(lengths)
        self.positions = torch.cat([torch.arange(self.n_prefix), own]).to(device)
        self.last = (self.n_prefix + starts + lengths - 1).to(device)
        self.groups = []
        # What every caption sees of the prefix; whatever else stands there are pads.
        n_common = int(tokens.shared_sot)
        for has_pads in (False, True):
            members = ((n_prefix > n_common) == has_pads).nonzero().flatten()
            members = members[lengths[members].argsort(stable=True)]
            for group in members.tensor_split(min(_GROUPS, len(members)) or 1):
                if len(group):
                    self.groups.append(self._group(group, starts, lengths, n_prefix, has_pads, device))

    @staticmethod
    def _group(members, starts, lengths, n_prefix, has_pads, device) -> _Group:
        size, text, prefix = len(members), int(lengths[members].max()), int(n_prefix[members].max())
        inside = torch.arange(text) < lengths[members, None]
        rows = (starts[members, None] + torch.arange(text))[inside]
        slots = torch.arange(size * text).view(size, text)[inside]
        mask = None
        if has_pads:
            seen = (torch.arange(prefix) < n_prefix[members, None])[:, None, None].expand(size, 1, text, prefix)
            causal = torch.ones(text, text, dtype=torch.bool).tril().expand(size, 1, text, text)
            mask = torch.cat([seen, causal], dim=-1).to(device)
        return _Group(rows.to(device), slots.to(device), size, text, prefix, mask)


class TextTower:
    """A causal text tower that computes a caption up to its EOT and the shared beginning once.

    Under a causal mask nothing after EOT changes the pooled state, so it is not computed. And `[SOT, PAD, PAD, ...]`
    (`[PAD, PAD, ...]` where pads stand before SOT) begins every row, so its states are computed once for the longest
    prefix, and each caption attends to as much of them as it has pads. Values and gradients are those of the padded
    rows (up to rounding).

    Args:
        tower: the module that holds the text tower's parts: an `open_clip.CLIP`, or a `CustomTextCLIP`'s `text`.
    """

    def __init__(self, tower: nn.Module):
        self.tower = tower

    @property
    def context_length(self) -> int:
        return self.tower.positional_embedding.shape[0]

    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        """[batch, embed_dim] features of each caption's EOT, projected, not normalised."""
        tower = self.tower
        ids = torch.cat([tokens.prefix_ids, tokens.ids])
        layout = _Layout(tokens, ids.device)
        # [longest prefix + sum of lengths, width]
        hidden_states = tower.token_embedding(ids) + tower.positional_embedding[layout.positions]
        for block in tower.transformer.resblocks:
            hidden_states = block_forward(block, hidden_states, lambda q, k, v: _attend(layout, q, k, v))
        return self.project(tower.ln_final(hidden_states[layout.last]))

    def project(self, pooled: torch.Tensor) -> torch.Tensor:
        """[batch, width] -> [batch, embed_dim]"""
        projection = self.tower.text_projection
        if projection is None:
            return pooled
        return projection(pooled) if isinstance(projection, nn.Linear) else pooled @ projection


class PaddedTextTower(TextTower):
    """A text tower without a causal mask, on the literal padded rows.

    Every state depends on every slot of its row, pads included, and the last slot is the one that is pooled: nothing
    may be left out, and no two captions share anything.
    """

    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        """[batch, embed_dim] features of each row's last slot, projected, not normalised."""
        tower = self.tower
        hidden_states = tower.token_embedding(tokens.padded()) + tower.positional_embedding
        return self.project(tower.ln_final(tower.transformer(hidden_states))[:, -1])


def set_positions(model: nn.Module, table: torch.Tensor) -> None:
    """Gives open_clip's two-tower another table of text positions, [positions, width], and the window that it says."""
    tower = getattr(model, "text", model)
    tower.positional_embedding = nn.Parameter(table)
    for module in {model, tower}:
        module.context_length = len(table)
    if hasattr(tower, "num_pos"):
        tower.num_pos = len(table)
    if tower.attn_mask is not None:
        mask = torch.full((len(table),) * 2, -torch.inf).triu_(1).to(table)
        tower.register_buffer("attn_mask", mask, persistent=False)


def _attend(layout: _Layout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of packed rows [rows, heads, head_dim]: the prefix to itself, captions to it and themselves."""
    n = layout.n_prefix
    prefix = [x[:n] for x in (query, key, value)]
    own = [x[n:] for x in (query, key, value)]
    prefix_out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in prefix), is_causal=True)
    out = torch.zeros_like(own[0])
    for group in layout.groups:
        group_query, *group_key_value = (group.pad(x) for x in own)
        keys_values = [group.behind(*pair) for pair in zip(prefix[1:], group_key_value, strict=True)]
        if group.mask is None:
            # All see the same before their text: SOT, or nothing where none is shared. With SOT as a query too, a
            # causal mask says it all, for which there are faster kernels; its output is not needed.
            queries = group.behind(prefix[0], group_query)
            attended = F.scaled_dot_product_attention(queries, *keys_values, is_causal=True)[:, :, group.prefix :]
        else:
            attended = F.scaled_dot_product_attention(group_query, *keys_values, attn_mask=group.mask)
        out = out.index_copy(0, group.rows, group.unpad(attended).to(out.dtype))
    return torch.cat([prefix_out[0].transpose(0, 1), out])
