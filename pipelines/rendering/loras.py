"""LoRAs that a prompt names as in A1111, `<lora:name:0.8>`: files of one folder, by their stems."""

import importlib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from debias_diffusion.errors import UserError, explain_failure, near_matches, quiet_logging, reason
from debias_diffusion.files import sha256
from debias_diffusion.text.chunks import Reading
from debias_diffusion.text.weighting import check_weight, take_out

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

MODELS = ("unet", "text_encoder", "text_encoder_2")
_digest = lru_cache(maxsize=None)(sha256)  # of files of hundreds of megabytes


class Lora(NamedTuple):
    """The stem of a file, and its weights for the text encoders and for the UNet."""

    name: str
    text_weight: float = 1.0
    unet_weight: float = 1.0


def lora_tags(prompt: str, reading: Reading) -> list[str]:
    """The tags of LoRAs in a prompt, which A1111 reads as `lyco`, too; under "a1111" none in comments."""
    text, _ = take_out(prompt, reading, negative=True)  # of which it takes comments alone
    return re.findall("<(?:lora|lyco):[^>]+>", text)


def read_lora(tag: str) -> Lora:
    """`<lora:name>`, `<lora:name:0.8>` or, with a weight for the UNet, `<lora:name:0.8:1>`. Raises UserError."""
    _, name, *given = tag[1:-1].split(":")
    try:
        weights = [float(number) for number in given]
        for weight in weights:
            check_weight(name, weight)
        return Lora(name.strip(), *weights * (2 if len(weights) == 1 else 1))
    except (ValueError, TypeError) as error:
        raise UserError(f"The tag {tag[:80]!r} cannot be read: {reason(error)}. Write <lora:name:0.8>.") from error


class LoraFolder:
    """The .safetensors files in a folder and below it. Names are looked up among their stems, and never opened.

    Raises UserError if there is no such folder, ModuleNotFoundError without peft, with which diffusers loads LoRAs.
    """

    def __init__(self, folder: str):
        importlib.import_module("peft")
        if not Path(folder).is_dir():
            raise UserError(f"There is no folder of LoRAs {folder!r}. Give one with .safetensors files.")
        self.folder, self._files = folder, sorted(Path(folder).rglob("*.safetensors"))

    def file(self, name: str) -> Path:
        """Raises UserError unless one file has this stem."""
        found = [path for path in self._files if path.stem == name]
        if len(found) == 1:
            return found[0]
        if found:
            raise UserError(f"The LoRA {name!r} may be {found[0]} or {found[1]}. Rename one of them.")
        hint = near_matches(name[:80], {path.stem for path in self._files})
        raise UserError(f"The LoRA {name[:80]!r} is not among the .safetensors files in {self.folder!r}.{hint}")

    def digests(self, loras: Sequence[Lora]) -> dict[str, str] | None:
        """sha256 of each file by name; None for no LoRAs. Raises UserError for one that is not there."""
        return {lora.name: _digest(self.file(lora.name)) for lora in loras} or None

    def apply(self, pipe: "DiffusionPipeline", loras: Sequence[Lora]) -> None:
        """Gives a pipeline, whose text encoders or UNet may be None, these LoRAs in place of others.

        Raises UserError for a file that is no LoRA for this checkpoint.
        """
        weights = {}
        with quiet_logging():  # of models that a LoRA leaves as they are
            pipe.unload_lora_weights()
            for number, lora in enumerate(loras):
                file, adapter = self.file(lora.name), f"lora_{number}"
                with explain_failure(f"The LoRA {str(file)!r} cannot be used", "Give one for this checkpoint."):
                    _load(pipe, str(file), adapter)
                weights[adapter] = dict.fromkeys(MODELS, lora.text_weight) | {"unet": lora.unet_weight}
            there = {adapter for adapters in pipe.get_list_adapters().values() for adapter in adapters}
            if used := [adapter for adapter in weights if adapter in there]:
                pipe.set_adapters(used, [weights[adapter] for adapter in used])


def _load(pipe: "DiffusionPipeline", file: str, adapter: str) -> None:
    """`load_lora_weights` without models that are None. Raises ValueError for a file without layers of any."""
    config = None if pipe.unet is None else pipe.unet.config
    how: dict = {"adapter_name": adapter, "_pipeline": pipe}
    state, alphas, metadata = pipe.lora_state_dict(
        file, unet_config=config, use_safetensors=True, return_lora_metadata=True
    )
    if not any(key.startswith(tuple(f"{model}." for model in MODELS)) for key in state):
        raise ValueError("it has no layers of a UNet or a CLIP text encoder")
    if pipe.unet is not None:
        pipe.load_lora_into_unet(state, alphas, pipe.unet, metadata=metadata, **how)
    for name in MODELS[1:]:
        if (encoder := getattr(pipe, name, None)) is not None:
            pipe.load_lora_into_text_encoder(state, alphas, encoder, prefix=name, metadata=metadata, **how)
