"""How images are rendered: options that `generate`, the evaluations and the demo share. Imports nothing large."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from debias_diffusion.encoders.resolve import may_be_hub_id
from debias_diffusion.errors import UserError
from debias_diffusion.limits import Checked, Guidance, Side, Steps, above_zero, between
from debias_diffusion.text.chunks import MOST_BETWEEN_SENTENCES, MOST_SHARPENING
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
Sharpening, SentenceSharpening = above_zero(MOST_SHARPENING), above_zero(MOST_BETWEEN_SENTENCES)


def split_base(name: str | os.PathLike) -> tuple[str, Path | None]:
    """(folder or hub id of the configurations, single file of weights or None) of an SDXL checkpoint's name. The folder
    is "" for a file that is named alone.

    Raises:
        UserError: there is nothing of this name, and it is no hub id.
    """
    base = os.fspath(name)
    folder, _, file = ("", "", base) if os.path.exists(base) else base.rpartition(":")
    if not file.endswith(".safetensors") or os.path.isdir(file):
        folder, file = base, ""
    configs = shipped(folder)
    has_configs = os.path.isdir(configs) or may_be_hub_id(configs) or (file and not folder)
    if not has_configs or (file and not os.path.isfile(file)):
        raise UserError(
            f"The SDXL checkpoint {base!r} is not there, or not read. Give an SDXL folder in diffusers' layout, a hub "
            "id, or a .safetensors file."
        )
    return configs, Path(file) if file else None


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
    """

    steps: Steps | None = None
    guidance_scale: Guidance | None = None
    height: Side | None = None
    width: Side | None = None


@dataclass(kw_only=True)
class ImageOptions(Denoising):
    """What decides an image besides its prompt, its seed and the models, for commands that draw.

    Attributes:
        sharpen: The scale of the UNet's cross-attention is multiplied by this for prompts of more than 77 positions: 1
            changes nothing, 1.5 brings details of long prompts out in the toy world. At most 4.
        sharpen_sentences: There each sentence's share of the attention to the words is raised to this power, while
            within a sentence attention stays as it is: 1 changes nothing; at most 16. For readings overlap and
            separate.
    """

    sharpen: Sharpening = 1.0
    sharpen_sentences: SentenceSharpening = 1.0
