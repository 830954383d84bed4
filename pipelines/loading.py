"""A Stable Diffusion with its text encoders replaced, checked before gigabytes are read."""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, UNet2DConditionModel
from safetensors import safe_open
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, PreTrainedModel

from debias_diffusion.errors import UserError
from debias_diffusion.interchange import load_text_encoder, stretch_text_encoder
from debias_diffusion.interchange.transformers_folder import read_encoder
from debias_diffusion.models.model_files import check_bounds, check_finite, explain_failure, may_be_hub_id, read_config
from debias_diffusion.models.shipped import shipped

from .stable_diffusion import StableDiffusionLongPromptPipeline
from .stable_diffusion_xl import StableDiffusionXLLongPromptPipeline

SDXL = "StableDiffusionXLPipeline"
PIPELINES = {SDXL: StableDiffusionXLLongPromptPipeline, "StableDiffusionPipeline": StableDiffusionLongPromptPipeline}
_MOST_LATENTS = 8192  # of a side; no UNet is trained on a sixteenth of it
STRETCH = "stretch"  # in place of a second encoder: the base's own, with Long-CLIP's stretched positions

# What is loaded: everything; what reads prompts; what draws from their embeddings.
Part = Literal["all", "encoders", "denoiser"]
_DENOISER = ("unet", "vae")
_ENCODERS = ("text_encoder", "tokenizer")

_CLIP_OF_WIDTH = {512: "ViT-B-32 or ViT-B-16", 768: "ViT-L-14", 1024: "ViT-H-14", 1280: "ViT-bigG-14"}
# diffusers renamed it, and ignores with a mere warning the name it does not know
_DTYPE_ARGUMENT = "dtype" if tuple(map(int, version("diffusers").split(".")[:2])) >= (0, 40) else "torch_dtype"


def load_sdxl(
    base: str | os.PathLike,
    encoder: str | os.PathLike | None,
    device: torch.device,
    dtype: torch.dtype | None = None,
    encoder_2: str | os.PathLike | None = None,
) -> StableDiffusionXLLongPromptPipeline:
    """`load_pipeline` for an SDXL and nothing else."""
    check_base(base)
    return load_pipeline(base, encoder, device, dtype, encoder_2)


def load_pipeline(
    base: str | os.PathLike,
    encoder: str | os.PathLike | None,
    device: torch.device,
    dtype: torch.dtype | None = None,
    encoder_2: str | os.PathLike | None = None,
    part: Part = "all",
) -> DiffusionPipeline:
    """Loads an SDXL or a Stable Diffusion 1.5 for long prompts.

    Args:
        base: folder in diffusers' layout, hub id, or "toy/sdxl".
        encoder: what takes the place of the first text encoder, anything `load_text_encoder` takes. None keeps the
            base's own, which reads long prompts in windows.
        device: where it runs.
        dtype: of all models; `default_dtype(device)` if None.
        encoder_2: what takes the place of SDXL's second text encoder, a CLIPTextModelWithProjection. None keeps the
            base's own; "stretch" keeps its weights and stretches its positions as Long-CLIP does.
        part: "encoders" leaves out UNet and autoencoder, which are then None; "denoiser" the text encoders, so that it
            draws from embeddings that the other part has made.

    Raises:
        UserError: the base is of another kind, or an encoder is none or does not fit. Known before the base's weights
            are read.
    """
    with explain_failure(f"The base model {os.fspath(base)!r} could not be loaded", "Give an SDXL folder."):
        return _load(shipped(base), encoder, device, dtype, encoder_2, part)


def _load(
    base: str,
    encoder: str | os.PathLike | None,
    device: torch.device,
    dtype: torch.dtype | None,
    encoder_2: str | os.PathLike | None,
    part: Part,
) -> DiffusionPipeline:
    kind = check_base(base, tuple(PIPELINES))
    if kind != SDXL and encoder_2 is not None:
        raise UserError(f"The base model {base!r} is a {kind}, which has no second encoder. Leave encoder_2 out.")
    dtype = dtype or default_dtype(device)
    names = _ENCODERS + (("text_encoder_2", "tokenizer_2") if kind == SDXL else ())
    parts: dict = dict.fromkeys({"all": (), "encoders": _DENOISER, "denoiser": names}[part])
    if kind == SDXL:
        parts["add_watermarker"] = False
    elif part == "encoders":
        parts |= {"safety_checker": None, "requires_safety_checker": False}  # a gigabyte that looks at pictures
    if part != "denoiser":
        parts |= _own_encoders(base, kind, encoder, encoder_2, dtype)
        parts |= _replaced(base, kind, encoder, encoder_2, dtype)
    pipe = PIPELINES[kind].from_pretrained(base, **parts, **{_DTYPE_ARGUMENT: dtype})
    if part != "denoiser" and encoder_2 == STRETCH:
        text_encoder_2, tokenizer_2 = stretch_text_encoder(pipe.text_encoder_2, pipe.tokenizer_2)
        pipe.register_modules(text_encoder_2=text_encoder_2, tokenizer_2=tokenizer_2)
    pipe = pipe.to(device)
    for name, component in pipe.components.items():
        if name in _DENOISER and component is not None:
            _check_all_used(Path(base) / name / "diffusion_pytorch_model.safetensors", component)
        if isinstance(component, nn.Module):  # in the dtype that it runs in, to which others are cast
            what = {"text_encoder": encoder, "text_encoder_2": encoder_2}.get(name) or f"{base}/{name}"
            check_finite(component.state_dict().items(), repr(os.fspath(what)))
    return pipe


