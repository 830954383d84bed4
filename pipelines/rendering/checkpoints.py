"""SDXL and Stable Diffusion 1.5 checkpoints with other text encoders, checked before gigabytes are read."""

import math
import os
import re
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import diffusers
import torch
from diffusers import DiffusionPipeline, UNet2DConditionModel
from diffusers.loaders.single_file_utils import fetch_diffusers_config
from safetensors import safe_open
from torch import nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, PreTrainedModel

from debias_diffusion.clip.model_files import (
    check_finite,
    check_fit,
    check_folder,
    check_hub,
    quiet_logging,
)
from debias_diffusion.encoders.hub import place_digest
from debias_diffusion.encoders.spec import load_text_encoder
from debias_diffusion.encoders.stretch import stretch_text_encoder
from debias_diffusion.encoders.transformers_folder import find_tokenizer, read_encoder
from debias_diffusion.errors import UserError, explain_failure, reason
from debias_diffusion.limits import MOST_PIXELS, Checked, Guidance, Steps

from ..classes import (
    StableDiffusionLongPromptPipeline,
    StableDiffusionXLLongPromptImg2ImgPipeline,
    StableDiffusionXLLongPromptPipeline,
)
from .options import split_base

SDXL = "StableDiffusionXLPipeline"
REFINER = "StableDiffusionXLImg2ImgPipeline"  # SDXL's, of one text encoder
PIPELINES = {SDXL: StableDiffusionXLLongPromptPipeline, "StableDiffusionPipeline": StableDiffusionLongPromptPipeline}
REFINERS = {REFINER: StableDiffusionXLLongPromptImg2ImgPipeline}
STRETCH = "stretch"  # as second encoder: the checkpoint's, with Long-CLIP's stretched positions

Part = Literal["all", "encoders", "denoiser"]  # of a pipeline: everything, text encoders, UNet and autoencoder
Slot = Literal["text_encoder", "text_encoder_2"]
_TOKENIZERS: dict[Slot, str] = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
_SLOTS: dict[str, list[Slot]] = {SDXL: [*_TOKENIZERS], REFINER: ["text_encoder_2"]}  # of others the first
_DENOISER = ("unet", "vae")
_FIRST_POSITIONS = r"(conditioner\.embedders\.0|cond_stage_model)\.transformer\..*position_embedding\.weight"

# diffusers renamed it, and ignores an unknown name with a mere warning
_DTYPE_ARGUMENT = "dtype" if tuple(map(int, version("diffusers").split(".")[:2])) >= (0, 40) else "torch_dtype"


