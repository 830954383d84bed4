"""Reads a request back from the settings in a PNG."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from debias_diffusion.errors import UserError, reason
from debias_diffusion.pipelines.png import SETTINGS_KEY

from ..prompts import parse_seed
from .checks import check, shown, whole_number
from .live_generation import Drawn
from .models import DemoModels
from .prompt_reading import prompt_reading, tokenize_prompt
from .request import MOST_IMAGES, SHARED_SETTINGS, Request

MOST_PNG = 32 * 2**20  # bytes, more than the largest image has uncompressed
MOST_SETTINGS = 2**19  # characters: two prompts of characters written as \uXXXX\uXXXX, and the rest
_HINT = "Give a PNG saved from this demo or by `debias-diffusion generate`, unchanged."


def request_of_png(file: str | bytes, models: DemoModels) -> tuple[Request, list[str]]:
    """The request that an image of this demo, or of `debias-diffusion generate`, was drawn from.

    Only the text of the PNG is read; `image_of_png` decodes its pixels.

    Args:
        file: the PNG's path, or its content.
        models: the demo's models.

    Returns:
        The checked request, and notes in words on what had to change because this demo has other models: missing
        encoders are left out, a missing scheduler and the size of a toy are replaced by the demo's own.

    Raises:
        UserError: the file is no PNG, contains no settings, or its settings cannot be used.
    """
    settings = _parsed(_settings_text(file))
    notes: list[str] = []
    request = _fitted(_request(settings, models), settings.get("base"), models, notes)
    unused = [name for name in ("prompt_2", "encoder_2") if settings.get(name) is not None]
    notes += [f"Its {name} is not used here." for name in unused]
    return check(request, models), notes


def image_of_png(file: bytes, request: Request, models: DemoModels) -> Drawn | None:
    """The image of a PNG that shows a scene of the toy world, so that it can be marked again; None of any other PNG.

    Its pixels are decoded only if it has the size of the toy world's images.

    Args:
        file: the PNG's content.
        request: the PNG's, from `request_of_png`.
        models: the demo's models.

    Raises:
        UserError: the image is damaged.
    """
    settings = _parsed(_settings_text(file))
    label = next(iter(_known([str(settings.get("encoder"))], models).values()))
    if request.scene is None or label is None:
        return None
    try:
        with Image.open(io.BytesIO(file), formats=("PNG",)) as image:
            if image.size != (request.width, request.height):
                return None
            image = image.convert("RGB")
    except Exception as error:  # a hostile file can make an image reader raise anything
        raise UserError(f"The PNG's image cannot be read ({reason(error)}). {_HINT}") from None
    picture = whole_number("picture", settings.get("picture", 1), 1, MOST_IMAGES)
    tokens = tokenize_prompt(request.prompt, models.counter, request.weighting)
    read = prompt_reading(models, label, tokens, request.long_prompts).in_words()
    return Drawn(label, picture, request.seed + picture - 1, image, file, read)


def _in_chunks(settings: dict) -> bool:
    """Whether a text encoder took several."""
    chunks = settings.get("chunks")
    return isinstance(chunks, list) and any(isinstance(count, int) and count > 1 for count in chunks)


def _settings_text(file: str | bytes) -> str:
    """The PNG's text chunk with the settings."""
    size = len(file) if isinstance(file, bytes) else Path(file).stat().st_size
    if size > MOST_PNG:
        raise UserError(f"The file has {size:,} bytes; at most {MOST_PNG:,} are read. {_HINT}")
    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=("PNG",)) as image:
            text = image.info.get(SETTINGS_KEY)
    except Exception as error:  # a hostile file can make an image reader raise anything
        raise UserError(f"The file cannot be read as a PNG ({reason(error)}). {_HINT}") from None
    if not isinstance(text, str):
        raise UserError(f"The PNG contains no settings; programs that share images often remove them. {_HINT}")
    if len(text) > MOST_SETTINGS:
        raise UserError(f"The PNG's settings have {len(text):,} characters; {MOST_SETTINGS:,} are read. {_HINT}")
    return text


def _parsed(text: str) -> dict:
    def refuse(name: str):
        raise ValueError(f"{name} is not a number")

    try:
        settings = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise UserError(f"The PNG's settings are not JSON ({reason(error)}). {_HINT}") from None
    if not isinstance(settings, dict):
        raise UserError(f"The PNG's settings are {shown(settings)}. {_HINT}")
    return settings


def _request(settings: dict, models: DemoModels) -> Request:
    """The settings as an unchecked request. Settings that `generate` does not write get its behaviour."""
    if "prompt" not in settings:
        raise UserError(f"The PNG's settings have no prompt. {_HINT}")
    reading = settings.get("reading")
    is_read = reading == "cut" or (reading == "separate" and _in_chunks(settings))
    values = {"long_prompts": reading if is_read else "chunks"}
    values |= {name: settings[name] for name in SHARED_SETTINGS if name in settings}
    negative, encoder = settings.get("negative_prompt"), settings.get("encoder")
    values["scene"] = settings.get("scene")
    values["negative_prompt"] = "" if negative is None else negative
    values["encoders"] = settings.get("encoders", ["original" if encoder is None else encoder])
    if "seed" in settings:
        picture = whole_number("picture", settings.get("picture", 1), 1, MOST_IMAGES)
        values["seed"] = parse_seed(settings["seed"]) - picture + 1
    return replace(models.defaults, **values)


def _fitted(request: Request, base: Any, models: DemoModels, notes: list[str]) -> Request:
    """The request with what this demo does not have replaced; says so in `notes`."""
    changed: dict[str, Any] = {}
    if isinstance(base, str) and models.base not in (base, Path(base).name):
        notes.append(f"It was drawn with the SDXL checkpoint {shown(base)}; this demo has {models.base}.")
    if isinstance(request.encoders, list | tuple) and all(isinstance(name, str) for name in request.encoders):
        changed["encoders"] = _known_encoders(request.encoders, models, notes)
    if isinstance(request.scheduler, str) and request.scheduler not in models.schedulers:
        changed["scheduler"] = models.schedulers[0]
        notes.append(f"There is no scheduler {shown(request.scheduler)} here; {models.schedulers[0]} is used.")
    if request.scene is not None and not models.is_toy:
        changed["scene"] = None
    if models.is_toy and (request.height, request.width) != models.size:
        changed["height"], changed["width"] = models.size
        notes.append(f"Images have {models.size[0]} x {models.size[1]} pixels here.")
    return replace(request, **changed)


def _known(encoders: Any, models: DemoModels) -> dict[str, str | None]:
    """The label of each encoder, None of those that are not here."""
    # `generate` writes an encoder as it was passed, which may be a path that ends in the label.
    return {name: next((end for end in (name, Path(name).name) if end in models.labels), None) for name in encoders}


def _known_encoders(encoders: Any, models: DemoModels, notes: list[str]) -> tuple[str, ...]:
    known = _known(encoders, models)
    missing = [name for name, label in known.items() if label is None]
    if missing:
        notes.append(f"The encoder {shown(', '.join(missing))} is not here and is left out.")
    return tuple(dict.fromkeys(label for label in known.values() if label is not None)) or tuple(models.labels)
