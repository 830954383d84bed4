"""The learning rate of a step, as a pure function: nothing to save, nothing that can run twice."""

import math


def learning_rate(step: int, total_steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up to `peak`, then half a cosine to 0 (as in Long-CLIP).

    Args:
        step: number of the step about to be made, from 0.
        total_steps: steps of the whole run.
        warmup: steps of warm-up; the last of them has the peak.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))
