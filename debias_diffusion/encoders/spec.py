"""Text encoders and two-towers by the names that people type: parsed once, loaded by what lies under the name.

Parsing loads no model and no library, so a mistyped name is answered at once.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..errors import UserError, near_matches
from ..files import json_digest, path_digest, read_json_object
from ..jobs import Job
from ..text.chunks import TRAINED_POSITIONS, Reading
from ..toyworld.shipped import TWO_TOWERS, shipped

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

    from ..clip.backbone import Backbone
    from .text_encoders import TextEncoder

ORIGINAL, ORIGINAL_LABEL = "original", "SDXL's own"  # name of the encoder in an SDXL checkpoint, and its label
READINGS = {
    "overlap": "overlapping chunks",
    "separate": "separate chunks",
    "cut": f"cut at {TRAINED_POSITIONS} tokens",
    "a1111": "as A1111",
    "kohya": "as kohya",
    "comfyui": "as ComfyUI",
}
AS_RELEASED = "as-released:"  # before the name of a file, see `weight_files.read_state`
SHORT = "short:"  # before a name: captions are read with the positions for short ones
MODELS_OF_RUN = ("last", "best")  # folders that `train` writes models to, the result first
FIRST, SECOND = "encoder", "encoder_2"  # folders that `align` writes encoders to, as `export` would
_CHINESE_CLIPS = "OFA-Sys/chinese-clip"  # how hub ids of the published ones begin
_CONFIGS = ("open_clip_config.json", "text_encoder/config.json", "config.json")
# What says more of a file of weights, where it lies beside it.
_BESIDE = (
    *("config.json", "short_positions.safetensors", "tokenizer", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "spiece.model", "tokenizer.model"),
    *("vocab.json", "merges.txt", "vocab.txt"),
)


class Kind(Enum):
    """What lies under a name."""

    OPEN_CLIP = auto()  # folder, MODEL:WEIGHTS or hf-hub:owner/name
    ABLATION = auto()  # folder with suppressed heads, as research's `ablate` writes it
    DIFFERENCE = auto()  # folder with the 8-bit difference from toy/clip
    TRANSFORMERS = auto()  # folder of a CLIPTextModel or CLIPModel
    CHINESE_CLIP = auto()  # folder of a ChineseCLIPModel, or its hub id
    FILE = auto()  # weights alone
    HUB = auto()  # owner/name, in transformers' layout or with one file of weights
    ORIGINAL = auto()  # what comes with the SDXL checkpoint


# A folder is of the first kind whose file it has.
_FILES = {
    "ablation.json": Kind.ABLATION,
    "open_clip_config.json": Kind.OPEN_CLIP,
    "difference.safetensors": Kind.DIFFERENCE,
}


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder that a person named.

    Attributes:
        name: as typed, without the prefix for the reading.
        reading: of prompts longer than the context length, one of READINGS.
        kind: what lies there.
        place: file, folder, hub id or open_clip name; of a training run the folder of its model.
        weights: tag or file of MODEL:WEIGHTS; else None, which for an open_clip name is random weights.
        as_released: whether "as-released:" stands before the name of a file, see `weight_files.read_state`.
        is_short: the two-tower reads all captions with its positions for short ones, see `Backbone.read_short`.
    """

    name: str
    reading: Reading
    kind: Kind
    place: str
    weights: str | None = None
    as_released: bool = False
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
        bare = plain.removeprefix(AS_RELEASED)
        kind, place, weights = (Kind.ORIGINAL, name, None) if name == ORIGINAL else _find(bare)
        if plain != name and kind is not Kind.OPEN_CLIP:
            raise UserError(f"{name!r}: {SHORT} stands before a run of `train --recipe fix-clip`. Leave it out.")
        if bare != plain and not os.path.isfile(weights or place):
            raise UserError(
                f"{AS_RELEASED} stands before a file, as in {AS_RELEASED}ViT-B-16-quickgelu:debias_vitb_3e.pt, and "
                f"{bare!r} is none. Leave it out."
            )
        return cls(name, reading, kind, place, weights, bare != plain, plain != name)

    @cached_property
    def digest(self) -> str:
        """sha256 of the files that loading reads, of MODEL:FILE after the model's name; of a hub id the cached commit
        after the id; of an open_clip tag its name, because its file never changes.

        Raises:
            OSError: a file cannot be read.
        """
        if self.is_short:
            return json_digest({SHORT: replace(self, is_short=False).digest})
        mark = AS_RELEASED * self.as_released
        if self.weights and os.path.exists(self.weights):
            return f"{mark}{self.place}:{self._digest_of(self.weights)}"
        if os.path.exists(self.place) and self.kind is not Kind.ORIGINAL:
            return mark + self._digest_of(self.place)
        if "/" in self.place:
            from .hub import place_digest

            return place_digest(self.place)
        return self.name

    def _digest_of(self, place: str) -> str:
        """sha256 of a file or folder, and of what loading reads outside of it."""
        path, others = Path(os.path.abspath(place)), []
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
        config = self._config()
        text = config.get("model_cfg", config)
        text = text.get("text_cfg") or text.get("text_config") or text
        length = text.get("context_length") or text.get("max_position_embeddings")
        return length or self.load_text_encoder()[0].config.max_position_embeddings

    def _config(self) -> dict:
        """The model's configuration; empty where only its weights say what it is."""
        if self.kind is Kind.OPEN_CLIP and self.place in open_clip_models():
            import open_clip

            known = {"context_length": TRAINED_POSITIONS} | open_clip.get_model_config(self.place)["text_cfg"]
            return {} if os.path.exists(self.weights or "") else known
        from ..clip.model_files import find_file
        from ..errors import explain_failure

        source = Path(self.place) if os.path.exists(self.place) else self.place.removeprefix("hf-hub:")
        with explain_failure(f"The configuration of {self.name!r} cannot be read"):
            files = filter(None, (find_file(source, file) for file in _CONFIGS))
            return next(filter(None, map(read_json_object, files)), {})

    def _source(self) -> Path | str:
        """The file or folder, downloaded where it is a hub's one file of weights; else the hub id."""
        if self.kind is not Kind.HUB:
            return Path(self.place) if os.path.exists(self.place) else self.place
        from .hub import find_hub_file

        return find_hub_file(self.place) or self.place

    def load_text_encoder(self) -> tuple["TextEncoder", "CLIPTokenizer"]:
        """See the function of this name."""
        from ..errors import explain_failure
        from .single_file import read_file
        from .transformers_folder import read_text_encoder

        with explain_failure(f"The text encoder {self.name!r} could not be loaded"):
            if self.kind in (Kind.CHINESE_CLIP, Kind.ORIGINAL):
                raise self.refusal()
            if self.kind in (Kind.TRANSFORMERS, Kind.HUB, Kind.FILE):
                source = self._source()
                if os.path.isfile(source):
                    return read_file(Path(source), self.as_released)
                return read_text_encoder(source)
            from ..ablation.heads import fold_text_heads  # open_clip is optional
            from .text_encoders import keeps_projection, to_transformers

            backbone = self.load_two_tower()
            fold_text_heads(backbone)
            return to_transformers(backbone, keeps_projection(backbone))

    def load_two_tower(self, random_weights: bool = False) -> "Backbone":
        """See the function of this name.

        Args:
            random_weights: load MODEL:none, too, with weights from torch's current seed.
        """
        from ..clip.model_files import quiet_logging
        from ..errors import explain_failure

        advice = f"If it is in open_clip's layout, give hf-hub:{self.name}." if self.kind is Kind.HUB else ""
        with explain_failure(f"The model {self.name!r} could not be loaded", advice), quiet_logging():
            backbone = self._read_two_tower().float().eval()
            if self.is_short:
                backbone.read_short()
            if backbone.random_weights and not random_weights:
                raise UserError(f"{self.name!r} has no weights, and results of random ones mean nothing.")
            return backbone

    def _read_two_tower(self) -> "Backbone":
        from .clip_model import read_chinese_clip, read_clip_model
        from .loading import load_backbone, load_fine_tuned

        source = self._source()
        if os.path.isfile(source):
            raise UserError(
                f"The file {os.fspath(source)!r} does not name its model. If it has both towers, put open_clip's name "
                f"before it, as in ViT-L-14-quickgelu:{os.fspath(source)}; a text encoder alone has no image tower, "
                "which is needed here."
            )
        match self.kind:
            case Kind.OPEN_CLIP:
                return load_backbone(self.place, self.weights, self.as_released)
            case Kind.ABLATION:
                return _load_ablated(Path(source))
            case Kind.DIFFERENCE:
                return load_fine_tuned(Path(source))
            case Kind.CHINESE_CLIP:
                return read_chinese_clip(source)
            case Kind.ORIGINAL:
                raise self.refusal()
        return read_clip_model(source)

    def refusal(self) -> UserError:
        """The error for SDXL's own encoder and for a Chinese-CLIP, which is only evaluated."""
        if self.kind is Kind.ORIGINAL:
            return UserError(f"{ORIGINAL!r} is the encoder that comes with an SDXL checkpoint. Name another.")
        from ..clip.chinese_clip import NOT_TRAINED

        return UserError(f"{self.name!r} is a Chinese-CLIP. {NOT_TRAINED}")


