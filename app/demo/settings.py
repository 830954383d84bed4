"""The limits of a request, and its way into a PNG and back."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from PIL import Image

from debias_diffusion.encoders import Reading
from debias_diffusion.errors import UserError, near_matches, reason
from debias_diffusion.limits import Side, check_value
from debias_diffusion.pipelines import PromptLayout, parse_weights
from debias_diffusion.pipelines.png import SETTINGS_KEY
from debias_diffusion.pipelines.rendering import runtime_settings

from ..prompts import check_last_seed, check_prompt, check_text, parse_seed
from .models import DemoModels
from .request import MOST_GUIDANCE, MOST_IMAGES, MOST_STEPS, Request
from .toy import MOST_SCENES, random_scene

# Settings of a PNG that have the same name and meaning in a request.
_SHARED = ("prompt", "steps", "guidance_scale", "height", "width", "weighting", "images", "scheduler", "scene")
_HINT = "Give a PNG saved from this demo or by `debias-diffusion generate`, unchanged."


def check(request: Request, models: DemoModels) -> Request:
    """The request with whole numbers as int, encoders as a tuple, and its scene only if the prompt is its caption.

    Raises:
        UserError: a value is not allowed.
    """
    check_text_settings(request, models)
    check_prompt(request.prompt)
    _check_one_of("scheduler", request.scheduler, models.schedulers)
    whole = {name: int(_in_range(name, getattr(request, name), 1, most, 1)) for name, most in _MOST.items()}
    _in_range("guidance_scale", request.guidance_scale, 0, MOST_GUIDANCE)
    seed = parse_seed(request.seed)
    check_last_seed(seed, whole["images"])
    return replace(
        request,
        encoders=tuple(request.encoders),
        seed=seed,
        guidance_scale=float(request.guidance_scale),
        **whole,
        **_size(request, models),
        scene=request.scene if _is_caption(request, models) else None,
    )


_MOST = {"steps": MOST_STEPS, "images": MOST_IMAGES}


def check_text_settings(request: Request, models: DemoModels) -> None:
    """Raises UserError for texts (which may be empty), encoders or a reading that cannot be used."""
    for name in ("prompt", "negative_prompt"):
        text, name = getattr(request, name), name.replace("_", " ")
        if not isinstance(text, str):
            raise UserError(f"The {name} must be text, got {str(text)[:80]!r}.")
        check_text(name, text)
        without_weights(text, request.weighting)
    if not request.encoders:
        raise UserError(f"No encoder is chosen. Choose at least one of: {', '.join(models.labels)}.")
    for label in request.encoders:
        _check_one_of("encoder", label, models.labels)
    if len(set(request.encoders)) < len(request.encoders):
        raise UserError(f"An encoder is named twice in {list(request.encoders)}. Name each once.")
    _check_one_of("reading", request.reading, get_args(Reading))


def without_weights(text: str, weighting: bool) -> str:
    """A prompt as written, without the syntax of weights if they are read. Raises UserError for an infinite weight."""
    try:
        return " ".join("".join(run for run, _ in part) for part in parse_weights(text)) if weighting else text
    except ValueError as error:
        raise UserError(f"The prompt's weights cannot be read: {reason(error)}.") from error


def _check_one_of(name: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        hint = near_matches(value, allowed)
        raise UserError(f"There is no {name} {str(value)[:80]!r}.{hint} Choose one of: {', '.join(allowed)}.")


def _in_range(name: str, value: float, least: float, most: float, step: float | None = None) -> float:
    """`value`, if it is from `least` to `most` and a multiple of `step`."""
    if value is None or not least <= value <= most or (step and value % step):  # NaN is nowhere
        kind = "a whole number" if step == 1 else "a number"
        raise UserError(f"The {name.replace('_', ' ')} must be {kind} from {least} to {most:g}, got {value}.")
    return value


def _size(request: Request, models: DemoModels) -> dict[str, int]:
    sides, most = {"height": request.height, "width": request.width}, 2 * math.prod(models.size)
    for (name, value), native in zip(sides.items(), models.size, strict=True):
        if models.is_toy and value != native:
            raise UserError(f"The {name} of {models.base} is {native} pixels and cannot change, got {value}.")
        check_value(name, int(_in_range(name, value, 8, most)), Side)
    if math.prod(sides.values()) > most:
        raise UserError(
            f"{sides['height']} x {sides['width']} are {math.prod(sides.values()):,} pixels; at most {most:,} are "
            f"allowed, twice the model's native {models.size[0]} x {models.size[1]}. Make one side smaller."
        )
    return {name: int(value) for name, value in sides.items()}


def _is_caption(request: Request, models: DemoModels) -> bool:
    """Whether the prompt is the caption of the request's scene."""
    known = models.is_toy and isinstance(request.scene, int) and 0 <= request.scene < MOST_SCENES
    return known and random_scene(request.scene).caption == request.prompt