def _check_all_used(file: Path, model: nn.Module) -> None:
    """Raises UserError where diffusers has left weights out, or made some up, because the configuration says others."""
    if file.is_file():
        with safe_open(file, framework="pt") as opened:
            held = len(list(opened.keys()))
        if held != (wanted := len(model.state_dict())):
            raise UserError(f"{str(file)!r} holds {held} weights, but its config.json is of a model with {wanted}.")


def default_dtype(device: torch.device) -> torch.dtype:
    """float32 on the CPU, float16 elsewhere."""
    return torch.float32 if device.type == "cpu" else torch.float16


def check_base(base: str | os.PathLike, kinds: tuple[str, ...] = (SDXL,)) -> str:
    """The name of diffusers' class that `base` is saved from; reads its model_index.json only.

    Raises:
        UserError: there is no such base, or it is none of `kinds`.
    """
    with explain_failure(f"The base model {os.fspath(base)!r} cannot be read", "Give an SDXL folder."):
        return _check_base(shipped(base), kinds)


def _check_base(base: str, kinds: tuple[str, ...]) -> str:
    is_folder = Path(base).is_dir()
    if not is_folder and not may_be_hub_id(base):
        raise UserError(f"The base model {base!r} is not there. Give an SDXL folder in diffusers' layout, or a hub id.")
    why = "it has no readable model_index.json" if is_folder else "no hub model of this name can be reached"
    if is_folder:
        if not (Path(base) / "model_index.json").is_file():
            raise UserError(f"The base model {base!r} cannot be read: {why}. Give an SDXL folder.")
        for file in (Path(base) / "model_index.json", *sorted(Path(base).glob("*/*config.json"))):
            if file.parent.name.partition("_")[0] != "tokenizer":  # whose numbers are no sizes
                _read(file, base)
    with explain_failure(f"The base model {base!r} cannot be read: {why}", "Give an SDXL folder."):
        kind = DiffusionPipeline.load_config(base)["_class_name"]
    if kind not in kinds:
        raise UserError(f"The base model {base!r} is a {kind}, not a {' or a '.join(kinds)}. Give an SDXL folder.")
    return kind


def default_size(base: str | os.PathLike) -> tuple[int, int]:
    """(height, width) in pixels of what a base draws if nothing else is asked; reads configurations only."""
    with explain_failure(f"The base model {os.fspath(base)!r} cannot be read", "Give an SDXL folder."):
        return _default_size(shipped(base))


def _default_size(base: str) -> tuple[int, int]:
    channels = _config(base, AutoencoderKL, "vae").get("block_out_channels")
    size = _config(base, UNet2DConditionModel, "unet").get("sample_size")
    sizes = size if isinstance(size, (list, tuple)) else [size, size]
    if not isinstance(channels, (list, tuple)) or not 1 <= len(channels) <= 10:
        raise UserError(
            f"The base model {base!r} says block_out_channels {channels!r} in vae/config.json; it must be a list of 1 "
            "to 10 numbers. Give a whole SDXL folder."
        )
    if len(sizes) != 2 or not all(type(side) is int and 1 <= side <= _MOST_LATENTS for side in sizes):
        raise UserError(
            f"The base model {base!r} says sample_size {size!r} in unet/config.json; it must be a whole number from 1 "
            f"to {_MOST_LATENTS}, or two. Give height and width, or a whole SDXL folder."
        )
    height, width = (side * 2 ** (len(channels) - 1) for side in sizes)
    return height, width


def _read(file: Path, base: str) -> dict:
    try:
        return read_config(file)
    except UserError as error:
        raise UserError(f"The base model {base!r} cannot be read. {error} Give an SDXL folder.") from error


def _config(base: str, cls: type, subfolder: str) -> dict:
    named = f"The base model {base!r} has no readable {subfolder}/config.json"
    is_folder = Path(base).is_dir()
    if (is_folder and not (Path(base) / subfolder / "config.json").is_file()) or (
        not is_folder and not may_be_hub_id(base)
    ):
        raise UserError(f"{named}. Give a whole SDXL folder.")
    with explain_failure(named, "Give a whole SDXL folder."):
        config = cls.load_config(base, subfolder=subfolder)
        check_bounds(config, f"The {subfolder}/config.json of {base!r}")
        return config