def load_text_encoder(name: str | os.PathLike) -> tuple["TextEncoder", "CLIPTokenizer"]:
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
            - a hub id (`owner/name`) of a transformers repository, or of one that holds such a file and nothing else to
              load ("BeichenZhang/LongCLIP-L"); `hf-hub:owner/name` of an open_clip one;
            - "toy/debias-clip" and the like.

            Before the file of DeBias-CLIP's authors, "as-released:" reads positions as their loader does.

    Returns:
        (text_encoder, tokenizer): a CLIPTextModel, or a CLIPTextModelWithProjection if a folder's configuration names
        it and for bigG (32 blocks), SDXL's second encoder; in eval mode, in float32 or the dtype that a transformers
        folder names. The tokenizer's `model_max_length` is the encoder's context length.

    Raises:
        UserError: there is no text encoder that can be read.
    """
    return EncoderSpec.parse(name).load_text_encoder()


def load_two_tower(name: str | os.PathLike) -> "Backbone":
    """Loads a CLIP, SigLIP or Chinese-CLIP with both its towers, as retrieval and classification need it.

    Args:
        name: as for `load_text_encoder`, of a model with both towers, but a file needs its model's name:
            "ViT-L-14-quickgelu:longclip-L.pt"; or the folder or hub id of a ChineseCLIPModel
            ("OFA-Sys/chinese-clip-vit-base-patch16"), which is not trained here. What `ablate` has left has its heads
            suppressed.

    Returns:
        The model in eval mode and float32, with no random weights.

    Raises:
        UserError: there is no two-tower that can be read, or a text encoder alone.
    """
    return EncoderSpec.parse(name).load_two_tower()


def parse_encoders(names: Sequence[str], readings: bool = True) -> list[EncoderSpec]:
    """`EncoderSpec.parse` of the encoders that one command compares.

    Args:
        readings: one encoder may be named with several readings.

    Raises:
        UserError: there are none, one is named twice, or one is not there.
    """
    specs = [EncoderSpec.parse(name) for name in names]
    if not specs or len({(spec.name, spec.reading if readings else "") for spec in specs}) < len(specs):
        raise UserError(f"encoders={list(names)} is not allowed. Name at least one encoder, and none twice.")
    return specs


def labels(specs: Sequence[EncoderSpec], readings: bool = True) -> list[str]:
    """Short unique names: of paths the last parts, as many as make them unique.

    Args:
        readings: add how prompts are read; of an encoder that reads more than 77 tokens only if not "overlap".
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


