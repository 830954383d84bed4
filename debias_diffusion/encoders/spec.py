"""Text encoders and two-towers by the names that people type: parsed once, loaded by what lies under the name.

Parsing loads no model and no library, so a mistyped name is answered at once.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import UserError, explain_failure, quiet_logging
from ..files import json_digest, path_digest, read_json_object
from ..registry import named_function
from ..text.chunks import TRAINED_POSITIONS, Reading
from ..toyworld.shipped import shipped
from .resolve import ORIGINAL, SECOND, Kind, Model, open_clip_models, resolve

if TYPE_CHECKING:
    import torch
    from transformers import CLIPTokenizer

    from ..clip.backbone import Backbone
    from .text_encoders import TextEncoder

ORIGINAL_LABEL = "SDXL's own"
READINGS = {
    "overlap": "overlapping chunks",
    "separate": "separate chunks",
    "cut": f"cut at {TRAINED_POSITIONS} tokens",
    "a1111": "as A1111",
    "kohya": "as kohya",
    "comfyui": "as ComfyUI",
}
SHORT = "short:"  # before a name: captions are read with the positions for short ones
_CONFIGS = ("open_clip_config.json", "text_encoder/config.json", "config.json")
# What says more of a file of weights, where it lies beside it.
_BESIDE = (
    *("config.json", "short_positions.safetensors", "tokenizer", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "spiece.model", "tokenizer.model"),
    *("vocab.json", "merges.txt", "vocab.txt"),
)
# What loads both towers of a model of each kind, and a text encoder alone where that needs no two-tower.
_TWO_TOWERS = {
    Kind.OPEN_CLIP: "encoders.loading:load_backbone",
    Kind.ABLATION: "encoders.spec:load_ablated",
    Kind.DIFFERENCE: "encoders.loading:load_fine_tuned",
    Kind.TRANSFORMERS: "encoders.clip_model:read_two_tower",
}
_TEXT_ENCODERS = {
    Kind.TRANSFORMERS: "encoders.text_encoders:read_text_encoder",
    Kind.FILE: "encoders.single_file:read_encoder_file",
}


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder that a person named.

    Attributes:
        name: as typed, without the prefix for the reading.
        reading: of prompts longer than the context length, one of READINGS.
        model: what lies there.
        is_short: the two-tower reads all captions with its positions for short ones, see `Backbone.read_short`.
    """

    name: str
    reading: Reading
    model: Model
    is_short: bool = False

    @classmethod
    def parse(cls, name: str | os.PathLike, reading: Reading = "overlap") -> "EncoderSpec":
        """Finds what a name means; loads nothing.

        Args:
            name: see `load_text_encoder`; or "original", SDXL's own encoder; "overlap:" or another of READINGS may
                stand before it, and "short:" before a two-tower of Fix-CLIP.
            reading: where no prefix says it.

        Raises:
            UserError: there is no such thing, or a training run that has no model yet.
        """
        name = os.fspath(name)
        prefix, colon, rest = name.partition(":")
        if colon and prefix in READINGS:
            reading, name = cast(Reading, prefix), rest
        plain = name.removeprefix(SHORT)
        spec = cls(name, reading, resolve(plain), plain != name)
        if spec.is_short and spec.kind is not Kind.OPEN_CLIP:
            raise UserError(f"{name!r}: {SHORT} stands before a run of the recipe fix-clip. Leave it out.")
        return spec

    @property
    def kind(self) -> Kind:
        return self.model.kind

    @cached_property
    def digest(self) -> str:
        """sha256 of the files that loading reads, of MODEL:FILE after the model's name; of a hub id the cached commit
        after the id; of an open_clip tag its name, because its file never changes.

        Raises:
            OSError: a file cannot be read.
        """
        location, weights = self.model.location, self.model.weights
        if self.is_short:
            return json_digest({SHORT: replace(self, is_short=False).digest})
        if weights and os.path.exists(weights):
            return f"{location}:{self._digest_of(weights)}"
        if os.path.exists(location) and self.kind is not Kind.ORIGINAL:
            return self._digest_of(location)
        if "/" in location:
            from .hub import location_digest

            return location_digest(location)
        return self.name

    def _digest_of(self, location: str) -> str:
        """sha256 of a file or folder, and of what loading reads outside of it."""
        path, others = Path(os.path.abspath(location)), []
        if path.is_file():
            others = [path.with_name(name) for name in _BESIDE]
        elif self.kind is Kind.TRANSFORMERS and not (path / "text_encoder").is_dir():
            others = [path.with_name(path.name.replace("text_encoder", "tokenizer")), path.with_name("tokenizer")]
        elif self.kind is Kind.DIFFERENCE:
            others = [Path(shipped("toy/clip"))]
        digests = {other.name: path_digest(other) for other in others if other != path and other.exists()}
        return json_digest(digests | {"": path_digest(path)}) if digests else path_digest(path)

    @property
    def fitted_second(self) -> str | None:
        """SDXL's second encoder, where `align` fitted it with this first one: a folder beside it."""
        folder = Path(self.name.removeprefix("local-dir:")) / SECOND
        return str(folder) if folder.is_dir() else None

    @cached_property
    def context_length(self) -> int:
        """In tokens, BOS and EOS included: of the configuration; where there is none, of the weights."""
        if self.kind is Kind.ORIGINAL or self.is_short:
            return TRAINED_POSITIONS
        config = {} if self.kind is Kind.FILE else self._config()
        text = config.get("model_cfg", config)
        text = text.get("text_cfg") or text.get("text_config") or text
        length = text.get("context_length") or text.get("max_position_embeddings")
        return length or self.load_text_encoder()[0].config.max_position_embeddings

    def _config(self) -> dict:
        """The model's configuration; empty where only its weights say what it is."""
        location = self.model.location
        if self.kind is Kind.OPEN_CLIP and location in open_clip_models():
            import open_clip

            known = {"context_length": TRAINED_POSITIONS} | open_clip.get_model_config(location)["text_cfg"]
            return {} if os.path.exists(self.model.weights or "") else known
        from .hub import find_file

        with explain_failure(f"The configuration of {self.name!r} cannot be read"):
            files = filter(None, (find_file(location.removeprefix("hf-hub:"), file) for file in _CONFIGS))
            return next(filter(None, map(read_json_object, files)), {})

    def load_text_encoder(self, width: int | None = None) -> tuple["TextEncoder", "CLIPTokenizer"]:
        """See the function of this name; of an SDXL checkpoint the encoder of this width, else the first."""
        with explain_failure(f"The text encoder {self.name!r} could not be loaded"):
            model = self._fetch()
            if model.kind in _TEXT_ENCODERS:
                return named_function("debias_diffusion", _TEXT_ENCODERS[model.kind])(model.location, width)
            from .text_encoders import keeps_projection, to_transformers  # open_clip is optional

            backbone = self.load_two_tower()
            if backbone.text_attention:
                from ..ablation.heads import fold_text_heads  # which few models need

                fold_text_heads(backbone)
            return to_transformers(backbone, keeps_projection(backbone))

    def load_two_tower(self, random_weights: bool = False) -> "Backbone":
        """See the function of this name; with `random_weights` MODEL:none, too, drawn from torch's current seed."""
        advice = f"If it is in open_clip's layout, give hf-hub:{self.name}." if self.kind is Kind.HUB else ""
        with explain_failure(f"The model {self.name!r} could not be loaded", advice), quiet_logging():
            model = self._fetch()
            if model.kind is Kind.FILE:
                raise UserError(
                    f"The file {model.location!r} does not name its model. If it has both towers, put open_clip's name "
                    f"before it, as in ViT-L-14-quickgelu:{model.location}; a text encoder alone has no image tower, "
                    "which is needed here."
                )
            backbone = _load(_TWO_TOWERS[model.kind], model).float().eval()
            if self.is_short:
                backbone.read_short()
            if backbone.random_weights and not random_weights:
                raise UserError(f"{self.name!r} has no weights, and results of random ones mean nothing.")
            return backbone

    def _fetch(self) -> Model:
        """The model; of a hub id its one file of weights, downloaded, or what is read as a folder of transformers."""
        if self.kind is Kind.ORIGINAL:
            raise UserError(f"{ORIGINAL!r} is the encoder that comes with an SDXL checkpoint. Name another.")
        if self.kind is Kind.HUB:
            from .hub import find_hub_file

            file = find_hub_file(self.model.location)
            return Model(Kind.FILE, str(file)) if file else replace(self.model, kind=Kind.TRANSFORMERS)
        return self.model


