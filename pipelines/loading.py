"""SDXL and Stable Diffusion 1.5 checkpoints with other text encoders, checked before gigabytes are read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, UNet2DConditionModel
from diffusers.loaders.single_file_utils import fetch_diffusers_config
from diffusers.utils import logging as diffusers_logging
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, PreTrainedModel

from debias_diffusion.errors import UserError, reason
from debias_diffusion.files import path_digest
from debias_diffusion.interchange.load import load_text_encoder
from debias_diffusion.interchange.places import model_and_weights, model_of_run
from debias_diffusion.interchange.stretch import stretch_text_encoder
from debias_diffusion.interchange.transformers_folder import read_encoder
from debias_diffusion.models.model_files import check_finite, explain_failure, may_be_hub_id, read_config
from debias_diffusion.models.shipped import shipped

from .stable_diffusion import StableDiffusionLongPromptPipeline
from .stable_diffusion_xl import StableDiffusionXLLongPromptPipeline

SDXL = "StableDiffusionXLPipeline"
PIPELINES = {SDXL: StableDiffusionXLLongPromptPipeline, "StableDiffusionPipeline": StableDiffusionLongPromptPipeline}
STRETCH = "stretch"  # as second encoder: the checkpoint's own, with Long-CLIP's stretched positions
_MOST_LATENTS = 8192  # of a side; no UNet is trained on a sixteenth of it

Part = Literal["all", "encoders", "denoiser"]  # of a pipeline: everything, text encoders, UNet and autoencoder
_DENOISER = ("unet", "vae")
_ENCODERS = ("text_encoder", "tokenizer")

_CLIP_OF_WIDTH = {512: "ViT-B-32 or ViT-B-16", 768: "ViT-L-14", 1024: "ViT-H-14", 1280: "ViT-bigG-14"}
# diffusers renamed it, and ignores an unknown name with a mere warning
_DTYPE_ARGUMENT = "dtype" if tuple(map(int, version("diffusers").split(".")[:2])) >= (0, 40) else "torch_dtype"


@dataclass(frozen=True)
class Checkpoint:
    """Where an SDXL or Stable Diffusion 1.5 checkpoint lies.

    Attributes:
        name: as the user gave it.
        folder: folder in diffusers' layout or hub id, of the configurations and tokenizers.
        file: weights in the original single-file layout; None if `folder` has them.
    """

    name: str
    folder: str
    file: Path | None = None

    @property
    def weights(self) -> str:
        """The file, folder or hub id of the weights."""
        return str(self.file or self.name)

    @property
    def is_local(self) -> bool:
        """Whether the configurations are on this machine."""
        return Path(self.folder).is_dir()


def find_checkpoint(base: str | os.PathLike) -> Checkpoint:
    """The checkpoint that `--base` names.

    Args:
        base: folder in diffusers' layout, hub id or "toy/sdxl"; `FILE.safetensors`, a checkpoint in the original
            single-file layout, whose configuration and tokenizers are those of the hub model that diffusers infers from
            the weights; or `FOLDER:FILE.safetensors` with the folder or hub id that has them.

    Raises:
        UserError: a file is missing, of another kind, or its configuration cannot be had.
    """
    name = os.fspath(base)
    folder, file = _split(name)
    if file is None:
        if Path(name).is_file():
            raise UserError(
                f"The SDXL checkpoint {name!r} is a file that is not read. Give a folder in diffusers' layout, or a "
                "single-file checkpoint in .safetensors."
            )
        return Checkpoint(name, _local_or_hub(shipped(name), name))
    if not file.is_file():
        raise UserError(
            f"The SDXL checkpoint {name!r} is not there: {str(file)!r} is no file. Give an SDXL folder in diffusers' "
            "layout, a hub id, or a .safetensors file."
        )
    with explain_failure(f"The SDXL checkpoint {name!r} cannot be read", "Give a whole .safetensors file."):
        folder = folder or _inferred_hub_id(file)
    folder = _local_or_hub(shipped(folder), name)
    if not Path(folder).is_dir():
        hub_id = folder
        try:
            folder = _hub_configs(hub_id)
        except Exception as error:  # of the network, the hub, or a name that is no hub id
            raise UserError(
                f"The SDXL checkpoint {name!r} is a single file and needs the configuration and tokenizers of "
                f"{hub_id!r}, which cannot be loaded: {reason(error)}. Name a folder in diffusers' layout that has "
                f"them, without weights if you like: {'FOLDER:' + str(file)!r}."
            ) from error
    return Checkpoint(name, folder, file)


def _local_or_hub(folder: str, name: str) -> str:
    """A folder or hub id as it is. Raises UserError for a missing path, so that the hub is not asked for it."""
    if not Path(folder).is_dir() and not may_be_hub_id(folder):
        missing = "" if folder == name else f" {folder!r} is no folder."
        raise UserError(
            f"The SDXL checkpoint {name!r} is not there.{missing} Give an SDXL folder in diffusers' layout, a hub id, "
            "or a .safetensors file."
        )
    return folder


def _split(base: str) -> tuple[str, Path | None]:
    """(configurations or "", file) of a single-file checkpoint; (base, None) of any other."""
    folder, _, file = ("", "", base) if os.path.exists(base) else base.rpartition(":")
    single = file.endswith(".safetensors") and not os.path.isdir(file)
    return (folder, Path(file)) if single else (base, None)


def _inferred_hub_id(file: Path) -> str:
    """The hub model with the configuration of a single-file checkpoint; reads names and shapes of the weights only."""
    with safe_open(file, framework="pt") as opened:
        names = list(opened.keys())
        weights = {name: torch.empty(opened.get_slice(name).get_shape(), device="meta") for name in names}
    if not any(name.startswith("model.diffusion_model.") for name in names):
        raise UserError(
            f"{str(file)!r} is no single-file checkpoint of SDXL or Stable Diffusion 1.5: it has no weights named "
            "model.diffusion_model... A text encoder goes to --encoder."
        )
    return fetch_diffusers_config(weights)["pretrained_model_name_or_path"]


@cache
def _hub_configs(hub_id: str) -> str:
    """The folder of a hub model's configurations and tokenizers, which are downloaded unless they are cached."""
    patterns = ["*.json", "*/*.json", "*/*.txt"]
    for from_cache in (True, False):
        try:
            folder = snapshot_download(hub_id, allow_patterns=patterns, local_files_only=from_cache)
        except LocalEntryNotFoundError:
            if not from_cache:
                raise
        else:
            if all((Path(folder) / part).is_file() for part in ("model_index.json", "unet/config.json")):
                return folder
    raise FileNotFoundError("it has no model_index.json or no unet/config.json")


