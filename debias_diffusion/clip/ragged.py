"""Attention of packed captions in one call, by PyTorch's kernel for sequences of unlike length, where a GPU has it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # PyTorch 2.8 and 2.9
    varlen_attn = None

_CAUSAL, _EVERYTHING = (-1, 0), (-1, -1)  # the windows of keys, before and after, that a query sees


def has_kernel(query: torch.Tensor) -> bool:
    """Whether the kernel takes packed rows [rows, heads, head_dim] of this type on this device."""
    return (
        varlen_attn is not None
        and query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


@dataclass(frozen=True)
class Ragged:
    """Sequences whose queries are the last of their keys, all packed.

    Keys are rows of the packed batch. A row of the shared prefix is a key of every caption that sees it, so it is
    copied for each.

    Attributes:
        rows: [keys] the packed row of each key.
        places: [rows] the key that is a row itself and no copy; the number of keys where there is none.
        copies: [captions, prefix] the keys that are copies of each row of the prefix, likewise.
        query_ends, key_ends: int32 [sequences + 1] how many queries and keys all sequences before have.
        most_queries, most_keys: of a sequence.
    """

    rows: torch.Tensor
    places: torch.Tensor
    copies: torch.Tensor
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, n_prefix: torch.Tensor, lengths: torch.Tensor, longest: int, last: bool = False) -> "Ragged":
        """All rows attend, the prefix among itself and each caption to its part of the prefix and itself; causally.

        Args:
            n_prefix, lengths: [captions] rows of the prefix that each sees, and its own, in packed order. On the CPU.
            longest: rows of the prefix, which are the first of the packed batch.
            last: only each caption's last row is a query.
        """
        prefix_keys = 0 if last else longest  # the keys before the captions'
        keys = n_prefix + lengths
        key_starts, row_starts = prefix_keys + keys.cumsum(0) - keys, longest + lengths.cumsum(0) - lengths
        within = torch.arange(int(keys.sum())) - (key_starts - prefix_keys).repeat_interleave(keys)
        seen = n_prefix.repeat_interleave(keys)
        rows = torch.where(within < seen, within, within - seen + row_starts.repeat_interleave(keys))
        none = prefix_keys + len(rows)
        itself = torch.arange(longest) if prefix_keys else torch.full((longest,), none)
        slots = torch.arange(longest)
        copies = torch.where(slots < n_prefix[:, None], key_starts[:, None] + slots, none)
        queries = torch.ones_like(lengths) if last else lengths
        first = torch.tensor([prefix_keys] * bool(prefix_keys), dtype=torch.long)
        query_lengths, key_lengths = torch.cat([first, queries]), torch.cat([first, keys])
        return cls(
            torch.cat([torch.arange(prefix_keys), rows]),
            torch.cat([itself, prefix_keys + (within >= seen).nonzero().flatten()]),
            copies,
            *(torch.cat([part.new_zeros(1), part.cumsum(0)]).int() for part in (query_lengths, key_lengths)),
            int(query_lengths.max()),
            int(key_lengths.max()),
        )

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Ragged":
        """The same with other tensors: pinned ones, or copies on a device."""
        tensors = (self.rows, self.places, self.copies, self.query_ends, self.key_ends)
        return Ragged(*map(change, tensors), self.most_queries, self.most_keys)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: Callable | None = None
    ) -> torch.Tensor:
        """Queries [queries, heads, head_dim] in the sequences' order, keys and values of all packed rows.

        `kernel` has the arguments of `torch.nn.attention.varlen.varlen_attn`, which it is by default.
        """
        keys, values = (_WithCopies.apply(part, self.rows, self.places, self.copies) for part in (key, value))
        ends = (self.query_ends, self.key_ends, self.most_queries, self.most_keys)
        # Queries are aligned with the end of their keys, so the only query of a sequence sees everything.
        window = _EVERYTHING if self.most_queries == 1 else _CAUSAL
        return (kernel or varlen_attn)(query, keys, values, *ends, window_size=window)


class _WithCopies(torch.autograd.Function):
    """Packed rows -> keys. Its gradient is made of plain copies and one sum, so that it is deterministic, and in half
    precision exact to one rounding; that of `index_select` would add hundreds of copies one by one."""

    @staticmethod
    def forward(ctx, packed: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, copies: torch.Tensor):
        ctx.save_for_backward(places, copies)
        return packed.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        places, copies = ctx.saved_tensors
        gradient = torch.cat([gradient, gradient.new_zeros(1, *gradient.shape[1:])])  # of "none"
        row_gradients = gradient.index_select(0, places)
        row_gradients[: copies.shape[1]] += gradient.index_select(0, copies.flatten()).unflatten(0, copies.shape).sum(0)
        return row_gradients, None, None, None
