"""Where the tokens of a packed batch of captions stand, and their attention."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..devices import to_device
from ..text.tokens import TokenBatch
from .ragged import Ragged, has_kernel

# Captions of similar length attend together, in at most so many groups without and so many with pads in front. More
# groups waste calls, fewer waste padding.
_GROUPS = 8


@dataclass(frozen=True)
class Group:
    """Captions that attend together, padded to the longest of them.

    Attributes:
        slots: [tokens] the place of each packed token in the padded group, flattened.
        size, text: the padded group's shape: captions, tokens of the longest caption.
        prefix: tokens of the shared prefix that at least one caption sees.
        seen: [size, 1, 1, prefix + text], True where a caption's last token may attend: at the whole caption.
        mask: [size, 1, text, prefix + text], True where a token may attend; None where a causal mask is enough.
    """

    slots: torch.Tensor
    size: int
    text: int
    prefix: int
    seen: torch.Tensor
    mask: torch.Tensor | None

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim] -> [size, heads, text, head_dim]"""
        # Every slot is written once, so that forward and backward are plain, deterministic copies.
        padded = packed.new_zeros(self.size * self.text, *packed.shape[1:]).index_copy(0, self.slots, packed)
        return padded.unflatten(0, (self.size, self.text)).transpose(1, 2)

    def behind(self, shared: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        """The padded group's states after the part of the prefix's [prefix, heads, head_dim] that it sees."""
        shared = shared[: self.prefix].transpose(0, 1).expand(self.size, -1, -1, -1)
        return torch.cat([shared, padded], dim=2)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[size, heads, text, head_dim] -> [tokens, heads, head_dim]"""
        return padded.transpose(1, 2).flatten(0, 1).index_select(0, self.slots)


class Layout:
    """The place of each caption's tokens in a packed batch: the prefix first, then one group after the other.

    Attributes:
        n_prefix: tokens of the prefix.
        ids: [sum of lengths] the index, among the batch's ids, of each token after the prefix.
        positions: [n_prefix + sum of lengths] the position of each token in its literal row; behind the context length,
            in the table of short captions. The prefix has those of the long table.
        last: [batch] the index of each caption's last token, in the groups' order.
        back: [batch] the index of each caption of the batch in that order.
        captions, tokens: their numbers, of each group.
        groups: captions that attend together.
        ragged, ragged_last: the same attention in one call, of all tokens and of the captions' last ones.
    """

    def __init__(self, batch: TokenBatch):
        self._batch = batch
        self.n_prefix = len(batch.prefix_ids)
        members = self._grouped(batch)
        self._order = order = torch.cat(members)
        n_prefix, lengths = batch.n_prefix[order], batch.lengths[order]
        starts = lengths.cumsum(0) - lengths
        within = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
        in_batch = (batch.lengths.cumsum(0) - batch.lengths)[order]
        self.ids = within + in_batch.repeat_interleave(lengths)
        # A caption's tokens follow the part of the prefix that it sees.
        after_prefix = within + n_prefix.repeat_interleave(lengths)
        if batch.is_short is not None:
            after_prefix += batch.context_length * batch.is_short[order].repeat_interleave(lengths)
        self.positions = torch.cat([torch.arange(self.n_prefix), after_prefix])
        self.last = self.n_prefix + starts + lengths - 1
        self.back = order.argsort()
        self.captions = [len(group) for group in members]
        self.tokens = [int(batch.lengths[group].sum()) for group in members]

    @classmethod
    def of(cls, tokens: TokenBatch) -> "Layout":
        """That of a batch, on its device, whether it has one or not."""
        return tokens.layout or cls(tokens).map(partial(to_device, device=tokens.ids.device))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Layout":
        """A copy with other tensors for a device: pinned ones, or copies there."""
        layout, made = copy(self), vars(self)
        changed = {name: change(made[name]) for name in ("ids", "positions", "last", "back")}
        changed |= {name: made[name].map(change) for name in ("ragged", "ragged_last") if name in made}
        vars(layout).pop("groups", None)
        vars(layout).update(changed)
        return layout

    @cached_property
    def groups(self) -> list[Group]:
        members, device = self._order.split(self.captions), self.ids.device
        return [self._group(self._batch, group, device) for group in members]

    @cached_property
    def ragged(self) -> Ragged:
        return self._ragged()

    @cached_property
    def ragged_last(self) -> Ragged:
        return self._ragged(last=True)

    def _ragged(self, **queries: bool) -> Ragged:
        rows = self._batch.n_prefix[self._order], self._batch.lengths[self._order], self.n_prefix
        return Ragged.of(*rows, **queries).map(partial(to_device, device=self.ids.device))

    @staticmethod
    def _grouped(batch: TokenBatch) -> list[torch.Tensor]:
        """Captions of similar length, without and with pads in front separately."""
        members = []
        # The part of the prefix that every caption sees; the rest are pads.
        n_common = int(batch.shared_sot)
        for has_pads in (False, True):
            captions = ((batch.n_prefix > n_common) == has_pads).nonzero().flatten()
            captions = captions[batch.lengths[captions].argsort(stable=True)]
            members += captions.tensor_split(min(_GROUPS, len(captions)) or 1)
        return [group for group in members if len(group)]

    @staticmethod
    def _group(batch: TokenBatch, members: torch.Tensor, device: torch.device) -> Group:
        lengths, n_prefix = batch.lengths[members, None], batch.n_prefix[members, None]
        size, text, prefix = len(members), int(lengths.max()), int(n_prefix.max())
        inside = torch.arange(text) < lengths
        slots = torch.arange(size * text).view(size, text)[inside]
        # [size, 1, 1, ...]: a dimension for the heads and one for the queries
        before = (torch.arange(prefix) < n_prefix)[:, None, None]
        mask = None
        if prefix > int(batch.shared_sot):
            causal = torch.ones(text, text, dtype=torch.bool).tril()
            mask = torch.cat([before.expand(-1, -1, text, -1), causal.expand(size, 1, -1, -1)], dim=-1).to(device)
        seen = torch.cat([before, inside[:, None, None]], dim=-1).to(device)
        return Group(slots.to(device), size, text, prefix, seen, mask)


def arranged(tokens: TokenBatch, is_ragged: bool) -> TokenBatch:
    """The batch with its layout, made where the batch is, so that a step need not wait for it.

    `is_ragged` for the attention in one call, which GPUs have. Groups are made in the step: workers would send them as
    too many tensors.
    """
    layout = Layout(tokens)
    if is_ragged:
        layout.ragged, layout.ragged_last  # noqa: B018
    return replace(tokens, layout=layout)


# Not cuDNN's, which a Hopper GPU prefers in half precision: it plans anew for every new shape, and groups have many.
# With it a step took seconds, and under some masks the features were wrong.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _attention(query: torch.Tensor, *key_value: torch.Tensor, **options) -> torch.Tensor:
    with sdpa_kernel(_BACKENDS) if query.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(query, *key_value, **options)


def attend_all(layout: Layout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of packed rows [rows, heads, head_dim]: of the prefix, and of captions with the prefix."""
    if has_kernel(query):
        return layout.ragged.attend(query, key, value)
    prefix, captions = zip(*(x.tensor_split([layout.n_prefix]) for x in (query, key, value)), strict=True)
    out = [_attention(*(x.transpose(0, 1)[None] for x in prefix), is_causal=True)[0].transpose(0, 1)]
    for group, *packed in zip(layout.groups, *(x.split(layout.tokens) for x in captions), strict=True):
        group_query, *group_key_value = (group.pad(x) for x in packed)
        keys_values = [group.behind(*pair) for pair in zip(prefix[1:], group_key_value, strict=True)]
        if group.mask is None:
            # Every caption sees the same before its text: the shared SOT, if any. With SOT as a query too, a causal
            # mask is enough, for which there are faster kernels; the output of SOT is dropped.
            queries = group.behind(prefix[0], group_query)
            attended = _attention(queries, *keys_values, is_causal=True)[:, :, group.prefix :]
        else:
            attended = _attention(group_query, *keys_values, attn_mask=group.mask)
        out.append(group.unpad(attended))
    return torch.cat(out)


def attend_last(layout: Layout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The same for the captions' last tokens alone: queries and result are [batch, heads, head_dim], in that order."""
    if has_kernel(query):
        return layout.ragged_last.attend(query, key, value)
    prefix, captions = zip(*(x.tensor_split([layout.n_prefix]) for x in (key, value)), strict=True)
    queries = query.split(layout.captions)
    out = []
    packed_groups = (x.split(layout.tokens) for x in captions)
    for group, group_query, *packed in zip(layout.groups, queries, *packed_groups, strict=True):
        keys_values = [group.behind(shared, group.pad(x)) for shared, x in zip(prefix, packed, strict=True)]
        out.append(_attention(group_query[:, :, None], *keys_values, attn_mask=group.seen)[:, :, 0])
    return torch.cat(out)
