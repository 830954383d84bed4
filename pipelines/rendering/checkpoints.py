"""SDXL and Stable Diffusion 1.5 checkpoints: what their files say, read without diffusers and before any weights."""

import json
import os
import re
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers import CLIPTokenizer

from debias_diffusion.clip.weight_files import tensor_shapes, written_metadata
from debias_diffusion.encoders.hub import find_file, find_tokenizer, locate, location_digest
from debias_diffusion.errors import UserError, explain_failure, reason
from debias_diffusion.files import read_file
from debias_diffusion.limits import MOST_PIXELS, Checked, Guidance, Steps

from .options import split_base

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Kinds of checkpoints, by their classes in diffusers.
SDXL, SD15 = "StableDiffusionXLPipeline", "StableDiffusionPipeline"
REFINER = "StableDiffusionXLImg2ImgPipeline"  # SDXL's, of one text encoder
KINDS = (SDXL, SD15)  # that render from a prompt alone
STRETCH = "stretch"  # as second encoder: the checkpoint's, with Long-CLIP's stretched positions

Slot = Literal["text_encoder", "text_encoder_2"]
TOKENIZERS: dict[Slot, str] = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
DENOISER = ("unet", "vae")
# What marks v prediction in metadata: sd-scripts writes modelspec.prediction_type, ComfyUI modelspec.predict_key.
_V, _EPSILON = ("v", "v_prediction", "v-prediction", "velocity"), ("", "eps", "epsilon")
_FIRST_POSITIONS = r"(conditioner\.embedders\.0|cond_stage_model)\.transformer\..*position_embedding\.weight"


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
        """The checkpoint that a name stands for.

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

    @cached_property
    def digest(self) -> str:
        """Of the files that the name names, often gigabytes; of a hub id its commit."""
        return ":".join(map(location_digest, filter(None, (self.configs, self.file and str(self.file)))))

    def check_kind(self, kinds: Collection[str] = (SDXL,)) -> str:
        """The name of the checkpoint's class in diffusers. Raises UserError if it is none of `kinds`."""
        if (kind := self._index["_class_name"]) not in kinds:
            wanted = "an SDXL folder" if SDXL in kinds else "the folder of SDXL's refiner"
            raise UserError(f"The checkpoint {self.name!r} is a {kind}, not a {' or a '.join(kinds)}. Give {wanted}.")
        return kind

    @cached_property
    def _index(self) -> dict:
        """Its model_index.json, which names its class in diffusers."""
        failure = f"The SDXL checkpoint {self.name!r} cannot be read: {self.configs!r} has no readable model_index.json"
        advice = "Give an SDXL folder."
        if self.file:
            advice = f"Name a folder with its configuration and tokenizers: {f'FOLDER:{self.file}'!r}."
        with explain_failure(failure, advice):
            index = self._read("model_index.json")
            return {**index, "_class_name": str(index["_class_name"])}  # an error without a class

    @cached_property
    def _shapes(self) -> dict[str, list[int]]:
        """Of the tensors in a single file; of a folder nothing."""
        return tensor_shapes(self.file) if self.file else {}

    @cached_property
    def _metadata(self) -> dict[str, str]:
        """Of a single file; of a folder nothing."""
        return written_metadata(self.file) if self.file else {}

    @cached_property
    def scheduling(self) -> dict[str, Any]:
        """What a single file says of its scheduler, by the names that diffusers' configurations have.

        NoobAI's checkpoints and ComfyUI mark v prediction by an empty tensor `v_pred`, and zero terminal SNR by
        `ztsnr`; other programs by metadata. A schedule that ends without signal is drawn from its last step on (Lin et
        al. 2024, 3.3).

        Raises:
            UserError: the UNet predicts something else, such as the velocity of flow matching, which is not read.
        """
        names, metadata = self._shapes, self._metadata
        said = str(metadata.get("modelspec.prediction_type", metadata.get("modelspec.predict_key", ""))).lower()
        scheduler = "" if self.file else str(self._index.get("scheduler"))
        unread = said if said not in (*_V, *_EPSILON) else "EDM's v" if "edm_vpred.sigma_max" in names else ""
        if unread or "FlowMatch" in scheduler:
            raise UserError(
                f"The UNet of {self.name!r} predicts {unread or 'the velocity of flow matching'!r}, which is not read. "
                "Give a checkpoint that predicts epsilon or v."
            )
        found: dict[str, Any] = {"prediction_type": "v_prediction"} if "v_pred" in names or said in _V else {}
        return found | ({"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"} if "ztsnr" in names else {})

    def says(self) -> dict[str, Any]:
        """What its files tell of how it draws and reads: `scheduling`, positions, and sd-scripts' settings."""
        with self.explain("scheduler/scheduler_config.json"):
            found = {
                "prediction_type": self._read("scheduler_config.json", "scheduler").get("prediction_type", "epsilon")
            }
        slots = ("text_encoder", "text_encoder_2")[: 1 + (self.check_kind(KINDS) == SDXL)]
        found |= self.scheduling | {
            f"positions of {slot}": self.config(slot)["max_position_embeddings"] for slot in slots
        }
        named = ("ss_max_token_length", "ss_clip_skip")
        return found | {name: self._metadata[name] for name in named if name in self._metadata}

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
            raise UserError(f"{height} x {width} pixels are more than {MOST_PIXELS:,}. Give a smaller height or width.")

    def config(self, part: str) -> dict:
        """The configuration of a model: "unet", "vae", "text_encoder" or "text_encoder_2"."""
        with self.explain(f"{part}/config.json"):
            config = self._read("config.json", part)
        if part == "text_encoder" and self.file:
            config["max_position_embeddings"] = self.first_positions or config["max_position_embeddings"]
        return config

    def _read(self, name: str, folder: str = "") -> dict:
        """A JSON file of the configurations. Raises an error, not explained, if it is missing or holds no object."""
        if file := find_file(self.configs, name, folder):
            return {**json.loads(read_file(file))}  # an error for a list
        raise ValueError("it is missing" if os.path.isdir(self.source) else "the hub has none, or cannot be reached")

    @cached_property
    def source(self) -> str:
        """The folder of its configurations, or a hub id."""
        return locate(self.configs)[0]

    @cached_property
    def first_positions(self) -> int | None:
        """Of the first text encoder in a single file, if its configuration says otherwise."""
        positions = next(
            (shape[0] for name, shape in self._shapes.items() if re.fullmatch(_FIRST_POSITIONS, name)), None
        )
        configured = self._read("config.json", "text_encoder")["max_position_embeddings"]
        return None if positions == configured else positions

    def tokenizer(self, slot: Slot) -> CLIPTokenizer:
        """The tokenizer of one of the checkpoint's text encoders. Raises UserError if it cannot be loaded."""
        folder, name = Path(self.configs), TOKENIZERS[slot]
        with self.explain(f"{name}/tokenizer_config.json"):
            if folder.is_dir():  # where there is none, transformers makes an empty one
                find_tokenizer(folder, folder / name)
            return CLIPTokenizer.from_pretrained(self.source, subfolder=name)

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

    def check_fits(self, slot: Slot, encoder: "PreTrainedModel", name: str) -> None:
        """Raises UserError unless an encoder, called `name`, can take the place of one of the checkpoint's."""
        is_sdxl, is_first = self.check_kind(KINDS) == SDXL, slot == "text_encoder"
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
        given = encoder.config.projection_dim if hasattr(encoder, "text_projection") else None
        wanted = None if is_first else second["projection_dim"]
        if given != wanted and not (is_first and is_sdxl):  # nothing reads that of SDXL's first encoder
            has, needed = (f"a projection to {size}" if size else "no projection" for size in (given, wanted))
            raise UserError(
                f"{named} {has}; {reads} {needed} of its {ordinal} encoder. Export it with"
                f"{'' if wanted else 'out'} a projection."
            )


def _inferred_hub_id(file: Path) -> str:
    """The hub model with the configuration of a single-file checkpoint; reads names and shapes of the weights only."""
    import torch  # seconds, with diffusers, that a folder or a hub id need not wait for
    from diffusers.loaders.single_file_utils import fetch_diffusers_config

    weights = {name: torch.empty(shape, device="meta") for name, shape in tensor_shapes(file).items()}
    if not any(name.startswith("model.diffusion_model.") for name in weights):
        raise UserError(
            f"{str(file)!r} is no single-file checkpoint of SDXL or Stable Diffusion 1.5: it has no weights named "
            "model.diffusion_model... A text encoder is given as encoder."
        )
    return fetch_diffusers_config(weights)["pretrained_model_name_or_path"]
