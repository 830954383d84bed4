"""Pipelines of SDXL and Stable Diffusion 1.5 checkpoints with other text encoders, checked before weights are read."""

import os
from collections.abc import Collection, Mapping
from importlib.metadata import version
from inspect import signature
from pathlib import Path

import diffusers
import torch
from diffusers import DiffusionPipeline, EulerDiscreteScheduler
from torch import nn

from debias_diffusion.clip.weight_files import check_finite, check_fit
from debias_diffusion.encoders.spec import load_text_encoder
from debias_diffusion.encoders.stretch import stretch_text_encoder
from debias_diffusion.encoders.text_encoders import read_encoder
from debias_diffusion.errors import UserError, explain_failure, quiet_logging, reason

from ..classes import (
    StableDiffusionLongPromptPipeline,
    StableDiffusionXLLongPromptImg2ImgPipeline,
    StableDiffusionXLLongPromptPipeline,
)
from .checkpoints import DENOISER, REFINER, SD15, SDXL, STRETCH, TOKENIZERS, Checkpoint, Slot

PIPELINES = {SDXL: StableDiffusionXLLongPromptPipeline, SD15: StableDiffusionLongPromptPipeline}
REFINERS = {REFINER: StableDiffusionXLLongPromptImg2ImgPipeline}

_SLOTS: dict[str, list[Slot]] = {SDXL: [*TOKENIZERS], REFINER: ["text_encoder_2"]}  # of others the first

# diffusers renamed it, and ignores an unknown name with a mere warning
_DTYPE_ARGUMENT = "dtype" if tuple(map(int, version("diffusers").split(".")[:2])) >= (0, 40) else "torch_dtype"


def load_pipeline(
    base: str | os.PathLike,
    encoder: str | os.PathLike | None,
    device: torch.device,
    dtype: torch.dtype | None = None,
    encoder_2: str | os.PathLike | None = None,
    without: Collection[str] = (),
    kinds: Mapping[str, type[DiffusionPipeline]] = PIPELINES,
) -> DiffusionPipeline:
    """Loads an SDXL or Stable Diffusion 1.5 checkpoint for long prompts.

    Args:
        base: see `Checkpoint.parse`.
        encoder: replaces the first text encoder, anything `load_text_encoder` takes. None keeps the checkpoint's own,
            which reads long prompts in chunks.
        device: of all models.
        dtype: of all models; `default_dtype(device)` if None.
        encoder_2: replaces SDXL's second text encoder, a CLIPTextModelWithProjection. None keeps the checkpoint's own;
            "stretch" keeps its weights and stretches its positions as Long-CLIP does.
        without: names of the text encoders, or `DENOISER`: models that are left out and None.
        kinds: `PIPELINES`; or `REFINERS`, for SDXL's refiner in a folder.

    Raises:
        UserError: the checkpoint is of another kind or incomplete, or an encoder does not fit. As far as configurations
            say, known before the checkpoint's weights are read.
    """
    dtype = dtype or default_dtype(device)
    with explain_failure(f"The SDXL checkpoint {os.fspath(base)!r} could not be loaded", "Give an SDXL folder."):
        checkpoint = Checkpoint.parse(base)
        kind = checkpoint.check_kind(kinds)
        if encoder_2 is not None and kind != SDXL:
            raise UserError(f"{checkpoint.name!r} is a {kind}, which has no second encoder. Leave encoder_2 out.")
        given = {"text_encoder": encoder, "text_encoder_2": None if encoder_2 == STRETCH else encoder_2}
        given = {slot: os.fspath(name) for slot, name in given.items() if name is not None and slot not in without}
        # diffusers builds the configured encoder
        if checkpoint.file and "text_encoder" not in without and checkpoint.first_positions:
            given.setdefault("text_encoder", os.fspath(checkpoint.file))
        scheduling = checkpoint.scheduling
        pipe = _load(checkpoint, given, dtype, without, kinds[kind])
        if scheduling:
            cls = type(pipe.scheduler)
            if not scheduling.keys() <= signature(cls).parameters.keys():  # SD 1.5's PNDM has no zero terminal SNR
                cls = EulerDiscreteScheduler
            pipe.register_modules(scheduler=cls.from_config(pipe.scheduler.config, **scheduling))
        if encoder_2 == STRETCH and "text_encoder_2" not in without:
            text_encoder_2, tokenizer_2 = stretch_text_encoder(pipe.text_encoder_2, pipe.tokenizer_2)
            pipe.register_modules(text_encoder_2=text_encoder_2, tokenizer_2=tokenizer_2)
        pipe = pipe.to(device)
        for name, weights in _weights(pipe):
            check_finite(weights.items(), repr(given.get(name, f"{checkpoint.name}/{name}")))
        return pipe


