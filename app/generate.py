"""A picture from a prompt of any length: SDXL, with a long-prompt text encoder in place of its first one."""

import json
import re
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
from diffusers import DiffusionPipeline, UNet2DConditionModel
from PIL.PngImagePlugin import PngInfo
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from debias_diffusion.errors import UserError
from debias_diffusion.interchange import load_text_encoder
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.tokens import clean

MAX_CHARACTERS = 20_000  # some 4,500 tokens, far past what one picture can show
SETTINGS_KEY = "settings"  # of the PNG's text chunk

_CLIP_OF_WIDTH = {512: "ViT-B-32 or ViT-B-16", 768: "ViT-L-14", 1024: "ViT-H-14", 1280: "ViT-bigG-14"}
# diffusers renamed it, and ignores with a mere warning the name it does not know
_DTYPE_ARGUMENT = "dtype" if tuple(map(int, version("diffusers").split(".")[:2])) >= (0, 40) else "torch_dtype"


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
    device = _check_device(config.device)
    _check_base(config.base)
    encoder, tokenizer = (None, None) if config.encoder is None else load_text_encoder(config.encoder)
    if encoder is not None:
        _check_width(encoder.config.hidden_size, config)

    dtype = config.dtype or ("float32" if device.type == "cpu" else "float16")
    pipe = _load_pipeline(config.base, encoder, tokenizer, getattr(torch, dtype)).to(device)
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

    settings = asdict(config) | {"height": image.height, "width": image.width, "device": str(device), "dtype": dtype}
    del settings["output"]  # the same picture under another name is the same file
    text = PngInfo()
    text.add_text(SETTINGS_KEY, json.dumps(settings | {"tokens": layout.tokens, "positions": layout.positions}))
    image.save(output, format="PNG", pnginfo=text)
    return output


def _load_pipeline(
    base: str, encoder: CLIPTextModel | None, tokenizer: CLIPTokenizer | None, dtype: torch.dtype
) -> StableDiffusionXLLongPromptPipeline:
    replaced = {} if encoder is None else {"text_encoder": encoder.to(dtype), "tokenizer": tokenizer}
    return StableDiffusionXLLongPromptPipeline.from_pretrained(
        base, add_watermarker=False, **replaced, **{_DTYPE_ARGUMENT: dtype}
    )


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


def _check_device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"The device {name!r} is not available ({reason}). Use cpu, or leave the device out."
        ) from error


def _check_base(base: str) -> None:
    is_folder = Path(base).is_dir()
    if not is_folder and not re.fullmatch(r"[\w.-]+/[\w.-]+", base):
        raise UserError(f"The base model {base!r} is not there. Give an SDXL folder in diffusers' layout, or a hub id.")
    try:
        kind = DiffusionPipeline.load_config(base)["_class_name"]
    except OSError as error:
        reason = "it has no readable model_index.json" if is_folder else "no hub model of this name can be reached"
        raise UserError(f"The base model {base!r} cannot be read: {reason}. Give an SDXL folder.") from error
    if kind != "StableDiffusionXLPipeline":
        raise UserError(f"The base model {base!r} is a {kind}, not a StableDiffusionXLPipeline. Give an SDXL folder.")


def _check_width(width: int, config: GenerateConfig) -> None:
    second = CLIPTextConfig.from_pretrained(config.base, subfolder="text_encoder_2").hidden_size
    unet = UNet2DConditionModel.load_config(config.base, subfolder="unet")["cross_attention_dim"]
    if width + second == unet:
        return
    model = _CLIP_OF_WIDTH.get(unet - second)
    raise UserError(
        f"The encoder {config.encoder!r} has width {width} and the base's second encoder {second}, together"
        f" {width + second}; its UNet reads {unet}. An encoder of width {unet - second} fits"
        f"{f': {model}' if model else ''}. SDXL takes one of width 768: ViT-L-14."
    )
