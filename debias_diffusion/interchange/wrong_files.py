"""Descriptions of files that hold no CLIP text encoder, for error messages."""

import os
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

from ..errors import UserError

# The beginning of a file -> its description.
_BEGINNINGS = (
    (rb"\s*<", "a web page or XML, not weights: the download went wrong"),
    (rb"version https://git-lfs", "a pointer of Git LFS, not the weights: run `git lfs pull` where it comes from"),
    (rb"GGUF", "a GGUF file, whose quantised weights cannot be read"),
    (rb"\x89HDF", "an HDF5 file; give safetensors or a torch file"),
    (rb"\x89PNG|\xff\xd8\xff", "an image"),
    (rb"\x1f\x8b|7z\xbc\xaf|Rar!|BZh|\xfd7zXZ", "a compressed archive; unpack it"),
)
# Part of a weight's name -> a description; the first match counts.
_CONTENTS = (
    (r"lora_|\.lokr_|\.hada_|\.dora_scale", "it is a LoRA, which changes an encoder and is none"),
    (r"^emb_params$|^string_to_param|^clip_[lg]$|^<", "it is a textual inversion embedding"),
    (r"^control_model\.|^controlnet_|^input_hint_block", "it is a ControlNet"),
    (r"encoder\.block\.\d+\.layer\.|^shared\.weight$", "it is a T5 text encoder"),
    (
        r"diffusion_model\.|down_blocks\.|^input_blocks\.|double_blocks\.|transformer_blocks\.",
        "it is a diffusion model",
    ),
    (r"(^|\.)decoder\.(up|mid|conv_in|up_blocks|mid_block)", "it is a VAE"),
    (r"^vision_model\.|^visual\.", "it is an image tower alone"),
    (r"word_embeddings|embed_tokens|roberta|bert\.", "it is a language model of another kind"),
)


def check_readable(file: Path) -> None:
    """Raises UserError for a file whose beginning shows that it holds no weights."""
    with open(file, "rb") as opened:
        start = opened.read(512)
    label = os.fspath(file)
    if not start:
        raise UserError(f"The file {label!r} is empty.")
    for pattern, description in _BEGINNINGS:
        if re.match(pattern, start):
            raise UserError(f"{label!r} is {description}.")
    if not re.search(rb"[\x00-\x08\x0e-\x1f\x80-\xff]", start):
        raise UserError(f"{label!r} is a text file, not weights.")
    if start.startswith(b"PK"):
        _check_zip(file)


def _check_zip(file: Path) -> None:
    """Raises UserError for a zip archive that is not a torch file."""
    label = os.fspath(file)
    if not zipfile.is_zipfile(file):
        raise UserError(f"The file {label!r} is cut short. Get it again.")
    with zipfile.ZipFile(file) as archive:
        if not any(name.endswith("data.pkl") for name in archive.namelist()):
            raise UserError(f"{label!r} is a zip archive, not a file of weights; unpack it and give what is in it.")


def describe_weights(names: Iterable[str]) -> str:
    """The kind of model that weights of these names belong to; if unknown, some of the names."""
    names = list(names)
    for pattern, description in _CONTENTS:
        if any(re.search(pattern, name) for name in names):
            return description
    return f"it holds {len(names)} weights such as {', '.join(names[:3]) or 'none'}"
