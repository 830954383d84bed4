"""A text encoder as a folder that plain transformers and diffusers load, and from one.

The folder holds `text_encoder/` and `tokenizer/`, as in diffusers' pipelines.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import transformers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer, PretrainedConfig

from ..clip.model_files import CONFIG_FILE, find_file, find_tokenizer, load_pretrained, source_of
from ..errors import UserError, explain_failure
from ..files import read_json
from ..text.tokens import count_ids, save_tokenizer
from .modeling_ablated_clip import AblatedCLIPConfig
from .text_encoders import TextEncoder, prefixed_state, save_weights, to_transformers

if TYPE_CHECKING:
    from ..clip.backbone import Backbone

# The model_type in the config.json of a CLIP text encoder.
_CLIPS = ("clip", AblatedCLIPConfig.model_type, "clip_text_model")


def export_text_encoder(backbone: "Backbone", folder: str | os.PathLike, projection: bool = False) -> Path:
    """Writes `text_encoder/` and `tokenizer/` below `folder`; see `to_transformers`. Returns the folder."""
    return write_text_encoder(*to_transformers(backbone, projection), folder)


def write_text_encoder(encoder: TextEncoder, tokenizer: CLIPTokenizer, folder: str | os.PathLike) -> Path:
    """Writes `text_encoder/` and `tokenizer/` below `folder`, in float32. Returns the folder."""
    folder = Path(folder)
    write_weights(prefixed_state(encoder), encoder.config, type(encoder).__name__, folder / "text_encoder")
    write_tokenizer(tokenizer, folder / "tokenizer")
    return folder


def write_weights(state: dict, config: PretrainedConfig, architecture: str, folder: Path) -> None:
    """Writes config.json and model.safetensors, with float32 weights and that dtype in the configuration.

    Not by save_pretrained: that of transformers 5 leaves out the prefix `text_model.`, which other loaders need.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(state, folder / "model.safetensors")
    content = json.loads(config.to_json_string(use_diff=False))
    content |= {"architectures": [architecture], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_tokenizer(tokenizer: CLIPTokenizer, folder: Path) -> None:
    save_tokenizer(tokenizer, folder)
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.model.save(os.fspath(folder))  # vocab.json, merges.txt: for older loaders


def read_text_encoder(source: str | Path) -> tuple[TextEncoder, CLIPTokenizer]:
    """The text encoder and tokenizer of a folder (Path) or of a repository of the hub (str).

    Of its `text_encoder/` and `tokenizer/`, as in a pipeline; else it is a CLIPTextModel or CLIPModel itself.

    Raises:
        UserError: it holds no text encoder or no tokenizer, or cannot be fetched.
    """
    subfolder = "text_encoder" if find_file(source, "config.json", "text_encoder") else ""
    encoder = read_encoder(source, subfolder)
    if isinstance(source, str):
        return encoder, read_tokenizer(source, encoder.config, subfolder="tokenizer" if subfolder else "")
    inside = source / subfolder
    # In SDXL's folder text_encoder_2 belongs to tokenizer_2.
    beside = inside.with_name(inside.name.replace("text_encoder", "tokenizer"))
    tokenizer = find_tokenizer(source, beside, inside.parent / "tokenizer", inside, inside / "tokenizer")
    return encoder, read_tokenizer(tokenizer, encoder.config)


def read_encoder(source: str | Path, subfolder: str = "") -> TextEncoder:
    """The text encoder of a folder or a hub repository, of the class in its configuration, in eval mode.

    Raises:
        UserError: there is none, or its weights lack some of the model's, or are of other sizes.
    """
    label = repr(os.path.join(source, subfolder) if subfolder else os.fspath(source))
    content = read_model_config(source, subfolder)
    kind = content.get("model_type", "clip_text_model")
    if kind not in _CLIPS:
        raise UserError(
            f"{label} holds a model of type {kind!r}; a CLIP text encoder is of type {' or '.join(_CLIPS)}."
        )
    projection = "CLIPTextModelWithProjection" in (content.get("architectures") or [])
    config = CLIPTextConfig.from_dict(content if kind == "clip_text_model" else content.get("text_config", {}))
    options = {"config": config, "dtype": content.get("dtype") or content.get("torch_dtype") or "auto"}
    if transformers.__version__.startswith("4."):  # which does not read the names that transformers 5 writes
        options["key_mapping"] = {r"^(embeddings|encoder|final_layer_norm)\.": r"text_model.\1."}
    cls = CLIPTextModelWithProjection if projection else CLIPTextModel
    return load_pretrained(cls, source, label, subfolder=subfolder, **options)


def read_model_config(source: str | Path, subfolder: str = "") -> dict:
    """The config.json of a folder or a hub repository. Raises UserError if it cannot be read."""
    file = find_file(source, "config.json", subfolder)
    if file is None:
        raise UserError(
            f"{os.fspath(source)!r} holds no model: neither config.json nor text_encoder/config.json nor "
            f"{CONFIG_FILE}, in it or in the last/ of a training run."
        )
    return read_json(file)


def read_tokenizer(source: str | Path, config: CLIPTextConfig, **where) -> CLIPTokenizer:
    """The tokenizer of a text encoder of this configuration, with its context length.

    Raises:
        UserError: it cannot be loaded, or has more ids than the encoder.
    """
    with explain_failure(f"The tokenizer {os.fspath(source)!r} could not be loaded"):
        tokenizer = CLIPTokenizer.from_pretrained(source_of(source), **where)
    ids = count_ids(tokenizer)
    if ids > config.vocab_size:
        raise UserError(
            f"The tokenizer {os.fspath(source)!r} has {ids} ids, but its text encoder only "
            f"{config.vocab_size}. They do not belong together."
        )
    # Published Long-CLIPs have the tokenizer of CLIP, with a length of 77.
    tokenizer.model_max_length = config.max_position_embeddings
    return tokenizer
