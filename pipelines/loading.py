"""An SDXL with its first text encoder replaced, checked before gigabytes are read."""

import os
import re
from importlib.metadata import version
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig

from debias_diffusion.errors import UserError
from debias_diffusion.interchange import load_text_encoder
from debias_diffusion.toyworld.shipped import shipped

from .stable_diffusion_xl import StableDiffusionXLLongPromptPipeline

_CLIP_OF_WIDTH = {512: "ViT-B-32 or ViT-B-16", 768: "ViT-L-14", 1024: "ViT-H-14", 1280: "ViT-bigG-14"}
# diffusers renamed it, and ignores with a mere warning the name it does not know
_DTYPE_ARGUMENT = "dtype" if tuple(map(int, version("diffusers").split(".")[:2])) >= (0, 40) else "torch_dtype"


def load_sdxl(
    base: str | os.PathLike,
    encoder: str | os.PathLike | None,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> StableDiffusionXLLongPromptPipeline:
    """Loads an SDXL for long prompts.

    Args:
        base: folder in diffusers' layout, hub id, or "toy/sdxl".
        encoder: what takes the place of the first text encoder, anything `load_text_encoder` takes. None keeps SDXL's
            own, which reads long prompts in windows.
        device: where it runs.
        dtype: of all models; float32 on the CPU and float16 elsewhere if None.

    Raises:
        UserError: the base is no SDXL, or the encoder is none or has a width that does not fit. Known before the base's
            weights are read.
    """
    base = shipped(base)
    check_base(base)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.float16)
    replaced = {}
    if encoder is not None:
        text_encoder, tokenizer = load_text_encoder(encoder)
        _check_width(text_encoder.config.hidden_size, os.fspath(encoder), base)
        replaced = {"text_encoder": text_encoder.to(dtype), "tokenizer": tokenizer}
    try:
        pipe = StableDiffusionXLLongPromptPipeline.from_pretrained(
            base, add_watermarker=False, **replaced, **{_DTYPE_ARGUMENT: dtype}
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:300].rstrip(".")
        raise UserError(f"The base model {base!r} could not be loaded: {reason}. Give an SDXL folder.") from error
    return pipe.to(device)


def check_base(base: str) -> None:
    """Raises UserError unless `base` is an SDXL in diffusers' layout; reads its model_index.json only."""
    base = shipped(base)
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


def _check_width(width: int, encoder: str, base: str) -> None:
    second = CLIPTextConfig.from_pretrained(base, subfolder="text_encoder_2").hidden_size
    unet = UNet2DConditionModel.load_config(base, subfolder="unet")["cross_attention_dim"]
    if width + second == unet:
        return
    model = _CLIP_OF_WIDTH.get(unet - second)
    raise UserError(
        f"The encoder {encoder!r} has width {width} and the base's second encoder {second}, together {width + second}; "
        f"its UNet reads {unet}. An encoder of width {unet - second} fits{f': {model}' if model else ''}. SDXL takes "
        "one of width 768: ViT-L-14."
    )
