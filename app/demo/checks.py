"""Checks of a request, before anything is drawn."""

import math
import re
import reprlib
import warnings
from dataclasses import replace
from typing import Any, get_args

from debias_diffusion.errors import UserError, near_matches, reason
from debias_diffusion.pipelines import parse_weights
from debias_diffusion.pipelines.rendering import cleaned
from debias_diffusion.tokens import clean

from ..prompts import MAX_SEED, check_prompt, check_text, parse_seed
from .models import DemoModels
from .request import MOST_GUIDANCE, MOST_IMAGES, MOST_SCENES, MOST_STEPS, LongPrompts, Request
from .toy_scenes import random_scene

MOST_BRACKETS = 20  # nested: 1.1 to this power is a weight of 7
# All control characters but tab and line ends.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def unweighted(text: str, weighting: bool) -> str:
    """A prompt's text as encoders read it: cleaned, without the syntax of weights."""
    if not weighting:
        return clean(text)
    return " ".join("".join(run for run, _ in part) for part in parse_weights(cleaned(text, weighting)))


def check(request: Request, models: DemoModels) -> Request:
    """The request with whole numbers as int and encoders as a tuple, if all of it can be drawn.

    Raises:
        UserError: a value, of whatever type, is not allowed.
    """
    for name in ("prompt", "negative_prompt"):
        text = getattr(request, name)
        check_is_text(name.replace("_", " "), text)
        _check_characters(name.replace("_", " "), text, request.weighting)
    check_prompt(request.prompt)
    if request.long_prompts == "windows":
        # The name of earlier releases.
        warnings.warn('long_prompts="windows" is now "chunks"; the old name goes', FutureWarning, stacklevel=2)
        request = replace(request, long_prompts="chunks")
    _check_scene(request, models)
    _check_one_of("scheduler", request.scheduler, models.schedulers)
    check_long_prompts(request.long_prompts)
    if not isinstance(request.weighting, bool):
        raise UserError(f"weighting must be true or false, got {shown(request.weighting)}.")
    numbers = {
        "steps": whole_number("steps", request.steps, 1, MOST_STEPS),
        "images": whole_number("images", request.images, 1, MOST_IMAGES),
        "guidance_scale": _guidance(request.guidance_scale),
    }
    numbers["seed"] = _seed(request.seed, numbers["images"])
    numbers["height"], numbers["width"] = _size(request.height, request.width, models)
    return replace(request, encoders=check_labels(request.encoders, models), **numbers)


def _check_scene(request: Request, models: DemoModels) -> None:
    """Raises UserError unless the prompt is the caption of the request's scene, if it has one."""
    if request.scene is None:
        return
    number = whole_number("scene", request.scene, 0, MOST_SCENES - 1)
    if not models.is_toy or random_scene(number).caption != request.prompt:
        raise UserError(f"The prompt is not the caption of scene {number} of the toy world. Leave the scene out.")


def check_is_text(name: str, text: Any) -> None:
    """Raises UserError unless `text` is a string of allowed length that can be written as UTF-8."""
    if not isinstance(text, str):
        raise UserError(f"The {name} must be text, got {shown(text)}.")
    check_text(name, text)


def _check_characters(name: str, text: str, weighting: bool) -> None:
    control = _CONTROL.search(text)
    if control is not None:
        where = f"at character {control.start() + 1:,}"
        raise UserError(f"The {name} contains the control character {control[0]!r} {where}. Remove it.")
    if weighting:
        check_weights(name, text)