def model_digest(model: str) -> str:
    """The digest of an encoder's or checkpoint's files, of `MODEL:FILE` behind the model's name.

    A hub id, or an open_clip tag, is its own digest, because its files lie wherever a cache put them.

    Raises:
        UserError: a file cannot be read.
    """
    model = model_of_run(shipped(model)).removeprefix("local-dir:")  # of a training run, what `load_text_encoder` takes
    try:
        folder, file = _split(model)
        if folder and file is not None and os.path.isdir(shipped(folder)):
            return f"{path_digest(shipped(folder))}:{path_digest(file)}"
        if (named := model_and_weights(model)) and os.path.exists(named[1]):
            return f"{named[0]}:{path_digest(named[1])}"
        return path_digest(model) if os.path.exists(model) else model
    except OSError as error:
        raise UserError(f"The model {model!r} cannot be read ({reason(error)}). Give another one.") from error


def load_sdxl(
    base: str | os.PathLike,
    encoder: str | os.PathLike | None,
    device: torch.device,
    dtype: torch.dtype | None = None,
    encoder_2: str | os.PathLike | None = None,
) -> StableDiffusionXLLongPromptPipeline:
    """`load_pipeline` for SDXL alone."""
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
    """Loads an SDXL or Stable Diffusion 1.5 checkpoint for long prompts.

    Args:
        base: see `find_checkpoint`.
        encoder: replaces the first text encoder, anything `load_text_encoder` takes. None keeps the checkpoint's own,
            which reads long prompts in chunks.
        device: of all models.
        dtype: of all models; `default_dtype(device)` if None.
        encoder_2: replaces SDXL's second text encoder, a CLIPTextModelWithProjection. None keeps the checkpoint's own;
            "stretch" keeps its weights and stretches its positions as Long-CLIP does.
        part: "encoders" leaves out UNet and autoencoder, which are then None; "denoiser" the text encoders, so that it
            renders from embeddings that the other part has made.

    Raises:
        UserError: the checkpoint is of another kind or incomplete, or an encoder does not fit. As far as configurations
            say, known before the checkpoint's weights are read.
    """
    with explain_failure(f"The SDXL checkpoint {os.fspath(base)!r} could not be loaded", "Give an SDXL folder."):
        return _load(find_checkpoint(base), encoder, device, dtype or default_dtype(device), encoder_2, part)


