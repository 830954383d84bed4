"""What a person asks the demo for: checked before anything is drawn, and read back from the pictures."""

import io
import json
import math
import re
import reprlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from PIL import Image

from debias_diffusion.errors import UserError, near_matches, reason
from debias_diffusion.pipelines import parse_weights
from debias_diffusion.tokens import clean

from ..generate.png_settings import SETTINGS_KEY
from ..generate.prompts import MAX_SEED, check_prompt, check_text, cleaned, parse_seed

if TYPE_CHECKING:
    from .models import Models

LongPrompts = Literal["auto", "windows", "cut"]
MOST_STEPS = 100
MOST_GUIDANCE = 30.0
MOST_IMAGES = 8
BUDGET = 1000  # denoising steps of one request: 8 images by 4 encoders in 30 steps
MOST_BRACKETS = 20  # one in another: 1.1 to this power is a weight of 7
MOST_PNG = 32 * 2**20  # bytes, more than the largest picture has uncompressed
MOST_SETTINGS = 2**19  # characters: two prompts in which each is written as \uXXXX\uXXXX, and what else there is
# All but tab and the ends of lines.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Request:
    """Everything that decides the pictures; `dataclasses.asdict` of it is JSON.

    Attributes:
        prompt: what to draw.
        encoders: labels of the encoders that draw it, in turn.
        negative_prompt: what not to draw; "" for nothing.
        seed: of the first image's noise; image i, from 0, has this seed + i.
        steps: denoising steps.
        guidance_scale: how strongly the prompt is followed; up to 1 is no guidance.
        height, width: pixels.
        images: pictures by each encoder.
        scheduler: one of `Models.schedulers`.
        weighting: (word:1.3), [word], word++ and BREAK in prompts are weights.
        long_prompts: "auto": encoders with the window of stock SDXL are cut there, as in stock SDXL, and longer ones
            read all; "windows": all read everything, in as many windows as it takes; "cut": all are cut there.
    """

    prompt: str
    encoders: tuple[str, ...]
    negative_prompt: str = ""
    seed: int = 0
    steps: int = 30
    guidance_scale: float = 7.0
    height: int = 1024
    width: int = 1024
    images: int = 1
    scheduler: str = "Euler"
    weighting: bool = False
    long_prompts: LongPrompts = "auto"


def unweighted(text: str, weighting: bool) -> str:
    """A prompt's text as encoders read it, cleaned and without the marks of weights."""
    if not weighting:
        return clean(text)
    return " ".join("".join(run for run, _ in part) for part in parse_weights(cleaned(text, weighting)))


def check(request: Request, models: "Models") -> Request:
    """The request with whole numbers as int and encoders as a tuple, if all of it can be drawn.

    Raises:
        UserError: something cannot; values of any type are refused with a word.
    """
    for name in ("prompt", "negative_prompt"):
        _check_text(name.replace("_", " "), getattr(request, name), request.weighting)
    check_prompt(request.prompt)
    for name, allowed in (("scheduler", models.schedulers), ("long_prompts", get_args(LongPrompts))):
        _check_one_of(name, getattr(request, name), allowed)
    if not isinstance(request.weighting, bool):
        raise UserError(f"weighting must be true or false, got {_shown(request.weighting)}.")
    numbers = {
        name: _whole(name, getattr(request, name), *ends)
        for name, ends in {"steps": (1, MOST_STEPS), "images": (1, MOST_IMAGES)}.items()
    }
    numbers["guidance_scale"] = _guidance(request.guidance_scale)
    numbers["seed"] = _seed(request.seed, numbers["images"])
    numbers["height"], numbers["width"] = _size(request.height, request.width, models)
    return replace(request, encoders=check_labels(request.encoders, models), **numbers)


def check_is_text(name: str, text: Any) -> None:
    """Raises UserError for anything but text, and for text that is too long or holds what no file can hold."""
    if not isinstance(text, str):
        raise UserError(f"The {name} must be text, got {_shown(text)}.")
    check_text(name, text)


def _check_text(name: str, text: Any, weighting: bool) -> None:
    check_is_text(name, text)
    control = _CONTROL.search(text)
    if control is not None:
        where = f"at character {control.start() + 1:,}"
        raise UserError(f"The {name} holds the control character {control[0]!r} {where}. Remove it.")
    if weighting:
        check_weights(name, text)


