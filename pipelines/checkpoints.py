"""SDXL and Stable Diffusion 1.5 checkpoints with other text encoders, checked before gigabytes are read."""

import os
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import diffusers
import torch
from diffusers import DiffusionPipeline, UNet2DConditionModel
from diffusers.loaders.single_file_utils import fetch_diffusers_config
from diffusers.utils import logging as diffusers_logging
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, PreTrainedModel

from debias_diffusion.encoders import load_text_encoder, may_be_hub_id
from debias_diffusion.errors import UserError, reason
from debias_diffusion.files import path_digest
from debias_diffusion.interchange.stretch import stretch_text_encoder
from debias_diffusion.interchange.transformers_folder import read_encoder
from debias_diffusion.models.model_files import check_finite, explain_failure
from debias_diffusion.models.shipped import shipped

from .classes import StableDiffusionLongPromptPipeline, StableDiffusionXLLongPromptPipeline

SDXL = "StableDiffusionXLPipeline"
PIPELINES = {SDXL: StableDiffusionXLLongPromptPipeline, "StableDiffusionPipeline": StableDiffusionLongPromptPipeline}
STRETCH = "stretch"  # as second encoder: the checkpoint's own, with Long-CLIP's stretched positions

Part = Literal["all", "encoders", "denoiser"]  # of a pipeline: everything, text encoders, UNet and autoencoder
Slot = Literal["text_encoder", "text_encoder_2"]
_DENOISER = ("unet", "vae")
_SLOTS: dict[str, tuple[Slot, ...]] = {
    SDXL: ("text_encoder", "text_encoder_2"),
    "StableDiffusionPipeline": ("text_encoder",),
}
_TOKENIZER = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}

_CLIP_OF_WIDTH = {512: "ViT-B-32 or ViT-B-16", 768: "ViT-L-14", 1024: "ViT-H-14", 1280: "ViT-bigG-14"}
# diffusers renamed it, and ignores an unknown name with a mere warning
_DTYPE_ARGUMENT = "dtype" if tuple(map(int, version("diffusers").split(".")[:2])) >= (0, 40) else "torch_dtype"


