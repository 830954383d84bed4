"""The layout of the kernel for sequences of unlike length, on a plain kernel in double precision."""

import torch
from helpers.text_batches import BEGINNINGS, MANY, batch_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from debias_diffusion.clip.packing import Layout, attend_all, attend_last

HEADS, CHANNELS = 2, 8


def plain_kernel(query, key, value, query_ends, key_ends, most_queries, most_keys, *, window_size):
    """Softmax, sequence by sequence, with queries aligned with the end of their keys, as the kernel has it."""
    out = []
    assert most_queries == query_ends.diff().max() and most_keys == key_ends.diff().max()
    for sequence in range(len(query_ends) - 1):
        queries, keys = (slice(int(ends[sequence]), int(ends[sequence + 1])) for ends in (query_ends, key_ends))
        scores = torch.einsum("qhd,khd->hqk", query[queries], key[keys]) / CHANNELS**0.5
        if window_size == (-1, 0):
            count, seen = scores.shape[-2:]
            scores = scores.masked_fill(~torch.ones(count, seen).tril(seen - count).bool(), -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[keys]))
    return torch.cat(out)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.floats(0, 1)), min_size=1, max_size=12),
    st.sampled_from(BEGINNINGS),
    st.booleans(),
    st.integers(0, 2**31),
)
@example([(5, 0.0), (0, 0.0)], "pads, SOT, text", False, 0)  # nothing is shared
@example([(5, 0.0), (0, 0.0)], "pads, SOT, text", True, 0)
@example(MANY, "SOT, pads, text", False, 0)
@example(MANY, "SOT, pads, text", True, 0)
@settings(max_examples=30)
def test_one_call_gives_the_values_and_gradients_of_groups(captions, beginning, last, seed):
    layout = Layout(batch_of(captions, beginning, seed))
    rows, generator = len(layout.positions), torch.Generator().manual_seed(seed)
    queries = len(captions) if last else rows
    shapes = [(count, HEADS, CHANNELS) for count in (queries, rows, rows, queries)]
    *inputs, direction = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    for part in inputs:
        part.requires_grad_()
    ragged = layout.ragged_last if last else layout.ragged
    values, gradients = [], []
    for attended in ((attend_last if last else attend_all)(layout, *inputs), ragged.attend(*inputs, plain_kernel)):
        values.append(attended)
        gradients.append(torch.autograd.grad(attended, inputs, direction))
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)
