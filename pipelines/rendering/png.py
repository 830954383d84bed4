"""PNGs that hold the settings of their image: for people, for viewers, and for the demo, which restores them."""

import json
import re
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from debias_diffusion.files import atomic_file, open_regular

SETTINGS_KEY = "settings"  # of the PNG's text chunk, for this program
PARAMETERS_KEY = "parameters"  # for viewers that read the chunk of A1111's interface

# diffusers' schedulers by the names that A1111's interface gives to samplers
SAMPLERS = {
    "DDIMScheduler": "DDIM",
    "DPMSolverMultistepScheduler": "DPM++ 2M",
    "DPMSolverSDEScheduler": "DPM++ SDE",
    "DPMSolverSinglestepScheduler": "DPM++ 2S",
    "EulerAncestralDiscreteScheduler": "Euler a",
    "EulerDiscreteScheduler": "Euler",
    "HeunDiscreteScheduler": "Heun",
    "KDPM2AncestralDiscreteScheduler": "DPM2 a",
    "KDPM2DiscreteScheduler": "DPM2",
    "LCMScheduler": "LCM",
    "LMSDiscreteScheduler": "LMS",
    "PNDMScheduler": "PLMS",
    "UniPCMultistepScheduler": "UniPC",
}


def sampler(scheduler: str) -> str:
    """A1111's name for a scheduler's class in diffusers; of others the class without "Scheduler"."""
    return SAMPLERS.get(scheduler, scheduler.removesuffix("Scheduler"))


def settings_text(settings: dict) -> dict[str, str]:
    """The text chunks with an image's settings, for this program and in the format of A1111's interface.

    That is the prompt; a line "Negative prompt: ..." if there is one; and a last line "Steps: 30, Sampler: Euler, ...".
    """
    fields = {
        "Steps": settings["steps"],
        "Sampler": settings["scheduler"],
        "CFG scale": settings["guidance_scale"],
        "Seed": settings["seed"],
        "Size": f"{settings['width']}x{settings['height']}",
        "Model": settings["base"].rstrip("/\\").replace("\\", "/").rpartition("/")[2],
        "Version": f"debias-diffusion {version('debias-diffusion')}",
    }
    lines = [settings["prompt"]]
    if settings["negative_prompt"]:
        lines.append(f"Negative prompt: {settings['negative_prompt']}")
    values = {name: str(value) for name, value in fields.items()}
    for name, value in values.items():
        if re.search(r"[,:\n]", value):  # as A1111 does where a value would look like the next field
            values[name] = json.dumps(value, ensure_ascii=False)
    lines.append(", ".join(f"{name}: {value}" for name, value in values.items()))
    parameters = "\n".join(" ".join(line.split()) for line in lines)
    return {SETTINGS_KEY: json.dumps(settings), PARAMETERS_KEY: parameters}


def png_bytes(image: Image.Image, text: dict[str, str]) -> bytes:
    """An image and its text chunks as PNG."""
    info, png = PngInfo(), BytesIO()
    for key, value in text.items():
        info.add_text(key, value)
    image.save(png, format="PNG", pnginfo=info)
    return png.getvalue()


def write_png(image: Image.Image, path: Path, text: dict[str, str]) -> None:
    """Writes an image and its text chunks. A kill leaves the old file or the new one."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(png_bytes(image, text))


def read_settings(path: Path) -> dict | None:
    """The settings in a PNG, without decoding the image; None if it holds none."""
    try:
        with open_regular(path) as file, Image.open(file, formats=("PNG",)) as image:
            settings = json.loads(image.info[SETTINGS_KEY])
    except (OSError, SyntaxError, ValueError, KeyError, RecursionError, Image.DecompressionBombError):
        return None
    return settings if isinstance(settings, dict) else None


def first_difference(before: dict, wanted: dict) -> str:
    """The first of the `wanted` settings that differs from those of an image, in words; "" if there is none."""
    name = next((name for name in wanted if before.get(name) != wanted[name]), None)
    if name is None:
        return ""
    values = [before.get(name), wanted[name]]
    if all(isinstance(value, str) for value in values):
        # Of long prompts, the part that differs.
        same = next((i for i, (a, b) in enumerate(zip(*values, strict=False)) if a != b), min(map(len, values)))
        begin = max(0, same - 20)
        values = ["…" * (begin > 0) + value[begin : begin + 60] + "…" * (len(value) > begin + 60) for value in values]
    return f"{name} was {values[0]!r}, now {values[1]!r}"