@dataclass(frozen=True)
class Checkpoint:
    """An SDXL or Stable Diffusion 1.5 checkpoint, before its weights are read.

    Attributes:
        name: as the user gave it.
        configs: folder in diffusers' layout or hub id, of the configurations and tokenizers.
        file: weights in the original single-file layout; None if `configs` has them.
    """

    name: str
    configs: str
    file: Path | None = None

    @classmethod
    def parse(cls, name: str | os.PathLike) -> "Checkpoint":
        """The checkpoint that `--base` names.

        Args:
            name: folder in diffusers' layout, hub id or "toy/sdxl"; `FILE.safetensors`, a checkpoint in the original
                single-file layout, whose configuration and tokenizers are those of the hub model that diffusers infers
                from the weights; or `FOLDER:FILE.safetensors` with the folder or hub id that has them.

        Raises:
            UserError: a file is missing, of another kind, or its configuration cannot be had.
        """
        name = os.fspath(name)
        with explain_failure(f"The SDXL checkpoint {name!r} cannot be read", "Give an SDXL folder."):
            return cls(name, *_find(name))

    @property
    def weights(self) -> str:
        """The file, folder or hub id of the weights."""
        return str(self.file or self.name)

    @property
    def digest(self) -> str:
        """Of the files that the name names; a hub id is its own digest, because a cache has its files."""
        paths = [path for path in map(shipped, filter(None, _split(self.name))) if os.path.exists(path)]
        return ":".join(map(path_digest, paths)) or self.name

    def check_kind(self, kinds: Collection[str] = (SDXL,)) -> str:
        """The name of the checkpoint's class in diffusers. Raises UserError if it is none of `kinds`."""
        if self._kind not in kinds:
            raise UserError(
                f"The SDXL checkpoint {self.name!r} is a {self._kind}, not a {' or a '.join(kinds)}. Give an SDXL "
                "folder."
            )
        return self._kind

    @cached_property
    def _kind(self) -> str:
        local = Path(self.configs).is_dir()
        why = "it has no readable model_index.json" if local else "no hub model of this name can be reached"
        with explain_failure(f"The SDXL checkpoint {self.name!r} cannot be read: {why}", "Give an SDXL folder."):
            return DiffusionPipeline.load_config(self.configs)["_class_name"]

    def config(self, part: str) -> dict:
        """The configuration of the UNet ("unet") or the autoencoder ("vae")."""
        with self.explain(f"{part}/config.json"):
            return UNet2DConditionModel.load_config(self.configs, subfolder=part)

    def text_config(self, slot: Slot) -> CLIPTextConfig:
        """The configuration of a text encoder."""
        with self.explain(f"{slot}/config.json"):
            return CLIPTextConfig.from_pretrained(self.configs, subfolder=slot)

    def tokenizer(self, slot: Slot = "text_encoder") -> CLIPTokenizer:
        """The tokenizer of a text encoder."""
        with self.explain(_TOKENIZER[slot]):
            return CLIPTokenizer.from_pretrained(self.configs, subfolder=_TOKENIZER[slot])

    def explain(self, file: str) -> AbstractContextManager:
        """Turns errors of reading a file of the configurations into a UserError."""
        return explain_failure(f"The SDXL checkpoint {self.name!r} has no readable {file}", "Give a whole SDXL folder.")

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels that the checkpoint renders by default."""
        size = self.config("unet").get("sample_size")
        height, width = sizes = size if isinstance(size, list) and len(size) == 2 else [size, size]
        if not all(type(side) is int and side > 0 for side in sizes):
            raise UserError(
                f"The SDXL checkpoint {self.name!r} says sample_size {size!r} in unet/config.json; it must be a whole "
                "number, or two. Give height and width, or a whole SDXL folder."
            )
        with self.explain("vae/config.json"):
            factor = 2 ** (len(self.config("vae")["block_out_channels"]) - 1)
        return height * factor, width * factor

    def check_fits(self, slot: Slot, encoder: PreTrainedModel, name: str) -> None:
        """Raises UserError unless an encoder, called `name`, can take the place of one of the checkpoint's."""
        is_sdxl = self.check_kind(PIPELINES) == SDXL
        second = self.text_config("text_encoder_2") if is_sdxl else None
        if slot == "text_encoder":
            wanted = self.config("unet")["cross_attention_dim"] - (second.hidden_size if is_sdxl else 0)
        else:
            wanted = second.hidden_size
        named, ordinal = f"The encoder {name!r} has", "first" if slot == "text_encoder" else "second"
        reads = f"the UNet of {self.name!r} reads"
        if (width := encoder.config.hidden_size) != wanted:
            known = f": {_CLIP_OF_WIDTH[wanted]}" if wanted in _CLIP_OF_WIDTH else ""
            raise UserError(
                f"{named} width {width}; {reads} {wanted} of its {ordinal} encoder. Give one of width {wanted}{known}."
            )
        projects = isinstance(encoder, CLIPTextModelWithProjection)
        if slot == "text_encoder" and projects and not is_sdxl:
            raise UserError(
                f"{named} a projection, which {self.name!r} does not read. Write it with `debias-diffusion export`, "
                "without --projection."
            )
        if slot == "text_encoder_2" and not projects:
            raise UserError(
                f"{named} no projection, which SDXL reads of its second encoder. Write it with `debias-diffusion "
                "export --projection`."
            )
        if slot == "text_encoder_2" and encoder.config.projection_dim != second.projection_dim:
            raise UserError(
                f"{named} a projection to {encoder.config.projection_dim}; {reads} one to {second.projection_dim}. "
                f"Give one with that projection{': ViT-bigG-14' if second.projection_dim == 1280 else ''}."
            )


def _find(name: str) -> tuple[str, Path | None]:
    """(configurations, file of weights) of a checkpoint, see `Checkpoint.parse`."""
    folder, file = _split(name)
    if file is None:
        if Path(name).is_file():
            raise UserError(
                f"The SDXL checkpoint {name!r} is a file that is not read. Give a folder in diffusers' layout, or a "
                "single-file checkpoint in .safetensors."
            )
        return _local_or_hub(shipped(name), name), None
    if not file.is_file():
        raise UserError(
            f"The SDXL checkpoint {name!r} is not there: {str(file)!r} is no file. Give an SDXL folder in diffusers' "
            "layout, a hub id, or a .safetensors file."
        )
    with explain_failure(f"The SDXL checkpoint {name!r} cannot be read", "Give a whole .safetensors file."):
        folder = folder or _inferred_hub_id(file)
    folder = _local_or_hub(shipped(folder), name)
    if Path(folder).is_dir():
        return folder, file
    try:
        return _hub_configs(folder), file
    except Exception as error:  # of the network, the hub, or a name that is no hub id
        raise UserError(
            f"The SDXL checkpoint {name!r} is a single file and needs the configuration and tokenizers of {folder!r}, "
            f"which cannot be loaded: {reason(error)}. Name a folder in diffusers' layout that has them, without "
            f"weights if you like: {'FOLDER:' + str(file)!r}."
        ) from error


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
        base: see `Checkpoint.parse`.
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
        given = {"text_encoder": encoder, "text_encoder_2": encoder_2}
        given = {slot: os.fspath(name) for slot, name in given.items() if name is not None}
        return _load(Checkpoint.parse(base), given, device, dtype or default_dtype(device), part)


