"""A picture from a prompt of any length: SDXL, with a long-prompt text encoder in place of its first one."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from PIL.PngImagePlugin import PngInfo

from debias_diffusion.devices import pick_device
from debias_diffusion.errors import UserError
from debias_diffusion.pipelines.loading import load_sdxl
from debias_diffusion.tokens import clean

MAX_CHARACTERS = 20_000  # some 4,500 tokens, far past what one picture can show
SETTINGS_KEY = "settings"  # of the PNG's text chunk


@dataclass
class GenerateConfig:
    """What to draw, with which models, and where to put it.

    Args:
        prompt: what to draw, in up to 20,000 characters; nothing of it is cut off.
        base: an SDXL folder in diffusers' layout, or a hub id.
        encoder: text encoder that takes the place of SDXL's first one: a folder written by `export`, or any
            transformers CLIPTextModel folder. SDXL's own reads long prompts too, in windows of 77 tokens.
        output: PNG to write; it also carries the settings that made it.
        negative_prompt: what not to draw. Only used with a guidance scale above 1.
        seed: equal seeds start from equal noise, on every device.
        steps: denoising steps; more are slower and finer, up to about 50.
        guidance_scale: how strongly the prompt is followed; 1 is no guidance and half the time. The default is above
            diffusers' 5, for a closer reading of a long prompt's details; past 10 colours burn.
        height: pixels, a multiple of 8; the model's own size if not given (1024 for SDXL).
        width: pixels, a multiple of 8; the model's own size if not given.
        device: cpu, cuda, cuda:1, mps; the fastest there is if not given.
        dtype: precision of the models; float16 on an accelerator and float32 on the CPU if not given.
    """

    prompt: str
    base: str
    encoder: str | None = None
    output: str = "picture.png"
    negative_prompt: str | None = None
    seed: int = 0
    steps: int = 30
    guidance_scale: float = 7.0
    height: int | None = None
    width: int | None = None
    device: str | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None


def generate(config: GenerateConfig) -> Path:
    """Draws one picture and writes it as a PNG, whose text chunk "settings" holds what made it as JSON.

    Prints how many tokens the prompt has and how they are read. The same settings on the same machine give the same
    file, byte for byte.

    Returns:
        the picture's path

    Raises:
        UserError: a setting is not usable. Everything that can be checked is checked before a model is loaded.
    """
    _check_settings(config)
    output = _check_output(config.output)
    device = pick_device(config.device)
    pipe = load_sdxl(config.base, config.encoder, device, config.dtype and getattr(torch, config.dtype))
    # As captions were cleaned for training, SDXL's own encoders included.
    prompt = clean(config.prompt)
    negative_prompt = None if config.negative_prompt is None else clean(config.negative_prompt)
    layout = pipe.prompt_layout(
        prompt, negative_prompt=negative_prompt, do_classifier_free_guidance=config.guidance_scale > 1
    )
    first, second = layout.windows
    print(
        f"Prompt: {layout.tokens} tokens, encoded at {layout.positions} positions "
        f"({first} window{'s' * (first > 1)} of the first text encoder, {second} of the second)"
    )
    image = pipe(
        prompt,
        negative_prompt=negative_prompt,
        height=config.height,
        width=config.width,
        num_inference_steps=config.steps,
        guidance_scale=config.guidance_scale,
        # On the CPU, because every device's own generator draws other numbers from the same seed.
        generator=torch.Generator("cpu").manual_seed(config.seed),
    ).images[0]

    dtype = str(pipe.unet.dtype).removeprefix("torch.")
    settings = asdict(config) | {"height": image.height, "width": image.width, "device": str(device), "dtype": dtype}
    del settings["output"]  # the same picture under another name is the same file
    text = PngInfo()
    text.add_text(SETTINGS_KEY, json.dumps(settings | {"tokens": layout.tokens, "positions": layout.positions}))
    image.save(output, format="PNG", pnginfo=text)
    return output


def _check_settings(config: GenerateConfig) -> None:
    for name, text in (("prompt", config.prompt), ("negative prompt", config.negative_prompt or "")):
        if len(text) > MAX_CHARACTERS:
            raise UserError(
                f"The {name} has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read. Shorten it."
            )
    if not clean(config.prompt):
        raise UserError("The prompt is empty. Say what to draw.")
    for name, size in (("height", config.height), ("width", config.width)):
        if size is not None and (size <= 0 or size % 8):
            nearest = max(8, round(size / 8) * 8)
            raise UserError(f"The {name} must be a positive multiple of 8 pixels, got {size}. Take {nearest}.")
    if config.steps < 1:
        raise UserError(f"The number of steps must be at least 1, got {config.steps}.")


def _check_output(output: str) -> Path:
    path = Path(output)
    if path.is_dir():
        raise UserError(f"The output {output!r} is a folder. Give a file name, such as {str(path / 'picture.png')!r}.")
    if path.suffix.lower() != ".png":
        raise UserError(f"The output {output!r} must end in .png, because a PNG is what is written.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The output folder {str(path.parent)!r} cannot be made ({error.strerror}). Give another one."
        ) from error
    return path