def check_weights(name: str, text: str, finished: bool = True) -> None:
    """Raises UserError where the weights of a text cannot be used.

    Args:
        name: of the text.
        text: with weights.
        finished: False while a person types: brackets that do not match may yet do. Once it is finished, which one was
            meant is a guess.
    """
    opened: list[str] = []
    hint = "Match brackets, write \\( \\) \\[ \\] for those that are text, or turn weighting off."
    for match in re.finditer(r"\\[()\[\]\\+-]|[()\[\]]", text):
        bracket, where = match[0], f"at character {match.start() + 1:,}"
        if bracket in "([":
            opened.append(bracket)
            if len(opened) > MOST_BRACKETS:
                raise UserError(f"The {name} has more than {MOST_BRACKETS} brackets in each other {where}. Use fewer.")
        elif bracket in ")]":
            if opened and opened[-1] == {")": "(", "]": "["}[bracket]:
                opened.pop()
            elif finished:
                raise UserError(f"The bracket {bracket!r} of the {name} {where} closes none of its kind. {hint}")
    if opened and finished:
        raise UserError(f"The bracket {opened[-1]!r} of the {name} is never closed. {hint}")
    try:
        parse_weights(cleaned(text, weighting=True))
    except ValueError as error:
        raise UserError(f"The {name} cannot be read: {reason(error)}.") from error


def _check_one_of(name: str, value: Any, allowed: Any) -> None:
    if not isinstance(value, str) or value not in allowed:
        near = near_matches(value, allowed) if isinstance(value, str) else ""
        raise UserError(f"There is no {name} {_shown(value)}.{near} Choose one of: {', '.join(allowed)}.")


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise UserError(f"{name} must be a whole number from {least} to {most:,}, got {_shown(value)}.")
    if value != int(value):
        raise UserError(f"{name} must be a whole number from {least} to {most:,}, got {value}.")
    return int(value)


