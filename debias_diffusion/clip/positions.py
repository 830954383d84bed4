"""Stretching a learned table of positions (Long-CLIP, section 3.1; DeBias-CLIP uses it unchanged)."""

import torch

from ..limits import FACTOR, KEEP


def stretched_length(length: int, keep: int = KEEP, factor: int = FACTOR) -> int:
    """Rows of the stretched table: 77 -> 248, 64 -> 196; with `keep=0`, 77 -> 308."""
    return keep + (length - keep) * factor


def stretch_positions(table: torch.Tensor, keep: int = KEEP, factor: int = FACTOR) -> torch.Tensor:
    """Stretches a table of learned positions and keeps its first rows.

    Rows 0 to `keep` - 1 are kept bit for bit. For j >= 0, new row `keep` + j lies between old row `keep` + j // factor
    and the next one, with weight (j mod factor) / factor on the next. After the last old row the line through the last
    two rows continues, as in Long-CLIP's weights.

    Args:
        table: [positions, width], any floating dtype.
        keep: number of first rows to keep, in [0, positions - 2]. 0 stretches all (Table S2, "Stretch all").
        factor: rows that every other row becomes, at least 1. 1 changes nothing.

    Returns:
        [keep + (positions - keep) * factor, width], same dtype and device.

    Raises:
        ValueError: `keep` or `factor` is out of range, or the table is not two-dimensional.
    """
    if table.ndim != 2:
        raise ValueError(f"table must be [positions, width], got shape {tuple(table.shape)}")
    length = table.shape[0]
    if not 0 <= keep <= length - 2:
        raise ValueError(f"keep must be in [0, {length - 2}] for a table of {length} positions, got {keep}")
    if factor < 1:
        raise ValueError(f"factor must be at least 1, got {factor}")
    rows = torch.arange(keep, length, device=table.device)
    # The segment each row starts; the last row continues the segment before it.
    slope = table[(rows + 1).clamp(max=length - 1)] - table[(rows + 1).clamp(max=length - 1) - 1]
    weight = torch.arange(factor, device=table.device, dtype=table.dtype) / factor
    # [rows, factor, width]; weight 0 gives the old row itself
    stretched = table[rows, None] + weight[None, :, None] * slope[:, None]
    return torch.cat([table[:keep], stretched.flatten(0, 1)])