@dataclass(frozen=True)
class Defaults(Checked):
    """What a checkpoint renders with unless told otherwise. model_index.json may say it, in "_sampling".

    Attributes:
        steps, guidance_scale: as in `Sampling`.
        fixed_size: whether images of any size but the checkpoint's own are refused.
    """

    steps: Steps = 30
    guidance_scale: Guidance = 7.0
    fixed_size: bool = False


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
            UserError: a file is missing or of another kind.
        """
        name = os.fspath(name)
        advice = "Give a whole .safetensors file, or an SDXL folder."
        with explain_failure(f"The SDXL checkpoint {name!r} cannot be read", advice):
            configs, file = split_base(name)
            return cls(name, configs or _inferred_hub_id(file), file)

    def count_weights(self) -> int:
        """The weights in the safetensors files that are loaded, by their headers; 0 for a hub id."""
        names = r"(diffusion_pytorch_)?model(-\d+-of-\d+)?\.safetensors"
        files = [file for file in Path(self.configs).glob("*/*") if re.fullmatch(names, file.name)]
        total = 0
        with explain_failure(f"The weights of the SDXL checkpoint {self.name!r} cannot be read"):
            for file in [self.file] if self.file else files:
                with safe_open(file, framework="pt") as opened:
                    total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
        return total

    @cached_property
    def digest(self) -> str:
        """Of the files that the name names, often gigabytes; of a hub id its commit."""
        return ":".join(map(place_digest, filter(None, (self.configs, self.file and str(self.file)))))

    def check_kind(self, kinds: Collection[str] = (SDXL,)) -> str:
        """The name of the checkpoint's class in diffusers. Raises UserError if it is none of `kinds`."""
        if (kind := self._index["_class_name"]) not in kinds:
            wanted = "an SDXL folder" if SDXL in kinds else "the folder of SDXL's refiner"
            raise UserError(
                f"The SDXL checkpoint {self.name!r} is a {kind}, not a {' or a '.join(kinds)}. Give {wanted}."
            )
        return kind

    @cached_property
    def _index(self) -> dict:
        """Its model_index.json, which names its class in diffusers."""
        failure = f"The SDXL checkpoint {self.name!r} cannot be read: {self.configs!r} has no readable model_index.json"
        advice = "Give an SDXL folder."
        if self.file:
            advice = f"Name a folder with its configuration and tokenizers: {f'FOLDER:{self.file}'!r}."
        with explain_failure(failure, advice):
            if not Path(self.configs).is_dir():
                check_hub(self.configs)
            index = DiffusionPipeline.load_config(self.configs)
            return {**index, "_class_name": str(index["_class_name"])}  # an error for a list, or without a class

    @cached_property
    def defaults(self) -> "Defaults":
        """Those in its model_index.json, where there are some."""
        try:
            return Defaults(**self._index.get("_sampling", {}))
        except (TypeError, ValueError) as error:
            problem = f"_sampling in the model_index.json of {self.name!r} cannot be used"
            raise UserError(f"{problem}: {reason(error)}. Mend it, or take it out.") from error

    def check_size(self, height: int, width: int) -> None:
        """Raises UserError for images of a size that it cannot render."""
        if self.defaults.fixed_size and (height, width) != self.size:
            own = " x ".join(map(str, self.size))
            raise UserError(f"This checkpoint renders {own} pixels only, got {height} x {width}. Leave the size out.")
        if height * width > MOST_PIXELS:
            raise UserError(
                f"A picture of {height} x {width} pixels has {height * width:,}; at most {MOST_PIXELS:,} can be drawn. "
                "Give a smaller height or width."
            )

    def config(self, part: str) -> dict:
        """The configuration of a model: "unet", "vae", "text_encoder" or "text_encoder_2"."""
        with self.explain(f"{part}/config.json"):
            config = {**UNet2DConditionModel.load_config(self.configs, subfolder=part)}  # an error for a list
        if part == "text_encoder" and self.file:
            config["max_position_embeddings"] = self._positions or config["max_position_embeddings"]
        return config

    @cached_property
    def _positions(self) -> int | None:
        """Of the first text encoder in a single file, if its configuration says otherwise."""
        with safe_open(self.file, framework="pt") as opened:
            name = next((name for name in opened.keys() if re.fullmatch(_FIRST_POSITIONS, name)), None)  # noqa: SIM118
            positions = opened.get_slice(name).get_shape()[0] if name else None
        configured = UNet2DConditionModel.load_config(self.configs, subfolder="text_encoder")["max_position_embeddings"]
        return None if positions == configured else positions

    def tokenizer(self, slot: Slot) -> CLIPTokenizer:
        """The tokenizer of one of the checkpoint's text encoders. Raises UserError if it cannot be loaded."""
        folder, name = Path(self.configs), _TOKENIZERS[slot]
        with self.explain(f"{name}/tokenizer_config.json"):
            if folder.is_dir():  # where there is none, transformers makes an empty one
                find_tokenizer(folder, folder / name)
            return CLIPTokenizer.from_pretrained(self.configs, subfolder=name)

    def check_sizes(self) -> None:
        """Raises UserError for configurations of more weights than the files hold, before a model is built."""
        names = [file.parent.name for file in Path(self.configs).glob("*/config.json")]
        size = self.file.stat().st_size if self.file else 0
        for name in names or (*_TOKENIZERS, *_DENOISER):  # those of a hub id, perhaps
            with self.explain(f"{name}/config.json"):
                check_folder(self.configs, f"{name} in {self.name!r}", name, size)

    def explain(self, file: str) -> AbstractContextManager:
        """Turns errors of reading a file of the configurations into a UserError."""
        return explain_failure(f"The SDXL checkpoint {self.name!r} has no readable {file}", "Give a whole SDXL folder.")

    @cached_property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels that the checkpoint renders by default."""
        with self.explain("sample_size in unet/config.json and block_out_channels in vae/config.json"):
            size = self.config("unet")["sample_size"]
            height, width = size if isinstance(size, list) else (size, size)
            factor = 2 ** (len(self.config("vae")["block_out_channels"]) - 1)
            return height * factor, width * factor

    def check_fits(self, slot: Slot, encoder: PreTrainedModel, name: str) -> None:
        """Raises UserError unless an encoder, called `name`, can take the place of one of the checkpoint's."""
        is_sdxl, is_first = self.check_kind(PIPELINES) == SDXL, slot == "text_encoder"
        second = self.config("text_encoder_2") if is_sdxl else {"hidden_size": 0}
        wanted = second["hidden_size"]
        if is_first:
            wanted = self.config("unet")["cross_attention_dim"] - wanted
        named, ordinal = f"The encoder {name!r} has", "first" if is_first else "second"
        reads = f"the UNet of {self.name!r} reads"
        if (width := encoder.config.hidden_size) != wanted:
            raise UserError(
                f"{named} width {width}; {reads} {wanted} of its {ordinal} encoder. Give one of width {wanted}."
            )
        given = encoder.config.projection_dim if isinstance(encoder, CLIPTextModelWithProjection) else None
        wanted = None if is_first else second["projection_dim"]
        if given != wanted and not (is_first and is_sdxl):  # nothing reads that of SDXL's first encoder
            has, needed = (f"a projection to {size}" if size else "no projection" for size in (given, wanted))
            raise UserError(
                f"{named} {has}; {reads} {needed} of its {ordinal} encoder. Write it with `debias-diffusion export`, "
                f"with{'' if wanted else 'out'} --projection."
            )


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