def open_clip_models() -> list[str]:
    """The names of open_clip's models; none where open_clip, which is optional, is missing."""
    if open_clip := sys.modules.get("open_clip"):
        return open_clip.list_models()  # with those that were added
    spec = find_spec("open_clip")  # its import takes seconds, its configurations are files
    folders = spec.submodule_search_locations if spec else []
    return [file.stem for folder in folders for file in Path(folder, "model_configs").glob("*.json")]


def may_be_hub_id(name: str) -> bool:
    """Whether a name that does not exist here could be a repository of the hub (owner/name), so that the hub is asked.

    A missing path is answered at once instead: a name that begins like a path, with a folder that exists here, or with
    a usual name for a folder of runs or downloads.
    """
    owner, _, rest = name.partition("/")
    is_path = owner in _FOLDERS or name.endswith(_SUFFIXES) or os.path.lexists(owner)
    return bool(re.fullmatch(r"\w[\w.-]{0,95}", owner) and re.fullmatch(r"[\w.-]{1,96}", rest)) and not is_path


def check_model(name: str) -> None:
    """Raises ValueError unless it is a folder, or a hub id of which something is cached or may be downloaded."""
    from ..clip.model_files import hub_place

    if not os.path.isdir(name):
        if not may_be_hub_id(name):
            raise ValueError("it is not there")
        hub_place(name)


