"""`generate --like`: the settings of an image, of this package or of another program, where none are given."""

from dataclasses import replace
from typing import get_args

from debias_diffusion.errors import UserError
from debias_diffusion.pipelines.rendering.infotext import OURS, read_image
from debias_diffusion.pipelines.rendering.options import KARRAS, Scheduler
from debias_diffusion.pipelines.rendering.png import SAMPLERS
from debias_diffusion.text.chunks import Reading

from .prompt_options import GenerateConfig

# The options of `generate` that may come from an image.
TAKEN = (
    *("prompt", "negative_prompt", "reading", "emphasis", "breaks", "clip_skip", "seed", "steps", "scheduler"),
    *("karras", "guidance_scale", "sharpen", "width", "height"),
)


def take_settings(config: GenerateConfig) -> GenerateConfig:
    """The options, with the settings of the image `config.like` where none is given. Prints which, and what is left."""
    program, values, left = read_image(config.like, loras=config.loras is not None)
    classes, sampler = {SAMPLERS[cls]: cls for cls in get_args(Scheduler)}, str(values.get("scheduler", ""))
    values["scheduler"] = config.scheduler or classes.get(sampler)
    if sampler and values["scheduler"] is None:
        left.append(f"The sampler {sampler[:60]!r}: none of {', '.join(classes)}. The checkpoint's own is used.")
    if values.get("karras") and values["scheduler"] not in KARRAS:
        left.append("Noise levels of Karras: this sampler has others.")
        values["karras"] = None
    for name in ("base", "encoder", "encoder_2", "prompt_2"):
        if (value := values.get(name)) is not None and value != getattr(config, name, None):
            left.append(f"The {name} {str(value)[:80]!r}: files are never taken from an image.")
    says_reading = (config.encoder or "").partition(":")[0] in get_args(Reading)
    given = {"prompt"} if config.prompts is not None else {"reading"} if says_reading else set()
    taken = {
        name: values[name]
        for name in TAKEN
        if getattr(config, name) is None and values.get(name) is not None and name not in given
    }
    if program != OURS:
        left.append("Noise and its levels: they are diffusers', so the image will be like it, not equal.")
    if "prompt" not in taken and config.prompt is None and config.prompts is None:
        raise UserError(f"The image {config.like!r} has no prompt that is read. {' '.join(left)} Give a prompt.")
    for name, value in {"program": program, **taken}.items():
        print(f"From {config.like}: {name} {str(value)[:100]!r}")
    for sentence in left:
        print(f"Not from it: {sentence}")
    return replace(config, like=None, **taken)
