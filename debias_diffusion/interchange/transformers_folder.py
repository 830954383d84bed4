"""A text encoder as a folder that transformers and diffusers load without anything of ours, and from one.

The folder holds `text_encoder/` and `tokenizer/`, the names that diffusers' pipelines use.
"""

import json
import os
from pathlib import Path

from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer, PretrainedConfig

from ..backbones import CONFIG_FILE, Backbone
from ..errors import UserError, reason
from ..weights import save_tensors
from .encoders import TextEncoder, prefixed_state, to_transformers

# What may stand as model_type in a config.json whose text encoder is CLIP's.
_CLIPS = ("clip", "clip_text_model")


def export_text_encoder(backbone: Backbone, folder: str | os.PathLike, projection: bool = False) -> Path:
    """Writes `text_encoder/` and `tokenizer/` below `folder`; see `to_transformers`. Returns the folder."""
    return write_text_encoder(*to_transformers(backbone, projection), folder)


def write_text_encoder(encoder: TextEncoder, tokenizer: CLIPTokenizer, folder: str | os.PathLike) -> Path:
    """Writes `text_encoder/` and `tokenizer/` below `folder`, in float32. Returns the folder."""
    folder = Path(folder)
    write_weights(prefixed_state(encoder), encoder.config, type(encoder).__name__, folder / "text_encoder")
    write_tokenizer(tokenizer, folder / "tokenizer")
    return folder


def write_weights(state: dict, config: PretrainedConfig, architecture: str, folder: Path) -> None:
    """Writes config.json and model.safetensors, by hand: save_pretrained of transformers 5 leaves out the prefix
    `text_model.` that other loaders need, and names the dtype, without which fp16 weights load as fp16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().float() for name, tensor in state.items()}
    save_tensors(tensors, folder / "model.safetensors")
    content = json.loads(config.to_json_string(use_diff=False))
    content |= {"architectures": [architecture], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_tokenizer(tokenizer: CLIPTokenizer, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    tokenizer.backend_tokenizer.model.save(os.fspath(folder))  # vocab.json, merges.txt: for older loaders


def read_folder(folder: Path) -> tuple[TextEncoder, CLIPTokenizer]:
    """A folder with `text_encoder/`, or with a CLIPTextModel or the text half of a CLIPModel itself, and a tokenizer.

    Raises:
        UserError: nothing of the kind is there.
    """
    inside = folder / "text_encoder" if (folder / "text_encoder").is_dir() else folder
    if not (inside / "config.json").is_file():
        raise UserError(
            f"{os.fspath(folder)!r} holds no text encoder: neither text_encoder/config.json nor config.json nor "
            f"{CONFIG_FILE}, in it or in the best/ or last/ of a training run. Give a folder written by "
            "`debias-diffusion export`, or a file of weights."
        )
    # In SDXL's folder text_encoder_2 belongs to tokenizer_2.
    own = inside.name.replace("text_encoder", "tokenizer")
    found = find_tokenizer(folder, inside.parent / own, inside.parent / "tokenizer", inside, inside / "tokenizer")
    encoder = _read_encoder(inside)
    return encoder, read_tokenizer(found, encoder.config)


def find_tokenizer(folder: Path, *places: Path) -> Path:
    """The first of the places with a tokenizer; UserError, which names the folder, where there is none."""
    found = next((place for place in places if (place / "tokenizer_config.json").is_file()), None)
    if found is None:
        raise UserError(f"{os.fspath(folder)!r} holds no tokenizer (tokenizer/tokenizer_config.json).")
    return found


def read_hub(name: str) -> tuple[TextEncoder, CLIPTokenizer]:
    """A text encoder of the hub: of the repository's `text_encoder/` and `tokenizer/`, else the repository itself.

    Raises:
        UserError: there is none, or it cannot be had.
    """
    try:
        CLIPTextConfig.get_config_dict(name, subfolder="text_encoder")
    except Exception:  # no such folder there, or nothing there at all, which comes out now
        encoder = _read_encoder(name)
        return encoder, read_tokenizer(name, encoder.config)
    encoder = _read_encoder(name, subfolder="text_encoder")
    return encoder, read_tokenizer(name, encoder.config, subfolder="tokenizer")


def _read_encoder(source: str | Path, **where) -> TextEncoder:
    try:
        config, _ = CLIPTextConfig.get_config_dict(source, **where)
        kind = config.get("model_type", "clip_text_model")
        if kind not in _CLIPS:
            raise UserError(
                f"{os.fspath(source)!r} holds a model of type {kind!r}; a CLIP text encoder is of type "
                f"{' or '.join(_CLIPS)}."
            )
        projected = "CLIPTextModelWithProjection" in (config.get("architectures") or [])
        cls = CLIPTextModelWithProjection if projected else CLIPTextModel
        encoder, info = cls.from_pretrained(source, **where, output_loading_info=True)
        missing = sorted(name for name in info["missing_keys"] if not name.endswith("position_ids"))
        if missing:  # transformers would have filled them with random numbers
            raise UserError(
                f"The weights of {os.fspath(source)!r} lack {len(missing)} of the text encoder's, such as {missing[0]}."
            )
        return encoder.eval()
    except UserError:
        raise
    except Exception as error:  # whatever a wrong or hostile file makes the libraries raise
        raise UserError(f"The text encoder {os.fspath(source)!r} could not be loaded: {reason(error)}.") from error


def read_tokenizer(source: str | Path, config: CLIPTextConfig, **where) -> CLIPTokenizer:
    """The tokenizer of a text encoder of this configuration, with its window.

    Raises:
        UserError: it cannot be loaded, or is another encoder's.
    """
    try:
        tokenizer = CLIPTokenizer.from_pretrained(source, **where)
    except Exception as error:  # as above
        raise UserError(f"The tokenizer {os.fspath(source)!r} could not be loaded: {reason(error)}.") from error
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"The tokenizer {os.fspath(source)!r} has {len(tokenizer)} ids, but its text encoder only "
            f"{config.vocab_size}. They do not belong together."
        )
    # Long-CLIPs are found with the tokenizer of 77 that they began with.
    tokenizer.model_max_length = config.max_position_embeddings
    return tokenizer