def _width(base: str) -> int:
    """What the UNet reads: the length of a hidden state."""
    width = _config(base, UNet2DConditionModel, "unet").get("cross_attention_dim")
    if type(width) is not int:
        raise UserError(
            f"The base model {base!r} says cross_attention_dim {width!r} in unet/config.json, not a whole number. Give "
            "a whole SDXL folder."
        )
    return width


def _text_config(base: str, subfolder: str) -> CLIPTextConfig:
    named = f"The base model {base!r} has no readable {subfolder}/config.json"
    with explain_failure(named, "Give a whole SDXL folder."):
        return CLIPTextConfig.from_pretrained(base, subfolder=subfolder)


def _own_encoders(
    base: str, kind: str, encoder: str | os.PathLike | None, encoder_2: str | os.PathLike | None, dtype: torch.dtype
) -> dict:
    """The text encoders of a base folder that nothing replaces, by name.

    Not left to diffusers, which fills weights that are missing with random numbers.
    """
    if not Path(base).is_dir():
        return {}
    names = ["text_encoder"] if encoder is None else []
    names += ["text_encoder_2"] if kind == SDXL and encoder_2 in (None, STRETCH) else []
    return {name: read_encoder(Path(base), name).to(dtype) for name in names}


def _replaced(
    base: str, kind: str, encoder: str | os.PathLike | None, encoder_2: str | os.PathLike | None, dtype: torch.dtype
) -> dict:
    """The components that take the place of the base's own, by name."""
    replaced = {}
    if encoder is not None:
        text_encoder, tokenizer = load_text_encoder(encoder)
        (_check_first if kind == SDXL else _check_only)(text_encoder, os.fspath(encoder), base)
        replaced |= {"text_encoder": text_encoder.to(dtype), "tokenizer": tokenizer}
    if encoder_2 is not None and encoder_2 != STRETCH:
        text_encoder, tokenizer = load_text_encoder(encoder_2)
        _check_second(text_encoder, os.fspath(encoder_2), base)
        # Pads are what the UNet was trained to see after a text; another file's tokenizer may name others.
        with explain_failure(f"The tokenizer_2 of the base model {base!r} could not be loaded"):
            tokenizer.pad_token = CLIPTokenizer.from_pretrained(base, subfolder="tokenizer_2").pad_token
        replaced |= {"text_encoder_2": text_encoder.to(dtype), "tokenizer_2": tokenizer}
    return replaced


def _check_first(text_encoder: PreTrainedModel, encoder: str, base: str) -> None:
    width = text_encoder.config.hidden_size
    second = _text_config(base, "text_encoder_2").hidden_size
    unet = _width(base)
    if width + second == unet:
        return
    model = _CLIP_OF_WIDTH.get(unet - second)
    raise UserError(
        f"The encoder {encoder!r} has width {width} and the base's second encoder {second}, together {width + second}; "
        f"its UNet reads {unet}. An encoder of width {unet - second} fits{f': {model}' if model else ''}. SDXL takes "
        "one of width 768: ViT-L-14."
    )


def check_same_width(encoder: str, width: int, base: str, own: int) -> None:
    """Raises UserError for an encoder that has not the width of the one whose place it takes, `own`."""
    if width != own:
        raise UserError(
            f"The encoder {encoder!r} has width {width}, and the one of {base!r} whose place it takes has width {own}. "
            f"Give an encoder of width {own}{': ViT-L-14' if own == 768 else ''}."
        )


def _check_only(text_encoder: PreTrainedModel, encoder: str, base: str) -> None:
    """The encoder of a base that has one, and reads its last layer instead of the one before."""
    width, unet = text_encoder.config.hidden_size, _width(base)
    if width != unet:
        model = _CLIP_OF_WIDTH.get(unet)
        raise UserError(
            f"The encoder {encoder!r} has width {width}, and the base's UNet reads {unet}. An encoder of width {unet} "
            f"fits{f': {model}' if model else ''}."
        )
    if isinstance(text_encoder, CLIPTextModelWithProjection):
        raise UserError(
            f"The encoder {encoder!r} has a projection, which this base does not read. Write it with `debias-diffusion "
            "export`, without --projection."
        )


def _check_second(text_encoder: PreTrainedModel, encoder: str, base: str) -> None:
    own = _text_config(base, "text_encoder_2")
    wanted = f"SDXL's second encoder has width {own.hidden_size} and a projection to {own.projection_dim}" + (
        ": ViT-bigG-14." if own.hidden_size == 1280 else "."
    )
    if text_encoder.config.hidden_size != own.hidden_size:
        raise UserError(f"The second encoder {encoder!r} has width {text_encoder.config.hidden_size}. {wanted}")
    if not isinstance(text_encoder, CLIPTextModelWithProjection):
        raise UserError(
            f"The second encoder {encoder!r} has no projection. {wanted} Write it with `debias-diffusion export "
            "--projection`."
        )
    if text_encoder.config.projection_dim != own.projection_dim:
        raise UserError(
            f"The second encoder {encoder!r} has a projection to {text_encoder.config.projection_dim}. {wanted}"
        )