def _load(
    checkpoint: Checkpoint,
    encoder: str | os.PathLike | None,
    device: torch.device,
    dtype: torch.dtype,
    encoder_2: str | os.PathLike | None,
    part: Part,
) -> DiffusionPipeline:
    kind = _check_kind(checkpoint, tuple(PIPELINES))
    if kind != SDXL and encoder_2 is not None:
        raise UserError(
            f"The SDXL checkpoint {checkpoint.name!r} is a {kind}, which has no second encoder. Leave encoder_2 out."
        )
    names = _ENCODERS + (("text_encoder_2", "tokenizer_2") if kind == SDXL else ())
    parts: dict = dict.fromkeys({"all": (), "encoders": _DENOISER, "denoiser": names}[part])
    if kind == SDXL:
        parts["add_watermarker"] = False
    elif part == "encoders" or checkpoint.file:
        parts |= {"safety_checker": None, "requires_safety_checker": False}  # a gigabyte; single files have none
    if part != "denoiser":
        parts |= _text_encoders(checkpoint, kind, encoder, encoder_2, dtype)
    parts[_DTYPE_ARGUMENT] = dtype
    if checkpoint.file is None:
        pipe = PIPELINES[kind].from_pretrained(checkpoint.folder, **parts)
    else:
        pipe = _from_single_file(PIPELINES[kind], checkpoint, parts)
    if part != "denoiser" and encoder_2 == STRETCH:
        text_encoder_2, tokenizer_2 = stretch_text_encoder(pipe.text_encoder_2, pipe.tokenizer_2)
        pipe.register_modules(text_encoder_2=text_encoder_2, tokenizer_2=tokenizer_2)
    pipe = pipe.to(device)
    models = {name: model for name, model in pipe.components.items() if isinstance(model, nn.Module)}
    for name, model in models.items():
        if name in _DENOISER and checkpoint.file is None:
            _check_all_used(Path(checkpoint.folder) / name / "diffusion_pytorch_model.safetensors", model)
        source = {"text_encoder": encoder, "text_encoder_2": encoder_2}.get(name) or f"{checkpoint.name}/{name}"
        check_finite(model.state_dict().items(), repr(os.fspath(source)))  # in the dtype that it runs in
    return pipe


def _from_single_file(cls: type[DiffusionPipeline], checkpoint: Checkpoint, parts: dict) -> DiffusionPipeline:
    missing = None
    try:
        with quiet_diffusers():  # it warns of every model that it casts
            pipe = cls.from_single_file(str(checkpoint.file), config=checkpoint.folder, local_files_only=True, **parts)
    except NotImplementedError as error:  # casting weights that the file does not have
        missing = reason(error)
    else:
        models = ((name, model) for name, model in pipe.components.items() if isinstance(model, nn.Module))
        weights = ((f"{name}.{key}", weight) for name, model in models for key, weight in model.state_dict().items())
        missing = next((name for name, weight in weights if weight.is_meta), None)
    if missing:
        raise UserError(
            f"The SDXL checkpoint {checkpoint.name!r} lacks weights of its configuration's models ({missing}). Give a "
            "whole checkpoint, and the configuration that belongs to it."
        )
    return pipe


@contextmanager
def quiet_diffusers() -> Iterator[None]:
    """Within, diffusers reports errors only."""
    before = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(before)


def _check_all_used(file: Path, model: nn.Module) -> None:
    """Raises UserError where diffusers has left out weights, or made some up, because the configuration is another."""
    if file.is_file():
        with safe_open(file, framework="pt") as opened:
            count = len(list(opened.keys()))
        if count != (expected := len(model.state_dict())):
            raise UserError(f"{str(file)!r} holds {count} weights, but its config.json is of a model with {expected}.")


def default_dtype(device: torch.device) -> torch.dtype:
    """float32 on the CPU, float16 elsewhere."""
    return torch.float32 if device.type == "cpu" else torch.float16


def check_base(base: str | os.PathLike, kinds: tuple[str, ...] = (SDXL,)) -> str:
    """The name of the diffusers class of a checkpoint; reads configurations only.

    Raises:
        UserError: there is no such checkpoint, or it is none of `kinds`.
    """
    with explain_failure(f"The SDXL checkpoint {os.fspath(base)!r} cannot be read", "Give an SDXL folder."):
        return _check_kind(find_checkpoint(base), kinds)