# In a PNG


def to_settings(models: DemoModels, request: Request, label: str, number: int, layout: PromptLayout) -> dict:
    """The settings of an image as `debias-diffusion generate` writes them, and the rest of the request.

    Args:
        models: the demo's models.
        request: checked.
        label: the encoder.
        number: of the image among those of the encoder, from 1.
        layout: how the prompt was encoded.
    """
    reading = models.reading(label, request)
    return {name: getattr(request, name) for name in _SHARED} | {
        "negative_prompt": request.negative_prompt or None,
        "prompt_2": None,
        "seed": request.seed + number - 1,
        "image": number,
        "base": models.base,
        "encoder": label,
        "encoders": list(request.encoders),
        "encoder_2": None,
        "reading": reading,
        "chosen_reading": request.reading,
        **runtime_settings(models.device, models.dtype),
        **layout._asdict(),
    }


@dataclass(frozen=True)
class Restored:
    """What the settings in a PNG say.

    Attributes:
        request: checked.
        notes: in words, what had to change because this demo has other models.
        label: the encoder of this image, None if it is not here.
        seed: of this image.
    """

    request: Request
    notes: list[str]
    label: str | None
    seed: int


def from_png(path: str | Path, models: DemoModels) -> Restored:
    """The request that an image of this demo, or of `debias-diffusion generate`, was generated from.

    Only the text of the PNG is read. Missing encoders are left out; a missing scheduler and the size of a toy are
    replaced by the demo's own.

    Raises:
        UserError: the file is no PNG, contains no settings, or its settings cannot be used.
    """
    try:
        with Image.open(path, formats=("PNG",)) as image:
            text = image.info.get(SETTINGS_KEY)
    except Exception as error:  # a hostile file can make an image reader raise anything
        raise UserError(f"The file cannot be read as a PNG ({reason(error)}). {_HINT}") from None
    if text is None:
        raise UserError(f"The PNG contains no settings; programs that share images often remove them. {_HINT}")
    try:
        return _restored(json.loads(text), models)
    except UserError:
        raise
    except Exception as error:  # nor is there an end to what a hostile text can say
        raise UserError(f"The PNG's settings cannot be used ({reason(error)}). {_HINT}") from None


def _restored(settings: dict, models: DemoModels) -> Restored:
    notes, values = [], {name: settings[name] for name in _SHARED if name in settings}
    reading = settings.get("reading", "overlap")
    values["reading"] = settings.get("chosen_reading", reading)
    values["negative_prompt"] = settings.get("negative_prompt") or ""
    number, seed = int(settings.get("image", 1)), parse_seed(settings.get("seed", 0))
    base, encoder = settings.get("base"), settings.get("encoder") or "original"
    if base is not None and models.base not in (base, Path(base).name):
        notes.append(f"It was generated with the SDXL checkpoint {base[:80]!r}; this demo has {models.base}.")
    # `generate` writes an encoder as it was passed, which may be a path that ends in the label.
    known = {
        name: next((end for end in (name, Path(name).name) if end in models.labels), None)
        for name in settings.get("encoders", [encoder])
    }
    missing = ", ".join(name for name, label in known.items() if label is None)
    if missing:
        notes.append(f"The encoder {missing[:80]!r} is not here and is left out.")
    values["encoders"] = tuple(dict.fromkeys(filter(None, known.values()))) or tuple(models.labels)
    native = models.schedulers[0]
    if values.setdefault("scheduler", native) not in models.schedulers:
        notes.append(f"There is no scheduler {values['scheduler'][:80]!r} here; {native} is used.")
        values["scheduler"] = native
    if models.is_toy and (values.get("height"), values.get("width")) not in (models.size, (None, None)):
        notes.append(f"Images have {models.size[0]} x {models.size[1]} pixels here.")
        values["height"], values["width"] = models.size
    notes += [f"The {name} is not used here." for name in ("prompt_2", "encoder_2") if settings.get(name) is not None]
    request = replace(models.defaults, **{"prompt": ""} | values, seed=parse_seed(seed - number + 1))
    return Restored(check(request, models), notes, known.get(encoder), seed)
