"""Loads a text encoder from any known kind of folder, file or repository, recognised by its content."""

import os
from pathlib import Path

from transformers import CLIPTokenizer

from ..ablation.saved import is_ablation
from ..errors import UserError
from ..models.model_files import CONFIG_FILE, DIFFERENCE, explain_failure, may_be_hub_id
from ..models.shipped import shipped
from .hub_file import find_hub_file
from .places import is_open_clip_name, model_and_weights, model_of_run
from .single_file import read_file
from .text_encoders import TextEncoder
from .transformers_folder import read_folder, read_hub


def load_text_encoder(path: str | os.PathLike) -> tuple[TextEncoder, CLIPTokenizer]:
    """Loads a text encoder and its tokenizer, ready for a diffusers pipeline.

    Args:
        path: one of these, recognised by its content:

            - a training run (its model after the last step), or an open_clip folder;
            - what `ablate` has left: its base model's text encoder, suppressed text heads as ordinary weights;
            - `MODEL:WEIGHTS`, an open_clip name with a tag or a file: "ViT-L-14-quickgelu:openai";
            - a folder written by `debias-diffusion export`, any transformers folder of a CLIPTextModel, its tokenizer
              beside or in it, or of a CLIPModel, whose text half is taken;
            - a file of weights (safetensors, or a torch file without code): open_clip's or OpenAI's two-tower,
              Long-CLIP's `.pt`, ComfyUI's `clip_l` and `clip_g`, a Stable Diffusion checkpoint. A rule decides the
              activation if the file does not name it (see `single_file`);
            - a hub id (`owner/name`) of a transformers repository, or of one that holds such a file and nothing else to
              load ("BeichenZhang/LongCLIP-L"); `hf-hub:owner/name` of an open_clip one;
            - "toy/debias-clip" and the like.

    Returns:
        (text_encoder, tokenizer): a CLIPTextModel, or a CLIPTextModelWithProjection if a folder's configuration names
        it and for bigG (32 blocks), SDXL's second encoder; in eval mode; in float32, or in the dtype that a
        transformers folder names. The tokenizer's `model_max_length` is the encoder's context length.

    Raises:
        UserError: there is no text encoder; the message names what is there instead, if known.
    """
    with explain_failure(f"The text encoder {os.fspath(path)!r} could not be loaded"):
        return _load(model_of_run(shipped(path)))


def _load(name: str) -> tuple[TextEncoder, CLIPTokenizer]:
    place = Path(name.removeprefix("local-dir:"))
    is_open_clip = model_and_weights(name) or (place / CONFIG_FILE).is_file() or name.startswith("hf-hub:")
    if is_open_clip or is_ablation(place) or (place / DIFFERENCE).is_file():
        from .two_tower import load_text_half  # open_clip is optional

        return load_text_half(name)
    if place.is_file():
        return read_file(place)
    if place.exists():
        return read_folder(place)
    if not may_be_hub_id(name):
        known = f" {name!r} is an open_clip model: `debias-diffusion export --model {name}` makes a folder of it."
        raise UserError(
            f"{name!r} is not there. Give a folder with a text encoder, a file of weights, or a hub id (owner/name)."
            + (known if is_open_clip_name(name) else "")
        )
    if file := find_hub_file(name):
        return read_file(file)
    try:
        return read_hub(name)
    except UserError as error:
        raise UserError(
            f"{name!r} is not a folder or file here, and as a hub id it gives no text encoder. {error}"
        ) from error
