"""Heads of a tower as a map: what suppressing each alone does, and which are suppressed."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure


def draw_heads(values: Sequence[Sequence[float]], title: str, around: float | None = None) -> Figure:
    """A cell for each head, [blocks][heads].

    Args:
        around: the value drawn white, with losses red and gains blue; None draws values from 0 to 1, white to blue.
    """
    values = np.asarray(values, dtype=float)
    blocks, heads = values.shape
    figure = Figure(figsize=(max(6, 2 + 0.45 * heads), max(3, 1.5 + 0.4 * blocks)), layout="constrained", dpi=150)
    axes = figure.subplots()
    if around is None:
        scale = {"cmap": "Blues_r", "vmin": 0, "vmax": 1}
    else:
        most = max(1e-9, float(np.abs(values - around).max()))
        scale = {"cmap": "RdBu", "vmin": around - most, "vmax": around + most}
    image = axes.imshow(values, aspect="auto", **scale)
    figure.colorbar(image, ax=axes)
    axes.set_xticks(range(heads))
    axes.set_yticks(range(blocks))
    axes.set_xlabel("head")
    axes.set_ylabel("block")
    axes.set_title(title, fontsize="medium")
    return figure
