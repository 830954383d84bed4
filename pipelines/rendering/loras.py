"""LoRAs that a prompt names as in A1111, `<lora:name:0.8>`: files of one folder, by their stems."""

import importlib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from safetensors.torch import load_file

from debias_diffusion.clip.weight_files import written_metadata
from debias_diffusion.errors import UserError, explain_failure, near_matches, reason
from debias_diffusion.files import sha256
from debias_diffusion.text.chunks import Reading
from debias_diffusion.text.weighting import check_weight, take_out

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

MODELS = ("unet", "text_encoder", "text_encoder_2")
_digest = lru_cache(maxsize=None)(sha256)  # of files of hundreds of megabytes
_metadata = lru_cache(maxsize=None)(written_metadata)
# A LoRA's weights in the names of kohya's scripts and of diffusers. "input_blocks" and the like are the first one's.
_WEIGHT = re.compile(
    r"(?:lora_(?:unet|te|te1|te2)_|unet\.(?!input_|middle_|output_)|text_encoder(?:_2)?\.).+"
    r"[._](?:lora_down|lora_up|lora_A|lora_B|down|up)\.weight"
)


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
    """`<lora:name>`, `<lora:name:0.8>`, with a weight for the UNet `<lora:name:0.8:1>`, or `<lora:name:te=0.8:unet=1>`.

    Raises UserError.
    """
    _, name, *given = tag[1:-1].split(":")
    numbers, named = (
        [part for part in given if "=" not in part],
        dict(part.split("=", 1) for part in given if "=" in part),
    )
    try:
        if len(numbers) > 2 or named.keys() - {"te", "unet"}:
            raise ValueError("only the weights of the text encoders (te) and of the UNet (unet) are read")
        text_weight = float(named.get("te", numbers[0] if numbers else 1))
        unet_weight = float(named.get("unet", numbers[1] if len(numbers) > 1 else text_weight))
        for weight in (text_weight, unet_weight):
            check_weight(name, weight)
        return Lora(name.strip(), text_weight, unet_weight)
    except ValueError as error:
        raise UserError(
            f"The tag {tag[:80]!r} cannot be read: {reason(error)}. Write <lora:name:0.8>, or, with a weight for the "
            "UNet, <lora:name:0.8:1>."
        ) from error


class LoraFolder:
    """The .safetensors files in a folder and below it.

    Names are looked up among their stems, and then, as in A1111, among the names that trainers gave them
    (`ss_output_name` in their metadata). No name is opened.

    Raises UserError if there is no such folder, ModuleNotFoundError without peft, with which diffusers loads LoRAs.
    """

    def __init__(self, folder: str):
        importlib.import_module("peft")
        if not Path(folder).is_dir():
            raise UserError(f"There is no folder of LoRAs {folder!r}. Give one with .safetensors files.")
        self.folder, self._files = folder, sorted(filter(Path.is_file, Path(folder).rglob("*.safetensors")))

    def file(self, name: str) -> Path:
        """Raises UserError unless one file has this name."""
        found = [path for path in self._files if path.stem == name]
        found = found or [path for path in self._files if _metadata(path).get("ss_output_name") == name]
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
        """Gives a pipeline these LoRAs in place of others. Raises UserError for a file that is no LoRA for it."""
        pipe.unload_lora_weights()
        weights = {}
        for number, lora in enumerate(loras):
            file, adapter = self.file(lora.name), f"lora_{number}"
            with explain_failure(f"The LoRA {str(file)!r} cannot be used", "Give one for this checkpoint."):
                _load(pipe, file, adapter)
            weights[adapter] = dict.fromkeys(MODELS, lora.text_weight) | {"unet": lora.unet_weight}
        if weights:
            pipe.set_adapters([*weights], [*weights.values()])


def _load(pipe: "DiffusionPipeline", file: Path, adapter: str) -> None:
    """`load_lora_weights` of all of a file. Raises ValueError for a file of which something would not act."""
    state = load_file(file)
    alphas = {key.removesuffix(".alpha"): key for key in state if key.endswith(".alpha")}
    for layer, alpha in alphas.items():  # in the weights, because diffusers 0.42 loses those that differ by layer
        if (down := state.get(key := f"{layer}.lora_down.weight")) is not None:
            state[key] = down.float() * (state.pop(alpha).item() / len(down))
    if other := [key for key in state if not _WEIGHT.fullmatch(key)]:
        first = min(other, key=lambda key: key.endswith(".alpha"))
        raise ValueError(
            f"{len(other)} of its {len(state)} tensors are not those of a plain LoRA of this kind of model, such as "
            f"{first!r}; DoRA, LoHa, LoKr and bundled embeddings are not read"
        )
    try:
        # The file itself may hold other scales in its metadata, which diffusers reads.
        pipe.load_lora_weights(state if alphas else str(file), adapter_name=adapter)
    except RuntimeError as error:
        raise ValueError("its layers have other sizes than this checkpoint's") from error
    models = [model for name in MODELS if (model := getattr(pipe, name, None)) is not None]
    layers = [layer for model in models for layer in model.modules() if adapter in getattr(layer, "lora_A", ())]
    if 2 * len(layers) != len(state):
        raise ValueError(f"diffusers loads {len(layers)} of its {len(state) // 2} layers")