def _load(
    checkpoint: Checkpoint,
    encoders: dict[Slot, str],
    dtype: torch.dtype,
    without: Collection[str],
    cls: type[DiffusionPipeline],
) -> DiffusionPipeline:
    slots = _SLOTS.get(checkpoint.check_kind(PIPELINES | REFINERS), ["text_encoder"])
    parts = load_text_encoders(checkpoint, encoders, torch.device("cpu"), dtype)
    parts |= {_DTYPE_ARGUMENT: dtype, **dict.fromkeys(without)}
    if "text_encoder_2" in slots:
        parts["add_watermarker"] = False
    elif "unet" in without or checkpoint.file:
        parts |= {"safety_checker": None, "requires_safety_checker": False}  # a gigabyte; single files have none
    if checkpoint.file is None:
        if Path(checkpoint.configs).is_dir():
            # Not left to diffusers, which fills missing weights with random numbers.
            kept = [slot for slot in slots if slot not in parts]
            parts |= {slot: read_encoder(checkpoint.configs, slot).to(dtype) for slot in kept}
        parts |= {name: _load_model(checkpoint, name, dtype) for name in DENOISER if name not in without}
        return cls.from_pretrained(checkpoint.source, **parts)
    try:
        with quiet_logging():  # diffusers warns of every model that it casts
            pipe = cls.from_single_file(str(checkpoint.file), config=str(checkpoint.source), **parts)
        on_meta = (f"{name}.{key}" for name, weights in _weights(pipe) for key in weights if weights[key].is_meta)
        missing = next(on_meta, None)
    except NotImplementedError as error:  # casting weights that the file does not have
        missing = reason(error)
    if missing:
        raise UserError(f"{checkpoint.name!r} lacks weights of its configuration ({missing}). Give a whole checkpoint.")
    return pipe


def _weights(pipe: DiffusionPipeline) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """(name, weights) of each model."""
    return [(name, model.state_dict()) for name, model in pipe.components.items() if isinstance(model, nn.Module)]


def load_text_encoders(
    checkpoint: Checkpoint, encoders: dict[Slot, str], device: torch.device, dtype: torch.dtype
) -> dict:
    """Text encoders that replace a checkpoint's, and their tokenizers, by component. Raises UserError for a misfit."""
    components = {}
    for slot, name in encoders.items():
        encoder, tokenizer = load_text_encoder(name)
        checkpoint.check_fits(slot, encoder, name)
        if slot == "text_encoder_2":
            # The UNet was trained with this pad token after a text; another file's tokenizer may have another one.
            tokenizer.pad_token = checkpoint.tokenizer(slot).pad_token
        components |= {slot: encoder.to(device, dtype), TOKENIZERS[slot]: tokenizer}
    return components


def _load_model(checkpoint: Checkpoint, part: str, dtype: torch.dtype) -> nn.Module:
    """The UNet or the autoencoder. Raises UserError if weights are missing or superfluous."""
    options = {"subfolder": part, "output_loading_info": True, _DTYPE_ARGUMENT: dtype}
    cls = getattr(diffusers, checkpoint.config(part)["_class_name"])
    with quiet_logging():  # what diffusers warns of is an error here
        model, info = cls.from_pretrained(checkpoint.source, **options)
    superfluous = [f"{name} has no place in it" for name in sorted(info["unexpected_keys"])]
    check_fit(sorted(info["missing_keys"]), superfluous, f"{part} in {checkpoint.name!r}")
    return model


def default_dtype(device: torch.device) -> torch.dtype:
    """float32 on the CPU, float16 elsewhere."""
    return torch.float32 if device.type == "cpu" else torch.float16