def _guidance(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= MOST_GUIDANCE:
        raise UserError(f"The guidance scale must be a number from 0 to {MOST_GUIDANCE:g}, got {_shown(value)}.")
    return float(value)


def _seed(value: Any, images: int) -> int:
    seed = parse_seed(value)
    if seed > MAX_SEED - images + 1:
        raise UserError(f"The seed {seed} leaves no seeds for {images} images up to 2^63 - 1. Give a smaller one.")
    return seed


def _size(height: Any, width: Any, models: "Models") -> tuple[int, int]:
    own, most = models.size, 2 * math.prod(models.size)
    for name, value, its in (("height", height, own[0]), ("width", width, own[1])):
        if models.is_toy and value != its:
            raise UserError(f"The {name} of {models.base} is {its} pixels and cannot be changed, got {_shown(value)}.")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        least = its // 4
        if not number or not least <= value <= most or value % 8:
            raise UserError(
                f"The {name} must be a multiple of 8 pixels, at least {least}, got {_shown(value)}. The model's own is "
                f"{its}."
            )
    if height * width > most:
        raise UserError(
            f"{int(height)} x {int(width)} are {int(height * width):,} pixels; at most {most:,} are drawn, twice the "
            f"model's own {own[0]} x {own[1]}. Make the height or the width smaller."
        )
    return int(height), int(width)


def check_labels(value: Any, models: "Models") -> tuple[str, ...]:
    """Labels of encoders that are there, at least one and none twice; UserError for anything else."""
    known = ", ".join(models.labels)
    if not isinstance(value, list | tuple) or not value:
        raise UserError(f"No encoder is chosen (got {_shown(value)}). Choose at least one of: {known}.")
    for label in value:
        _check_one_of("encoder", label, models.labels)
    if len(set(value)) < len(value):
        raise UserError(f"An encoder is named twice in {_shown(list(value))}. Name each once.")
    return tuple(value)


def _shown(value: Any) -> str:
    """A value in a message, whatever it is and however deep."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


# Pictures that are given back


def request_of_png(file: str | bytes, models: "Models") -> tuple[Request, list[str]]:
    """What a picture of this demo, or of `debias-diffusion generate`, was asked for with.

    Only the file's text is read; the picture itself is never decoded.

    Args:
        file: the PNG's path, or its content.
        models: what there is to draw with.

    Returns:
        The request, checked; and in words, what of it had to be changed because this demo has other models: encoders
        that it does not have are left out, the size of a toy and a scheduler that is not there are its own.

    Raises:
        UserError: it is no PNG, holds no settings, or these cannot be used.
    """
    settings = _settings(_text(file))
    notes: list[str] = []
    request = _fitted(_request(settings, models), settings.get("base"), models, notes)
    notes += [f"Its {name} is not used here." for name in ("prompt_2", "encoder_2") if settings.get(name) is not None]
    return check(request, models), notes


_OURS = "Give a PNG that this demo or `debias-diffusion generate` wrote, as it was saved."


def _text(file: str | bytes) -> str:
    """The text chunk with the settings."""
    size = len(file) if isinstance(file, bytes) else Path(file).stat().st_size
    if size > MOST_PNG:
        raise UserError(f"The file has {size:,} bytes; pictures have at most {MOST_PNG:,}. {_OURS}")
    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=("PNG",)) as image:
            text = image.info.get(SETTINGS_KEY)
    except Exception as error:  # a hostile file can make a reader of pictures raise anything
        raise UserError(f"The file cannot be read as a PNG ({reason(error)}). {_OURS}") from None
    if not isinstance(text, str):
        raise UserError(f"The PNG holds no settings; programs that share pictures often remove them. {_OURS}")
    if len(text) > MOST_SETTINGS:
        raise UserError(f"The PNG's settings have {len(text):,} characters; {MOST_SETTINGS:,} are read. {_OURS}")
    return text


def _settings(text: str) -> dict:
    def refuse(name: str):
        raise ValueError(f"{name} is no number")

    try:
        settings = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise UserError(f"The PNG's settings are not JSON ({reason(error)}). {_OURS}") from None
    if not isinstance(settings, dict):
        raise UserError(f"The PNG's settings are {_shown(settings)}. {_OURS}")
    return settings


# What a PNG's settings call as a request does.
SAME = ("prompt", "steps", "guidance_scale", "height", "width", "weighting", "images", "scheduler", "long_prompts")


def _request(settings: dict, models: "Models") -> Request:
    """What the settings say, of whatever type; what `generate` does not write is as it draws."""
    if "prompt" not in settings:
        raise UserError(f"The PNG's settings name no prompt. {_OURS}")
    values = {"long_prompts": "windows"} | {name: settings[name] for name in SAME if name in settings}
    negative, encoder = settings.get("negative_prompt"), settings.get("encoder")
    values["negative_prompt"] = "" if negative is None else negative
    values["encoders"] = settings.get("encoders", ["original" if encoder is None else encoder])
    if "seed" in settings:
        picture = _whole("picture", settings.get("picture", 1), 1, MOST_IMAGES)
        values["seed"] = parse_seed(settings["seed"]) - picture + 1
    return replace(models.defaults, **values)


def _fitted(request: Request, base: Any, models: "Models", notes: list[str]) -> Request:
    changed: dict[str, Any] = {}
    if isinstance(base, str) and models.base not in (base, Path(base).name):
        notes.append(f"It was drawn with the base {_shown(base)}; here it is {models.base}, which draws otherwise.")
    if isinstance(request.encoders, list | tuple) and all(isinstance(name, str) for name in request.encoders):
        changed["encoders"] = _known_encoders(request.encoders, models, notes)
    if isinstance(request.scheduler, str) and request.scheduler not in models.schedulers:
        changed["scheduler"] = models.schedulers[0]
        notes.append(f"There is no scheduler {_shown(request.scheduler)} here; {models.schedulers[0]} is used.")
    if models.is_toy and (request.height, request.width) != models.size:
        changed["height"], changed["width"] = models.size
        notes.append(f"Pictures have {models.size[0]} x {models.size[1]} pixels here.")
    return replace(request, **changed)


def _known_encoders(encoders: Any, models: "Models", notes: list[str]) -> tuple[str, ...]:
    # `generate` writes an encoder as it was given, which may be a path whose last part is the label.
    found = {name: next((its for its in (name, Path(name).name) if its in models.labels), None) for name in encoders}
    lost = [name for name, label in found.items() if label is None]
    if lost:
        notes.append(f"Without the encoder {_shown(', '.join(lost))}, which is not here.")
    return tuple(dict.fromkeys(label for label in found.values() if label is not None)) or tuple(models.labels)