_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".npz")
_FOLDERS = ("runs", "out", "output", "outputs", "exported", "models", "checkpoints", "weights", "data", "tmp")


def _find(name: str) -> tuple[Kind, str, str | None]:
    """(kind, place, weights) of an encoder's name. Raises UserError for what is not there."""
    path = name.removeprefix("local-dir:")
    if path and os.path.exists(path):
        return *_kind_of(Path(path)), None
    if re.fullmatch(r"hf-hub:[\w.-]+/[\w.-]+(@[\w.-]+)?", name):
        return Kind.OPEN_CLIP, name, None
    model, colon, weights = name.partition(":")
    if colon and model not in ("local-dir", "hf-hub"):
        return Kind.OPEN_CLIP, model, _find_weights(model, weights)
    if (folder := shipped(name)) != name:
        return *_kind_of(Path(folder)), None
    if may_be_hub_id(name):
        return (Kind.CHINESE_CLIP if name.startswith(_CHINESE_CLIPS) else Kind.HUB), name, None
    models = open_clip_models()
    if name not in models:
        raise UserError(
            f"{name!r} is not there.{near_matches(name, [*TWO_TOWERS, ORIGINAL, *models])} Give a training run, a "
            "folder with an encoder, a file of weights, MODEL:WEIGHTS (ViT-B-16-quickgelu:openai), or a hub id "
            "(owner/name; hf-hub:owner/name in open_clip's layout)."
        )
    raise UserError(
        f"{name!r} is an open_clip model without weights. Give {name}:WEIGHTS, as options --model {name} --pretrained "
        "WEIGHTS, with a file, a tag of open_clip (openai) or, to train from random weights, none."
    )


def _kind_of(path: Path) -> tuple[Kind, str]:
    """(kind, place) of a path that exists; of a training run, those of its model after the last step.

    Of a run that has not ended the best model so far, if it keeps one. Of an alignment the two-tower with the fitted
    first encoder, or that encoder alone.
    """
    if path.name == "open_clip_model.safetensors" and (path.parent / "open_clip_config.json").is_file():
        path = path.parent
    if path.is_file():
        return Kind.FILE, str(path)
    for file, kind in _FILES.items():
        if (path / file).is_file():
            return kind, str(path)
    for name in MODELS_OF_RUN:
        if (path / name / "open_clip_config.json").is_file():
            return Kind.OPEN_CLIP, str(path / name)
    if (path / FIRST / "text_encoder").is_dir():
        return Kind.TRANSFORMERS, str(path / FIRST)
    if Job.read(path).command in ("train", "align", "ablate") and not (path / SECOND).is_dir():
        raise UserError(
            f"The run in {str(path)!r} has not ended, so it has no model yet. Continue it: the command that began it "
            "goes on where it stopped."
        )
    is_chinese = read_json_object(path / "config.json").get("model_type") == "chinese_clip"
    return (Kind.CHINESE_CLIP if is_chinese else Kind.TRANSFORMERS), str(path)


def _find_weights(model: str, weights: str) -> str | None:
    """The weights of MODEL:WEIGHTS; None for "none". Tags are checked when they are loaded."""
    if os.path.exists(shipped(model)):
        raise UserError(f"{model!r} brings its own weights; leave out {weights!r}, or give a model name.")
    models = open_clip_models()
    hint = near_matches(model, [*READINGS, *models])
    if model not in models and (models or hint):
        raise UserError(
            f"Unknown model {model!r} in {model + ':' + weights!r}.{hint} Before the colon stands a name of open_clip "
            f"(ViT-B-16-quickgelu), or how an encoder reads long prompts: {', '.join(READINGS)}."
        )
    if weights.endswith(_SUFFIXES) and not os.path.exists(weights):
        raise UserError(f"No weights {weights!r} for {model!r}: the file is not there.")
    return None if weights == "none" else weights


def _load_ablated(folder: Path) -> "Backbone":
    """The base model of a search, with the heads that it found suppressed."""
    from ..ablation.saved import read_ablation

    model, digest, ablation = read_ablation(folder)
    backbone = load_two_tower(model)
    if backbone.digest() != digest:
        raise UserError(
            f"The ablation {str(folder)!r} is of {model!r}, and that model has other weights, another configuration or "
            "another tokenizer now. Give the model that it was searched on its old place, or search again."
        )
    ablation.apply(backbone)
    return backbone