def check_weights(name: str, text: str, finished: bool = True) -> None:
    """Raises UserError where the weights of a text cannot be used.

    Args:
        name: of the text.
        text: with weights.
        finished: False while a person is typing: unmatched brackets are allowed. In a finished prompt they are not,
            because which bracket was meant is a guess.
    """
    opened: list[str] = []
    hint = "Match brackets, write \\( \\) \\[ \\] for brackets that are text, or turn weighting off."
    for match in re.finditer(r"\\[()\[\]\\+-]|[()\[\]]", text):
        bracket, where = match[0], f"at character {match.start() + 1:,}"
        if bracket in "([":
            opened.append(bracket)
            if len(opened) > MOST_BRACKETS:
                raise UserError(f"The {name} has more than {MOST_BRACKETS} nested brackets {where}. Use fewer.")
        elif bracket in ")]":
            if opened and opened[-1] == {")": "(", "]": "["}[bracket]:
                opened.pop()
            elif finished:
                raise UserError(f"The bracket {bracket!r} of the {name} {where} has no opening one. {hint}")
    if opened and finished:
        raise UserError(f"The bracket {opened[-1]!r} of the {name} is never closed. {hint}")
    try:
        parse_weights(cleaned(text, weighting=True))
    except ValueError as error:
        raise UserError(f"The {name} cannot be read: {reason(error)}.") from error


def _check_one_of(name: str, value: Any, allowed: Any) -> None:
    if not isinstance(value, str) or value not in allowed:
        near = near_matches(value, allowed) if isinstance(value, str) else ""
        raise UserError(f"There is no {name} {shown(value)}.{near} Choose one of: {', '.join(allowed)}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole_number(name: str, value: Any, least: int, most: int) -> int:
    """`value` as an int. Raises UserError unless it is a whole number from `least` to `most`."""
    if not _is_number(value) or not least <= value <= most or value != int(value):
        raise UserError(f"{name} must be a whole number from {least} to {most:,}, got {shown(value)}.")
    return int(value)


def _guidance(value: Any) -> float:
    if not _is_number(value) or not 0 <= value <= MOST_GUIDANCE:
        raise UserError(f"The guidance scale must be a number from 0 to {MOST_GUIDANCE:g}, got {shown(value)}.")
    return float(value)


def _seed(value: Any, images: int) -> int:
    seed = parse_seed(value)
    if seed > MAX_SEED - images + 1:
        raise UserError(f"The seed {seed} leaves no seeds for {images} images up to 2^63 - 1. Give a smaller one.")
    return seed


def _size(height: Any, width: Any, models: DemoModels) -> tuple[int, int]:
    most = 2 * math.prod(models.size)
    for name, value, native in zip(("height", "width"), (height, width), models.size, strict=True):
        if models.is_toy and value != native:
            raise UserError(f"The {name} of {models.base} is {native} pixels and cannot change, got {shown(value)}.")
        if not _is_number(value) or not native // 4 <= value <= most or value % 8:
            raise UserError(
                f"The {name} must be a multiple of 8 pixels, at least {native // 4}, got {shown(value)}. The model's "
                f"native {name} is {native}."
            )
    if height * width > most:
        raise UserError(
            f"{int(height)} x {int(width)} are {int(height * width):,} pixels; at most {most:,} are allowed, twice the "
            f"model's native {models.size[0]} x {models.size[1]}. Make the height or the width smaller."
        )
    return int(height), int(width)


def check_long_prompts(value: Any) -> None:
    """Raises UserError unless `value` is a way to read long prompts."""
    _check_one_of("long_prompts", value, get_args(LongPrompts))


def check_labels(value: Any, models: DemoModels) -> tuple[str, ...]:
    """The labels as a tuple. Raises UserError unless they are existing encoders, at least one, each named once."""
    known = ", ".join(models.labels)
    if not isinstance(value, list | tuple) or not value:
        raise UserError(f"No encoder is chosen (got {shown(value)}). Choose at least one of: {known}.")
    for label in value:
        _check_one_of("encoder", label, models.labels)
    if len(set(value)) < len(value):
        raise UserError(f"An encoder is named twice in {shown(list(value))}. Name each once.")
    return tuple(value)


def shown(value: Any) -> str:
    """A value for a message, shortened, whatever it is and however deeply nested."""
    return _SHORT.repr(value)