def _check_kind(checkpoint: Checkpoint, kinds: tuple[str, ...]) -> str:
    named, folder = f"The SDXL checkpoint {checkpoint.name!r}", Path(checkpoint.folder)
    why = "it has no readable model_index.json" if checkpoint.is_local else "no hub model of this name can be reached"
    if checkpoint.is_local:
        if not (folder / "model_index.json").is_file():
            raise UserError(f"{named} cannot be read: {why}. Give an SDXL folder.")
        for file in (folder / "model_index.json", *sorted(folder.glob("*/*config.json"))):
            if file.parent.name.partition("_")[0] != "tokenizer":  # whose numbers are no sizes
                try:
                    read_config(file)
                except UserError as error:
                    raise UserError(f"{named} cannot be read. {error} Give an SDXL folder.") from error
    with explain_failure(f"{named} cannot be read: {why}", "Give an SDXL folder."):
        kind = DiffusionPipeline.load_config(checkpoint.folder)["_class_name"]
    if kind not in kinds:
        raise UserError(f"{named} is a {kind}, not a {' or a '.join(kinds)}. Give an SDXL folder.")
    return kind


def default_size(base: str | os.PathLike) -> tuple[int, int]:
    """(height, width) in pixels that a checkpoint renders by default; reads configurations only."""
    named = f"The SDXL checkpoint {os.fspath(base)!r}"
    with explain_failure(f"{named} cannot be read", "Give an SDXL folder."):
        checkpoint = find_checkpoint(base)
        channels = vae_channels(checkpoint)
        size = _config(checkpoint, UNet2DConditionModel, "unet").get("sample_size")
    sizes = size if isinstance(size, (list, tuple)) else [size, size]
    if len(sizes) != 2 or not all(type(side) is int and 1 <= side <= _MOST_LATENTS for side in sizes):
        raise UserError(
            f"{named} says sample_size {size!r} in unet/config.json; it must be a whole number from 1 to "
            f"{_MOST_LATENTS}, or two. Give height and width, or a whole SDXL folder."
        )
    height, width = (side * 2 ** (len(channels) - 1) for side in sizes)
    return height, width


def vae_channels(checkpoint: Checkpoint) -> list[int]:
    """Channels of the autoencoder's blocks, the last of which works on latents."""
    channels = _config(checkpoint, AutoencoderKL, "vae").get("block_out_channels")
    if not isinstance(channels, (list, tuple)) or not 1 <= len(channels) <= 10:
        raise UserError(
            f"The SDXL checkpoint {checkpoint.name!r} says block_out_channels {channels!r} in vae/config.json; it must "
            "be a list of 1 to 10 numbers. Give a whole SDXL folder."
        )
    return channels


def _config(checkpoint: Checkpoint, cls: type, subfolder: str) -> dict:
    problem = f"The SDXL checkpoint {checkpoint.name!r} has no readable {subfolder}/config.json"
    has_config = (Path(checkpoint.folder) / subfolder / "config.json").is_file()
    if not has_config and (checkpoint.is_local or not may_be_hub_id(checkpoint.folder)):
        raise UserError(f"{problem}. Give a whole SDXL folder.")
    with explain_failure(problem, "Give a whole SDXL folder."):
        return cls.load_config(checkpoint.folder, subfolder=subfolder)


def _unet_width(checkpoint: Checkpoint) -> int:
    """Width of the hidden states that the UNet reads."""
    width = _config(checkpoint, UNet2DConditionModel, "unet").get("cross_attention_dim")
    if type(width) is not int:
        raise UserError(
            f"The SDXL checkpoint {checkpoint.name!r} says cross_attention_dim {width!r} in unet/config.json, not a "
            "whole number. Give a whole SDXL folder."
        )
    return width


def _text_config(checkpoint: Checkpoint, subfolder: str) -> CLIPTextConfig:
    problem = f"The SDXL checkpoint {checkpoint.name!r} has no readable {subfolder}/config.json"
    with explain_failure(problem, "Give a whole SDXL folder."):
        return CLIPTextConfig.from_pretrained(checkpoint.folder, subfolder=subfolder)