def _load(function: str, model: Model) -> Any:
    return named_function("debias_diffusion", function)(*filter(None, (model.location, model.weights)))


def load_text_encoder(
    name: str | os.PathLike,
    *,
    dtype: "torch.dtype | None" = None,
    device: "torch.device | str | None" = None,
    revision: str | None = None,
) -> tuple["TextEncoder", "CLIPTokenizer"]:
    """Loads a text encoder and its tokenizer, ready for a diffusers pipeline.

    Args:
        name: one of these, recognised by its content:

            - a training run (its model after the last step), or an open_clip folder;
            - a folder with suppressed heads: its base model's text encoder, suppressed text heads as ordinary weights;
            - `MODEL:WEIGHTS`, an open_clip name with a tag or a file: "ViT-L-14-quickgelu:openai";
            - a transformers folder, as `export` writes it: of a CLIPTextModel, its tokenizer beside or in it, or of a
              CLIPModel, whose text half is taken;
            - a file of weights (safetensors, or a torch file without code): open_clip's or OpenAI's two-tower,
              Long-CLIP's `.pt`, ComfyUI's `clip_l` and `clip_g`, a Stable Diffusion checkpoint. A rule decides the
              activation if the file does not name it (see `single_file`);
            - a hub id (`owner/name`, `owner/name@revision`) of a transformers repository, or of one that holds such a
              file and nothing else to load ("BeichenZhang/LongCLIP-L"); `hf-hub:owner/name` of an open_clip one;
            - "toy/debias-clip" and the like.
        dtype: of the weights; None for float32, or what a transformers folder names.
        device: to put it on; None for the CPU.
        revision: of a hub id: a branch, a tag or a commit, as `owner/name@revision`.

    Returns:
        (text_encoder, tokenizer): a CLIPTextModel, or a CLIPTextModelWithProjection if a folder's configuration names
        it and for bigG (32 blocks), SDXL's second encoder; in eval mode. The tokenizer's `model_max_length` is the
        encoder's context length.

    Raises:
        UserError: there is no text encoder that can be read, or a revision of what is no hub id.
    """
    spec = EncoderSpec.parse(name)
    if revision is not None:
        if "/" not in spec.model.location or os.path.exists(spec.model.location):
            raise UserError(f"revision={revision!r} is of a hub id (owner/name), and {os.fspath(name)!r} is none.")
        spec = EncoderSpec.parse(f"{os.fspath(name)}@{revision}")
    encoder, tokenizer = spec.load_text_encoder()
    return encoder.to(device=device, dtype=dtype), tokenizer