def _load(
    checkpoint: Checkpoint, encoders: dict[Slot, str], device: torch.device, dtype: torch.dtype, part: Part
) -> DiffusionPipeline:
    kind = checkpoint.check_kind(PIPELINES)
    slots = _SLOTS[kind]
    if not encoders.keys() <= set(slots):
        raise UserError(
            f"The SDXL checkpoint {checkpoint.name!r} is a {kind}, which has no second encoder. Leave encoder_2 out."
        )
    parts: dict = {_DTYPE_ARGUMENT: dtype}
    if kind == SDXL:
        parts["add_watermarker"] = False
    elif part == "encoders" or checkpoint.file:
        parts |= {"safety_checker": None, "requires_safety_checker": False}  # a gigabyte; single files have none
    if part == "denoiser":
        parts |= dict.fromkeys([*slots, *(_TOKENIZER[slot] for slot in slots)])
    else:
        parts |= _text_encoders(checkpoint, slots, encoders, dtype)
    if part == "encoders":
        parts |= dict.fromkeys(_DENOISER)
    elif checkpoint.file is None:
        parts |= {name: _load_model(checkpoint, name, dtype) for name in _DENOISER}
    if checkpoint.file is None:
        pipe = PIPELINES[kind].from_pretrained(checkpoint.configs, **parts)
    else:
        pipe = _from_single_file(PIPELINES[kind], checkpoint, parts)
    if part != "denoiser" and encoders.get("text_encoder_2") == STRETCH:
        text_encoder_2, tokenizer_2 = stretch_text_encoder(pipe.text_encoder_2, pipe.tokenizer_2)
        pipe.register_modules(text_encoder_2=text_encoder_2, tokenizer_2=tokenizer_2)
    pipe = pipe.to(device)
    for name, model in _models(pipe):
        source = encoders.get(name, f"{checkpoint.name}/{name}")
        check_finite(model.state_dict().items(), repr(source))  # in the dtype that it runs in
    return pipe


def _models(pipe: DiffusionPipeline) -> list[tuple[str, nn.Module]]:
    return [(name, model) for name, model in pipe.components.items() if isinstance(model, nn.Module)]


def _text_encoders(
    checkpoint: Checkpoint, slots: Collection[Slot], encoders: dict[Slot, str], dtype: torch.dtype
) -> dict:
    """The text encoders of a checkpoint, with the tokenizers of those that replace its own, by name.

    Those that nothing replaces are left out where the checkpoint is a single file or on the hub. Of a folder they are
    not left to diffusers, which fills missing weights with random numbers.
    """
    parts = {}
    for slot, name in encoders.items():
        if name != STRETCH or slot == "text_encoder":
            encoder, tokenizer = load_text_encoder(name)
            checkpoint.check_fits(slot, encoder, name)
            if slot == "text_encoder_2":
                # The UNet was trained with this pad token after a text; another file's tokenizer may have another one.
                tokenizer.pad_token = checkpoint.tokenizer(slot).pad_token
            parts |= {slot: encoder.to(dtype), _TOKENIZER[slot]: tokenizer}
    if checkpoint.file is None and Path(checkpoint.configs).is_dir():
        missing = [slot for slot in slots if slot not in parts]
        parts |= {slot: read_encoder(Path(checkpoint.configs), slot).to(dtype) for slot in missing}
    return parts


def _load_model(checkpoint: Checkpoint, part: str, dtype: torch.dtype) -> nn.Module:
    """The UNet or the autoencoder. Raises UserError if weights are missing or superfluous."""
    options = {"subfolder": part, "output_loading_info": True, _DTYPE_ARGUMENT: dtype}
    with checkpoint.explain(f"{part}/config.json"):
        cls = getattr(diffusers, checkpoint.config(part)["_class_name"])
    with quiet_diffusers():  # what it warns of is an error here
        model, info = cls.from_pretrained(checkpoint.configs, **options)
    for problem, keys in (("lack", info["missing_keys"]), ("have no place for", info["unexpected_keys"])):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise UserError(
                f"The weights of {part} in {checkpoint.name!r} are not of its config.json's model: they {problem} "
                f"{min(keys)}{more}. Give a whole SDXL folder."
            )
    return model


def _from_single_file(cls: type[DiffusionPipeline], checkpoint: Checkpoint, parts: dict) -> DiffusionPipeline:
    try:
        with quiet_diffusers():  # it warns of every model that it casts
            pipe = cls.from_single_file(str(checkpoint.file), config=checkpoint.configs, local_files_only=True, **parts)
        weights = (
            (f"{name}.{key}", weight) for name, model in _models(pipe) for key, weight in model.state_dict().items()
        )
        missing = next((name for name, weight in weights if weight.is_meta), None)
    except NotImplementedError as error:  # casting weights that the file does not have
        missing = reason(error)
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


def default_dtype(device: torch.device) -> torch.dtype:
    """float32 on the CPU, float16 elsewhere."""
    return torch.float32 if device.type == "cpu" else torch.float16
