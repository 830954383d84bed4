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


def above_zero(most: float) -> Any:
    """The type of numbers above 0, at most `most`."""
    return Annotated[float, Rule(f"above 0, at most {most:g}", lambda value: 0 < value <= most)]


Tower = Literal["image", "text"]
Layer = Literal["penultimate", "last"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
KEEP = 20  # Long-CLIP: the first 20 positions are well trained and are kept
SHAREGPT4V_HELD_OUT = 1000  # its first entries, a validation set; as many of other data are held out or evaluated
FACTOR = 4  # positions that each of the others is stretched to

MOST = 10**9  # of counts, rates and weights
MOST_PIXELS = 89_478_485  # Pillow's own limit, above which it warns of a picture that it opens

PositiveInt = at_least(int, 1)
NonNegativeInt = at_least(int, 0)
NonNegativeFloat = at_least(float, 0)
PositiveFloat = Annotated[float, Rule("above 0", lambda value: value > 0, MOST)]
LearningRate = above_zero(1)
Share = between(float, 0, 1)
BelowOne = Annotated[float, Rule("at least 0 and below 1", lambda value: 0 <= value < 1)]
Steps = between(int, 1, 1000)  # the noise levels that models are trained with
Guidance = between(float, -1000.0, 1000.0)
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
            value, hint = getattr(self, field.name), hints[field.name]
            if not _compare(value, hint)[0]:
                raise UserError(refusal(field.name, value, hint))


def refusal(name: str, value: Any, hint: Any) -> str:
    """What was given for an option, and what its annotation allows."""
    shown = repr(value) if len(repr(value)) <= 100 else f"{repr(value)[:100]}..."
    return f"{name} is {shown}, but must be {_compare(value, hint)[1]}."


def _compare(value: Any, hint: Any) -> tuple[bool, str]:
    """Whether an annotation allows a value, and in words what it allows."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        (fits, kind), rule = _compare(value, parts[0]), parts[1]
        is_more = rule.most is not None and isinstance(value, Real) and value > rule.most
        most = f", at most {rule.most:,}" if is_more else ""
        return fits and rule.holds(value) and not is_more, f"{kind}, {rule.text}{most}"
    if origin in (Union, UnionType):
        fits, kinds = zip(*(_compare(value, part) for part in parts), strict=True)
        return any(fits), ", or ".join(kinds)
    if origin is Literal:
        return value in parts, " or ".join(map(str, parts))
    if origin in (list, tuple):
        size = len(parts) if origin is tuple and ... not in parts else None
        fits = isinstance(value, list | tuple) and size in (None, len(value))
        fits = fits and all(_compare(entry, parts[0])[0] for entry in value)
        return fits, f"{f'{size} ' if size else ''}values, each {_compare(value, parts[0])[1]}"
    fits = isinstance(value, origin or _KINDS.get(hint, hint)) and not (hint in _KINDS and isinstance(value, bool))
    return fits, _WORDS.get(hint, "names with values")