def load_two_tower(name: str | os.PathLike) -> "Backbone":
    """Loads a CLIP or SigLIP with both its towers, as retrieval and classification need it.

    Args:
        name: as for `load_text_encoder`, of a model with both towers, but a file needs its model's name:
            "ViT-L-14-quickgelu:longclip-L.pt". What `ablate` has left has its heads suppressed.

    Returns:
        The model in eval mode and float32, with no random weights.

    Raises:
        UserError: there is no two-tower that can be read, or a text encoder alone.
    """
    return EncoderSpec.parse(name).load_two_tower()


def load_ablated(location: str) -> "Backbone":
    """The base model of a search, with the heads that it found suppressed."""
    from ..ablation.saved import read_ablation

    base, digest, ablation = read_ablation(location)
    backbone = load_two_tower(base)
    if backbone.digest() != digest:
        raise UserError(
            f"The ablation {location!r} is of {base!r}, and that model has other weights, another configuration "
            "or another tokenizer now. Put the model that it was searched on in its old place, or search again."
        )
    ablation.apply(backbone)
    return backbone


def parse_encoders(names: Sequence[str], readings: bool = True) -> list[EncoderSpec]:
    """`EncoderSpec.parse` of the encoders that one command compares; with `readings` one may have several readings."""
    specs = [EncoderSpec.parse(name) for name in names]
    if not specs or len({(spec.name, spec.reading if readings else "") for spec in specs}) < len(specs):
        raise UserError(f"encoders={list(names)} is not allowed. Name at least one encoder, and none twice.")
    return specs


def labels(specs: Sequence[EncoderSpec], readings: bool = True) -> list[str]:
    """Short unique names: of paths the last parts, as many as make them unique.

    With `readings` also how prompts are read; of an encoder that reads more than 77 tokens only if not "overlap".
    """
    names = list(dict.fromkeys(spec.name for spec in specs))
    short = dict(zip(names, _short(names), strict=True))

    def label(spec: EncoderSpec) -> str:
        name = ORIGINAL_LABEL if spec.kind is Kind.ORIGINAL else short[spec.name]
        if not readings or (spec.reading == "overlap" and spec.context_length > TRAINED_POSITIONS):
            return name
        return f"{name}, {READINGS[spec.reading]}"

    labelled = [label(spec) for spec in specs]
    return labelled if len(set(labelled)) == len(specs) else [f"{spec.reading}:{spec.name}" for spec in specs]


def _short(names: Sequence[str]) -> list[str]:
    paths = [Path(name) if os.path.exists(name) else None for name in names]
    for parts in range(1, max((len(path.parts) for path in paths if path), default=1) + 1):
        ends = [str(Path(*path.parts[-parts:])) if path else "" for path in paths]
        # matplotlib leaves names that begin with an underscore out of legends
        short = [f"./{end}" if end.startswith("_") else end or name for end, name in zip(ends, names, strict=True)]
        if len(set(short)) == len(short):
            return short
    return list(names)