def load_pipeline(
    base: str | os.PathLike,
    encoder: str | os.PathLike | None,
    device: torch.device,
    dtype: torch.dtype | None = None,
    encoder_2: str | os.PathLike | None = None,
    part: Part = "all",
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
        part: "encoders" leaves out UNet and autoencoder, which are then None; "denoiser" the text encoders, so that it
            renders from embeddings that the other part has made.
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
            raise UserError(
                f"The SDXL checkpoint {checkpoint.name!r} is a {kind}, which has no second encoder. Leave encoder_2 "
                "out."
            )
        given = {"text_encoder": encoder, "text_encoder_2": None if encoder_2 == STRETCH else encoder_2}
        given = {slot: os.fspath(name) for slot, name in given.items() if name is not None}
        if checkpoint.file and checkpoint._positions:  # diffusers builds the encoder that the configuration describes
            given.setdefault("text_encoder", os.fspath(checkpoint.file))
        pipe = _load(checkpoint, given, dtype, part, kinds[kind])
        if encoder_2 == STRETCH and part != "denoiser":
            text_encoder_2, tokenizer_2 = stretch_text_encoder(pipe.text_encoder_2, pipe.tokenizer_2)
            pipe.register_modules(text_encoder_2=text_encoder_2, tokenizer_2=tokenizer_2)
        pipe = pipe.to(device)
        for name, weights in _weights(pipe):
            check_finite(weights.items(), repr(given.get(name, f"{checkpoint.name}/{name}")))
        return pipe


def _load(
    checkpoint: Checkpoint, encoders: dict[Slot, str], dtype: torch.dtype, part: Part, cls: type[DiffusionPipeline]
) -> DiffusionPipeline:
    slots = _SLOTS.get(checkpoint.check_kind(PIPELINES | REFINERS), ["text_encoder"])
    checkpoint.check_sizes()
    parts: dict = {_DTYPE_ARGUMENT: dtype}
    if "text_encoder_2" in slots:
        parts["add_watermarker"] = False
    elif part == "encoders" or checkpoint.file:
        parts |= {"safety_checker": None, "requires_safety_checker": False}  # a gigabyte; single files have none
    if part == "denoiser":
        parts |= dict.fromkeys([*slots, *(_TOKENIZERS[slot] for slot in slots)])
    else:
        parts |= _text_encoders(checkpoint, slots, encoders, dtype)
    if part == "encoders":
        parts |= dict.fromkeys(_DENOISER)
    elif checkpoint.file is None:
        parts |= {name: _load_model(checkpoint, name, dtype) for name in _DENOISER}
    if checkpoint.file is None:
        return cls.from_pretrained(checkpoint.configs, **parts)
    try:
        with quiet_logging():  # diffusers warns of every model that it casts
            pipe = cls.from_single_file(str(checkpoint.file), config=checkpoint.configs, **parts)
        on_meta = (f"{name}.{key}" for name, weights in _weights(pipe) for key in weights if weights[key].is_meta)
        missing = next(on_meta, None)
    except NotImplementedError as error:  # casting weights that the file does not have
        missing = reason(error)
    if missing:
        raise UserError(
            f"The SDXL checkpoint {checkpoint.name!r} lacks weights of its configuration's models ({missing}). Give a "
            "whole checkpoint, and the configuration that belongs to it."
        )
    return pipe


def _weights(pipe: DiffusionPipeline) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """(name, weights) of each model."""
    return [(name, model.state_dict()) for name, model in pipe.components.items() if isinstance(model, nn.Module)]


def _text_encoders(
    checkpoint: Checkpoint, slots: Collection[Slot], encoders: dict[Slot, str], dtype: torch.dtype
) -> dict:
    """The text encoders of a checkpoint, with the tokenizers of those that replace its own, by name.

    Those that nothing replaces are left out where the checkpoint is a single file or on the hub. Of a folder they are
    not left to diffusers, which fills missing weights with random numbers.
    """
    parts = load_text_encoders(checkpoint, encoders, torch.device("cpu"), dtype)
    if checkpoint.file is None and Path(checkpoint.configs).is_dir():
        kept = [slot for slot in slots if slot not in parts]
        parts |= {slot: read_encoder(Path(checkpoint.configs), slot).to(dtype) for slot in kept}
    return parts


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
        components |= {slot: encoder.to(device, dtype), _TOKENIZERS[slot]: tokenizer}
    return components


def _load_model(checkpoint: Checkpoint, part: str, dtype: torch.dtype) -> nn.Module:
    """The UNet or the autoencoder. Raises UserError if weights are missing or superfluous."""
    options = {"subfolder": part, "output_loading_info": True, _DTYPE_ARGUMENT: dtype}
    cls = getattr(diffusers, checkpoint.config(part)["_class_name"])
    with quiet_logging():  # what diffusers warns of is an error here
        model, info = cls.from_pretrained(checkpoint.configs, **options)
    superfluous = [f"{name} has no place in it" for name in sorted(info["unexpected_keys"])]
    check_fit(sorted(info["missing_keys"]), superfluous, f"{part} in {checkpoint.name!r}")
    return model


def default_dtype(device: torch.device) -> torch.dtype:
    """float32 on the CPU, float16 elsewhere."""
    return torch.float32 if device.type == "cpu" else torch.float16
