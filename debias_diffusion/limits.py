"""Allowed ranges of options, checked before anything is loaded; larger values can only be mistakes.

Ranges are types, which `Checked` options are held to: `steps: Steps = 30`.
"""

import dataclasses
from collections.abc import Callable
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from .errors import UserError


class Rule(NamedTuple):
    """What a number must be, in words after "must be a number, ", and as a test. NaN fits none."""

    text: str
    holds: Callable[[float], bool]
    most: float | None = None  # named only to those who gave more


def at_least(kind: type, least: float) -> Any:
    """The type of numbers of a kind (int or float) from `least` on, up to what can only be a mistake."""
    return Annotated[kind, Rule(f"at least {least}", lambda value: least <= value, MOST)]


def between(kind: type, least: float, most: float) -> Any:
    """The type of numbers of a kind (int or float) from `least` to `most`."""
    return Annotated[kind, Rule(f"from {least} to {most}", lambda value: least <= value <= most)]


Tower = Literal["image", "text"]
Layer = Literal["penultimate", "last"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
KEEP = 20  # Long-CLIP: the first 20 positions are well trained and are kept
FACTOR = 4  # positions that each of the others is stretched to

MOST = 10**9  # of counts, rates and weights
MOST_STEPS = 1000  # the noise levels that models are trained with
MOST_GUIDANCE = 1000.0
MOST_PIXELS = 89_478_485  # Pillow's own limit, above which it warns of a picture that it opens

PositiveInt = at_least(int, 1)
NonNegativeInt = at_least(int, 0)
NonNegativeFloat = at_least(float, 0)
PositiveFloat = Annotated[float, Rule("above 0", lambda value: value > 0, MOST)]
LearningRate = Annotated[float, Rule("above 0, at most 1", lambda rate: 0 < rate <= 1)]
Share = between(float, 0, 1)
BelowOne = Annotated[float, Rule("at least 0 and below 1", lambda value: 0 <= value < 1)]
Steps = between(int, 1, MOST_STEPS)
Guidance = between(float, -MOST_GUIDANCE, MOST_GUIDANCE)
Side = Annotated[int, Rule("a positive multiple of 8", lambda pixels: pixels > 0 and pixels % 8 == 0)]
Seed = Annotated[int, Rule("from 0 to 2^63 - 1", lambda seed: 0 <= seed < 2**63)]

_KINDS = {int: Integral, float: Real}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}


class Checked:
    """Base of dataclasses of options: every field is checked by its annotation when an instance is made.

    A subclass with rules between fields calls `super().__post_init__()` before it checks them.
    """

    def __post_init__(self):
        """Raises UserError for a value that its annotation does not allow."""
        hints = get_type_hints(type(self), include_extras=True)
        for field in dataclasses.fields(self):
            check_value(field.name, getattr(self, field.name), hints[field.name])


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raises UserError for a value that an annotation does not allow."""
    if not _fits(value, hint):
        raise UserError(refusal(name, value, hint))


def refusal(name: str, value: Any, hint: Any) -> str:
    """What was given for an option, and what its annotation allows."""
    shown = repr(value) if len(repr(value)) <= 100 else f"{repr(value)[:100]}..."
    return f"{name} is {shown}, but must be {_allowed(hint, value)}."


def _fits(value: Any, hint: Any) -> bool:
    """Whether an annotation allows a value."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        rule = parts[1]
        return _fits(value, parts[0]) and rule.holds(value) and (rule.most is None or value <= rule.most)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple and ... not in parts:
        return isinstance(value, list | tuple) and len(value) == len(parts) and all(map(_fits, value, parts))
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(_fits(entry, parts[0]) for entry in value)
    return isinstance(value, origin or _KINDS.get(hint, hint)) and not (hint in _KINDS and isinstance(value, bool))


def _allowed(hint: Any, value: Any) -> str:
    """An annotation in words, for who gave `value`."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        rule = parts[1]
        most = f", at most {rule.most:,}" if rule.most and isinstance(value, Real) and value > rule.most else ""
        return f"{_WORDS[parts[0]]}, {rule.text}{most}"
    if origin in (Union, UnionType):
        return ", or ".join(_allowed(part, value) for part in parts)
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin in (list, tuple):
        number = "" if origin is list else f"{len(parts)} "
        return f"{number}values, each {_allowed(parts[0], value)}"
    return _WORDS.get(hint, "names with values")


def check_pixels(height: int, width: int) -> None:
    """Raises UserError for a picture of more pixels than Pillow opens without a warning."""
    if height * width > MOST_PIXELS:
        raise UserError(
            f"A picture of {height} x {width} pixels has {height * width:,}; at most {MOST_PIXELS:,} can be drawn. "
            "Give a smaller height or width."
        )
