import pytest
import torch

from debias_diffusion import stretch_positions
from debias_diffusion.clip.positions import stretched_length


def literal(table, keep, factor):
    """The definition, row by row, with Long-CLIP's extrapolation at the end."""
    rows = [table[i] for i in range(keep)]
    for j in range((len(table) - keep) * factor):
        old, weight = keep + j // factor, (j % factor) / factor
        if old + 1 < len(table):
            rows.append((1 - weight) * table[old] + weight * table[old + 1])
        else:
            rows.append(table[-1] + weight * (table[-1] - table[-2]))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("positions", "keep", "factor", "stretched"),
    [(77, 20, 4, 248), (64, 20, 4, 196), (77, 0, 4, 308), (64, 0, 4, 256), (10, 8, 3, 14), (9, 2, 1, 9)],
)
def test_equals_a_slow_literal_reading(positions, keep, factor, stretched):
    table = torch.randn(positions, 5, dtype=torch.float64)
    out = stretch_positions(table, keep, factor)
    assert len(out) == stretched == stretched_length(positions, keep, factor)
    torch.testing.assert_close(out, literal(table, keep, factor), rtol=0, atol=1e-12)
    assert torch.equal(out[:keep], table[:keep]) and torch.equal(out[keep::factor], table[keep:])
