"""What options may be, checked before anything is loaded; larger values can only be mistakes."""

from typing import Literal

from .errors import UserError

Tower = Literal["image", "text"]
Layer = Literal["penultimate", "last"]
KEEP = 20  # Long-CLIP: the first 20 positions are well trained and are kept
FACTOR = 4  # positions that each of the others is stretched to

MOST_STEPS = 1000  # the noise levels that models are trained with
MOST_GUIDANCE = 1000.0
MOST_PIXELS = 89_478_485  # Pillow's own limit, above which it warns of a picture that it opens
# What torch's generators take as they are.
LEAST_SEED, GREATEST_SEED = -(2**63), 2**64 - 1


def check_steps(steps: int) -> None:
    """Raises UserError for a number of denoising steps outside of 1 to 1,000."""
    if not 1 <= steps <= MOST_STEPS:
        raise UserError(f"steps={steps} is not allowed. Give a whole number from 1 to {MOST_STEPS}.")


def check_guidance(guidance_scale: float) -> None:
    """Raises UserError for a guidance scale that is no number, or so large that nothing but noise can come of it."""
    if not -MOST_GUIDANCE <= guidance_scale <= MOST_GUIDANCE:  # NaN is neither
        raise UserError(
            f"The guidance scale must be a number up to {MOST_GUIDANCE:g}, got {guidance_scale}. 7 is usual."
        )


def check_pixels(height: int, width: int) -> None:
    """Raises UserError for a picture of more pixels than Pillow opens without a warning."""
    if height * width > MOST_PIXELS:
        raise UserError(
            f"A picture of {height} x {width} pixels has {height * width:,}; at most {MOST_PIXELS:,} can be drawn. "
            "Give a smaller height or width."
        )


def check_side(name: str, pixels: int | None) -> None:
    """Raises UserError for a height or width, as `name` says, that is no positive multiple of 8; None is allowed."""
    if pixels is not None and (pixels <= 0 or pixels % 8):
        nearest = max(8, round(pixels / 8) * 8)
        raise UserError(f"The {name} must be a positive multiple of 8 pixels, got {pixels}. Take {nearest}.")


def check_seeds(first: int, last: int) -> None:
    """Raises UserError where the seeds `first` to `last` leave the range of torch's generators."""
    if first < LEAST_SEED or last > GREATEST_SEED:
        raise UserError(
            f"Seeds from {first} to {last} are needed, and a generator takes those from -2^63 to 2^64 - 1. Give a "
            "smaller seed."
        )


def check_max_bad(max_bad: float) -> None:
    """Raises UserError unless `max_bad` is a share from 0 to 1."""
    if not 0 <= max_bad <= 1:
        raise UserError(f"max_bad is {max_bad}, but must be in [0, 1].")
