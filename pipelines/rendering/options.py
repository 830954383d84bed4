"""How images are rendered: options that `generate`, the evaluations and the demo share. Imports nothing large."""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal

from debias_diffusion.encoders.resolve import may_be_hub_id
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.limits import Checked, Guidance, Layer, Side, Steps, above_zero, between
from debias_diffusion.text.chunks import MOST_SHARPENING
from debias_diffusion.text.options import LongPromptOptions
from debias_diffusion.toyworld.shipped import shipped

# diffusers' classes of one UNet evaluation per step
Scheduler = Literal[
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "DPMSolverMultistepScheduler",
    "DDIMScheduler",
    "UniPCMultistepScheduler",
]
KARRAS = ("EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler")  # have its noise levels
ClipSkip = between(int, 1, 24)  # as A1111 and ComfyUI count layers, of which CLIP bigG has 32
Sharpening = above_zero(MOST_SHARPENING)


def split_base(name: str | os.PathLike) -> tuple[str, Path | None]:
    """(folder or hub id of the configurations, single file of weights or None) of an SDXL checkpoint's name. The folder
    is "" for a file that is named alone. Raises UserError for what is not there, and no hub id.
    """
    base = os.fspath(name)
    in_two = None if os.path.exists(base) else re.fullmatch(r"(.*?):((?:[A-Za-z]:[\\/])?[^:]*)", base)  # C: is a drive
    folder, file = in_two.groups() if in_two else ("", base)
    if file.endswith((".ckpt", ".pt", ".bin")) and os.path.isfile(file):
        raise UserError(f"{file!r} is a pickle, which can hold code, and is not read. Convert it to .safetensors.")
    if not file.endswith(".safetensors") or os.path.isdir(file):
        folder, file = base, ""
    configs = shipped(folder)
    has_configs = os.path.isdir(configs) or may_be_hub_id(configs) or (file and not folder)
    if not has_configs or (file and not os.path.isfile(file)):
        raise UserError(f"The SDXL checkpoint {base!r} is not there. Give a folder, a hub id or a .safetensors file.")
    return configs, Path(file) if file else None


@dataclass(kw_only=True)
class OfCheckpoint(Checked):
    """The checkpoint that a command works with.

    Attributes:
        base: An SDXL or Stable Diffusion 1.5 checkpoint: a folder in diffusers' layout, a hub id, a single .safetensors
            file, CONFIG:FILE.safetensors with the folder or hub id of its configuration and tokenizers, or toy/sdxl.
    """

    base: str

    def __post_init__(self):
        super().__post_init__()
        split_base(self.base)  # raises UserError for what is not there


@dataclass(kw_only=True)
class Denoising(Checked):
    """How a pipeline denoises.

    Attributes:
        steps: Denoising steps, from 1 to 1000; more are slower and finer, up to about 50. null is the checkpoint's own
            number: 30, and 20 for toy/sdxl.
        guidance_scale: How strongly the prompt is followed, at most 1000; 1 is no guidance and half the time. null is
            the checkpoint's own: 7, above diffusers' 5, for the details of long prompts, and 3 for toy/sdxl; above 10
            colours oversaturate.
        height: Pixels, a multiple of 8; null is the checkpoint's own (1024 for SDXL).
        width: Pixels, as height.
        scheduler: diffusers' class for the steps; the checkpoint's own by default.
    """

    steps: Steps | None = None
    guidance_scale: Guidance | None = None
    height: Side | None = None
    width: Side | None = None
    scheduler: Scheduler | None = None


@dataclass(kw_only=True)
class ImageOptions(Denoising):
    """What decides an image besides its prompt, its seed and the models, for commands that draw."""

    sharpen: Sharpening = 1.0


@dataclass(kw_only=True)
class Sampling(Denoising):
    """How images are rendered: the options that all callers share, and those of some.

    Attributes:
        long_prompt: how prompts are read; the encoder's name says the reading.
        layer: Layer of both text encoders that SDXL's UNet reads: penultimate, which SDXL was trained with, or last,
            the last one after the final norm, as in Long-CLIP's code.
        karras: Noise levels as in Karras et al. (2022); the checkpoint's own by default.
        clip_skip: Counts as A1111, Forge and ComfyUI do, not as diffusers: the text encoders' layer that is read, for
            both prompts, from the last, 1. SDXL reads 2 or more, as in A1111 and Forge.
    """

    long_prompt: LongPromptOptions = field(default_factory=LongPromptOptions)
    layer: Layer = "penultimate"
    karras: bool | None = None
    clip_skip: ClipSkip | None = None

    @classmethod
    def of(cls, settings: Mapping) -> "Sampling":
        """From all settings of a command, by the names of these fields and of those of `LongPromptOptions`."""
        names, options = ({field.name for field in fields(each)} & settings.keys() for each in (cls, LongPromptOptions))
        with explain_failure("Prompts cannot be read so"):
            long_prompt = LongPromptOptions(**{name: settings[name] for name in options - {"reading"}})
        return cls(long_prompt=long_prompt, **{name: settings[name] for name in names})


USUAL = dict.fromkeys(("karras", "clip_skip", "loras", "refiner", "refiner_sha256"))
USUAL |= {"layer": "penultimate", **asdict(LongPromptOptions())}  # what an image's settings do not say
del USUAL["reading"]