def _text_encoders(
    checkpoint: Checkpoint,
    kind: str,
    encoder: str | os.PathLike | None,
    encoder_2: str | os.PathLike | None,
    dtype: torch.dtype,
) -> dict:
    """The text encoders of a checkpoint, with the tokenizers of those that replace its own, by name.

    Those that nothing replaces are left out where the checkpoint is a single file or on the hub. Of a folder they are
    not left to diffusers, which fills missing weights with random numbers.
    """
    parts = {}
    if encoder is not None:
        text_encoder, tokenizer = load_text_encoder(encoder)
        (_check_first if kind == SDXL else _check_only)(text_encoder, os.fspath(encoder), checkpoint)
        parts |= {"text_encoder": text_encoder, "tokenizer": tokenizer}
    if encoder_2 is not None and encoder_2 != STRETCH:
        text_encoder, tokenizer = load_text_encoder(encoder_2)
        _check_second(text_encoder, os.fspath(encoder_2), checkpoint)
        # The UNet was trained with this pad token after a text; the tokenizer of another file may have another one.
        with explain_failure(f"The tokenizer_2 of the SDXL checkpoint {checkpoint.name!r} could not be loaded"):
            stock = CLIPTokenizer.from_pretrained(checkpoint.folder, subfolder="tokenizer_2")
        tokenizer.pad_token = stock.pad_token
        parts |= {"text_encoder_2": text_encoder, "tokenizer_2": tokenizer}
    if checkpoint.file is None and checkpoint.is_local:
        names = {"text_encoder", "text_encoder_2"} if kind == SDXL else {"text_encoder"}
        parts |= {name: read_encoder(Path(checkpoint.folder), name) for name in sorted(names - parts.keys())}
    return {name: part.to(dtype) if isinstance(part, nn.Module) else part for name, part in parts.items()}


def _check_first(text_encoder: PreTrainedModel, encoder: str, checkpoint: Checkpoint) -> None:
    width = text_encoder.config.hidden_size
    second = _text_config(checkpoint, "text_encoder_2").hidden_size
    unet = _unet_width(checkpoint)
    if width + second == unet:
        return
    model = _CLIP_OF_WIDTH.get(unet - second)
    raise UserError(
        f"The encoder {encoder!r} has width {width} and the checkpoint's second encoder {second}, together "
        f"{width + second}; its UNet reads {unet}. An encoder of width {unet - second} fits"
        f"{f': {model}' if model else ''}. SDXL takes one of width 768: ViT-L-14."
    )


def first_encoder_config(base: str) -> CLIPTextConfig:
    """The configuration of a checkpoint's first text encoder."""
    return _text_config(find_checkpoint(base), "text_encoder")


def first_tokenizer(base: str) -> CLIPTokenizer:
    """The tokenizer of a checkpoint's first text encoder. Raises UserError if it cannot be loaded."""
    checkpoint = find_checkpoint(base)
    with explain_failure(f"The tokenizer of the SDXL checkpoint {checkpoint.name!r} could not be loaded"):
        return CLIPTokenizer.from_pretrained(checkpoint.folder, subfolder="tokenizer")


def check_same_width(encoder: str, width: int, base: str, replaced_width: int) -> None:
    """Raises UserError unless `width` equals the width of the encoder of `base` that is replaced."""
    if width != replaced_width:
        raise UserError(
            f"The encoder {encoder!r} has width {width}, and the encoder of {base!r} that it replaces has width "
            f"{replaced_width}. Give an encoder of width {replaced_width}"
            f"{': ViT-L-14' if replaced_width == 768 else ''}."
        )


def _check_only(text_encoder: PreTrainedModel, encoder: str, checkpoint: Checkpoint) -> None:
    """Checks the encoder of Stable Diffusion 1.5, which has one, and reads its last layer, not the one before."""
    width, unet = text_encoder.config.hidden_size, _unet_width(checkpoint)
    if width != unet:
        model = _CLIP_OF_WIDTH.get(unet)
        raise UserError(
            f"The encoder {encoder!r} has width {width}, and the checkpoint's UNet reads {unet}. An encoder of width "
            f"{unet} fits{f': {model}' if model else ''}."
        )
    if isinstance(text_encoder, CLIPTextModelWithProjection):
        raise UserError(
            f"The encoder {encoder!r} has a projection, which this checkpoint does not read. Write it with "
            "`debias-diffusion export`, without --projection."
        )


def _check_second(text_encoder: PreTrainedModel, encoder: str, checkpoint: Checkpoint) -> None:
    given, stock = text_encoder.config, _text_config(checkpoint, "text_encoder_2")
    wanted = f"SDXL's second encoder has width {stock.hidden_size} and a projection to {stock.projection_dim}" + (
        ": ViT-bigG-14." if stock.hidden_size == 1280 else "."
    )
    named = f"The second encoder {encoder!r} has"
    if given.hidden_size != stock.hidden_size:
        raise UserError(f"{named} width {given.hidden_size}. {wanted}")
    if not isinstance(text_encoder, CLIPTextModelWithProjection):
        raise UserError(f"{named} no projection. {wanted} Write it with `debias-diffusion export --projection`.")
    if given.projection_dim != stock.projection_dim:
        raise UserError(f"{named} a projection to {given.projection_dim}. {wanted}")
