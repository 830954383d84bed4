"""One interface over CLIP-family two-towers from open_clip: load, encode images, encode text, save.

The towers are open_clip's modules; only the text tower has a forward of its own, which skips what a causal mask hides
(see `TextTower`). `families` says how CLIP and SigLIP differ.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import open_clip
import torch
from open_clip import CLIPTextCfg
from open_clip.transform import PreprocessCfg, image_transform_v2
from open_clip.transformer import ResidualAttentionBlock, VisionTransformer
from PIL import Image
from torch import nn
from torchvision.transforms import Compose, PILToTensor

from ..errors import UserError, near_matches
from ..files import json_digest
from ..tokens import CaptionTokenizer, TokenBatch
from .blocks import Attention, block_numbers
from .chinese_clip import NOT_TRAINED, BertTower
from .families import CHINESE_CLIP, Family, find_family
from .image_tower import PROMPTS_AND_ATTENTION, ImageTower, add_prompts
from .model_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    build_empty,
    check_bounds,
    check_finite,
    explain_failure,
    find_file,
    read_config,
)
from .positions import FACTOR, KEEP, stretch_positions, stretched_length
from .regional_prompts import PromptSettings
from .shipped import shipped
from .text_tower import POOLINGS, PaddedTextTower, TextTower, set_positions, set_short_positions
from .weight_files import is_long_clip, read_state, save_tensors, weights_digest
from .weights import count_numbers, find_weights, load_weights, read_weights

SHORT_POSITIONS_FILE = (
    "short_positions.safetensors"  # beside the weights, where short captions had a table of their own
)
_SHORT_POSITIONS = "positional_embedding"
_PROMPTS = "regional_prompts"  # in `config`


class Backbone(nn.Module):
    """A two-tower CLIP, SigLIP or Chinese-CLIP: images and captions to features in one space.

    `load_backbone` makes one. Features are not normalised; `logit_scale` is the log of the scale, as in CLIP.

    Attributes:
        model: open_clip's module, whose state dict `save` writes.
        text: the text tower, sharing `model`'s weights.
        tokenizer: CaptionTokenizer for the model's context length.
        preprocess: open_clip's validation transform, PIL image -> float [3, height, width].
        read_pixels: the same resizing and cropping to uint8 [3, height, width], a quarter of the bytes. It is separate
            from the model, so that worker processes can have it alone.
        config: the content of `open_clip_config.json`.
        family: CLIP, SigLIP or Chinese-CLIP (see `Family`).
        random_weights: whether the model has no loaded weights.
    """

    def __init__(self, model: nn.Module, tokenizer: CaptionTokenizer, config: dict, random_weights: bool = False):
        super().__init__()
        self.model = model
        self.random_weights = random_weights
        self.tokenizer = tokenizer
        self.config = config
        self.family = find_family("this model", config["model_cfg"])
        padded = BertTower if self.family.name == CHINESE_CLIP else PaddedTextTower
        self.text = (TextTower if self.family.causal else padded)(getattr(model, "text", model))
        self.pooling = self._extra_config.get("pooling", "eot")
        preprocess_cfg = open_clip.get_model_preprocess_cfg(model)
        self.preprocess = image_transform_v2(PreprocessCfg(**preprocess_cfg), is_train=False)
        self.read_pixels = Compose([*self.preprocess.transforms[:-2], PILToTensor()])
        # [3, 1, 1] each: the last step of `preprocess`, for images that are normalised where the model is
        for name in ("mean", "std"):
            values = torch.tensor(getattr(self.preprocess.transforms[-1], name), dtype=torch.float32)
            self.register_buffer(f"_pixel_{name}", values.view(-1, 1, 1), persistent=False)

    @property
    def context_length(self) -> int:
        return self.text.context_length

    @property
    def _extra_config(self) -> dict:
        """The part of `config` that open_clip does not know."""
        return self.config.get("debias_diffusion", {})

    def _configure(self, **values) -> None:
        """Sets entries of that part; None removes one."""
        entries = self._extra_config | values
        self.config["debias_diffusion"] = {name: value for name, value in entries.items() if value is not None}

    @property
    def kept_positions(self) -> int:
        """The number of first rows of the position table that training does not change."""
        return self._extra_config.get("keep", 0)

    @property
    def unstretched_rows(self) -> list[int]:
        """The rows of the position table that stood in it before it was stretched; stretching keeps them."""
        first = range(min(self.kept_positions, self.context_length))
        return [*first, *range(len(first), self.context_length, max(1, self._extra_config.get("factor", 1)))]

    @property
    def logit_scale(self) -> nn.Parameter:
        return self.model.logit_scale

    @property
    def loss(self) -> str:
        """ "softmax" or "sigmoid": the loss that the features were trained for."""
        return self.family.loss

    @property
    def logit_bias(self) -> nn.Parameter | None:
        """The bias that the sigmoid loss adds to the scaled similarities; None for the softmax loss."""
        return self.model.logit_bias

    @property
    def pooling(self) -> str:
        """Where the text feature is read, one of `POOLINGS`. Any but "eot" is written into `config`.

        open_clip does not know this setting: it pools a saved folder at EOT.
        """
        return self.text.pooling

    @pooling.setter
    def pooling(self, pooling: str) -> None:
        if pooling not in POOLINGS:
            raise UserError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}.")
        self.text.pooling = pooling
        if pooling != self._extra_config.get("pooling", "eot"):
            self._configure(pooling=pooling)

    def tokenize(self, captions: list[str]) -> TokenBatch:
        return self.tokenizer(captions)

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        """[batch, 3, height, width] images, from `preprocess` or uint8 from `read_pixels` -> [batch, embed_dim]"""
        images = self.as_floats(images)
        if self.image_attention is None and self.prompt_settings is None:
            return self.model.encode_image(images)
        if self.image_attention is not None and not self.image.attends:
            raise UserError(
                f"This model was saved with other attention in its image tower, {self.image_attention}. Replace it "
                "again first (`Backbone.replace_image_attention`)."
            )
        return self.image(images)

    @cached_property
    def image(self) -> ImageTower:
        """The image tower block by block, sharing `model`'s weights. Raises UserError for a ResNet and for timm's."""
        return ImageTower(self.model.visual)

    @property
    def image_attention(self) -> dict | None:
        """Describes the replaced attention of the image tower; None for the plain one."""
        return self._extra_config.get("image_attention")

    def replace_image_attention(self, attends: Mapping[int, Attention], description: dict) -> None:
        """Gives blocks of the image tower another attention, in `encode_image` too.

        open_clip does not know this setting: it runs a saved folder with the plain attention.

        Args:
            attends: attention by number of the block; all other blocks keep the plain one.
            description: JSON values that identify this attention. They are written into `config`, so that caches,
                evaluations and saved folders differ from the plain model's.

        Raises:
            UserError: no block or description is given, a block is none, or the image tower is a ResNet or timm's.
        """
        if not attends or not description:
            raise UserError("replace_image_attention needs at least one block and a description.")
        if self.prompt_settings is not None:
            raise UserError(PROMPTS_AND_ATTENTION)
        numbers = block_numbers(self.image.visual.transformer, attends)
        self.image.attends = dict(zip(numbers, attends.values(), strict=True))
        self._configure(image_attention=description)

    @property
    def prompt_settings(self) -> PromptSettings | None:
        """Of the image tower's regional prompts (Fix-CLIP); None: it has none."""
        return PromptSettings.of_config(self._extra_config[_PROMPTS]) if _PROMPTS in self._extra_config else None

    def add_prompts(self, settings: PromptSettings) -> None:
        """Adds regional prompts to the image tower, random ones of torch's generator. Every image is read with them.

        open_clip does not know them: its strict loading refuses the saved weights.
        """
        add_prompts(self.model.visual, settings)
        self._configure(**{_PROMPTS: settings.description()})

    @property
    def short_positions(self) -> torch.Tensor | None:
        """[positions, width] the table that short captions are read with in training, as the base model has it; or None

        It is not trained, and no weight of the model, but saved beside them: `TokenBatch.is_short` chooses the captions
        that use it, and `text_tower.set_short_positions` sets it.
        """
        return self.text.short_positions

    def read_short(self) -> None:
        """Makes the table of short captions that of all captions: a text tower of the base model's context length.

        Raises:
            UserError: there is no such table.
        """
        table = self.short_positions
        if table is None:
            raise UserError(
                f"This model has no {SHORT_POSITIONS_FILE}, the positions that short captions were trained with. Give "
                "a run of `train --recipe fix-clip` with --method.short_positions own, or leave out --positions short."
            )
        set_short_positions(self.text.tower, None)
        self._set_positions(table.clone())
        self._configure(keep=None, factor=None)

    @property
    def text_attention(self) -> dict | None:
        """Describes the replaced attention of the text tower; None for the plain one."""
        return self._extra_config.get("text_attention")

    def replace_text_attention(
        self, changes: Mapping[int, Callable[[Attention], Attention]], description: dict
    ) -> None:
        """Gives blocks of the text tower another attention, see `TextTower.changes`.

        Args:
            changes: by number of the block; all other blocks keep the plain attention.
            description: as in `replace_image_attention`.

        Raises:
            UserError: no block or description is given, or a block is none.
        """
        if not changes or not description:
            raise UserError("replace_text_attention needs at least one block and a description.")
        numbers = block_numbers(self.text.tower.transformer, changes)
        self.text.changes = dict(zip(numbers, changes.values(), strict=True))
        self._configure(text_attention=description)

    def restore_text_attention(self) -> None:
        """Gives the text tower its plain attention again, and removes the description."""
        self.text.changes = {}
        self._configure(text_attention=None)

    def digest(self) -> str:
        """sha256 of the weights, and of replaced attention or of how regional prompts are used."""
        weights, image, text = weights_digest(self), self.image_attention, self.text_attention
        prompts = self._extra_config.get(_PROMPTS)
        if prompts:
            return json_digest({"weights": weights, "prompts": prompts, "text": text})
        return json_digest({"weights": weights, "image": image, "text": text}) if image or text else weights

    def image_fingerprint(self) -> dict:
        """Everything but the image that decides its features, as JSON values: part of the key of a cache of them."""
        fingerprint = {
            "weights": weights_digest(self.model.visual),
            "vision_cfg": self.config["model_cfg"]["vision_cfg"],
            "preprocess": str(self.preprocess),
        }
        fingerprint |= {} if self.image_attention is None else {"attention": self.image_attention}
        prompts = self.prompt_settings
        return fingerprint | ({} if prompts is None else {_PROMPTS: prompts.description()})

    def as_floats(self, images: torch.Tensor) -> torch.Tensor:
        """Images from `preprocess` as they are, and uint8 ones from `read_pixels` normalised."""
        return self.normalise(images) if images.dtype == torch.uint8 else images

    def normalise(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [batch, 3, height, width] to floats, bit for bit as torchvision's ToTensor and Normalize."""
        return (pixels.to(self._pixel_mean.dtype) / 255 - self._pixel_mean) / self._pixel_std

    def encode_text(self, tokens: TokenBatch) -> torch.Tensor:
        """Tokens -> [batch, embed_dim]"""
        if self.text_attention is not None and not self.text.changes:
            raise UserError(
                f"This model was saved with other attention in its text tower, {self.text_attention}. Replace it again "
                "first (`Backbone.replace_text_attention`)."
            )
        return self.text(tokens)

    def stretch(self, keep: int = KEEP, factor: int = FACTOR) -> None:
        """Stretches the text tower's positions in place (see `stretch_positions`)."""
        self._set_positions(stretch_positions(self.text.tower.positional_embedding.detach(), keep, factor))
        self._configure(keep=keep, factor=factor)

    def _set_positions(self, table: torch.Tensor) -> None:
        set_positions(self.model, table)
        self.tokenizer = self.tokenizer.with_context_length(len(table))
        self.config["model_cfg"]["text_cfg"]["context_length"] = len(table)

    def checkpoint_activations(self) -> None:
        """Trades time for memory in both towers: only each block's input is kept for the backward pass.

        Values and gradients do not change. An image tower for which open_clip cannot do this is left alone.
        """
        self.model.visual.set_grad_checkpointing(True)
        self.text.checkpoint_activations()

    def compile(self, **options) -> None:
        """Compiles both towers with torch.compile on their first use, which takes minutes and a C compiler.

        Values and gradients stay the same up to rounding; the names in the state dict do not change.

        Args:
            options: of torch.compile, for example `backend`.
        """
        self.model.visual.compile(**options)
        if isinstance(self.model.visual, VisionTransformer):  # for methods that run it block by block
            self.image.compile(**options)
        self.text.compile(**options)

    def save(self, folder: str | os.PathLike) -> None:
        """Writes an open_clip folder that `open_clip.create_model("local-dir:" + folder)` loads, and the tokenizer.

        Raises:
            UserError: it is a Chinese-CLIP, which open_clip does not know.
        """
        if self.family.name == CHINESE_CLIP:
            raise UserError(f"open_clip has no {CHINESE_CLIP}. {NOT_TRAINED}")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(
            {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}, folder / WEIGHTS_FILE
        )
        if self.short_positions is not None:
            table = {_SHORT_POSITIONS: self.short_positions.detach().cpu()}
            save_tensors(table, folder / SHORT_POSITIONS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(self.config, indent=2) + "\n")
        self.family.save_tokenizer(self.tokenizer, folder)


def load_backbone(model: str, pretrained: str | None = None) -> Backbone:
    """Loads a CLIP or SigLIP two-tower.

    Args:
        model: an open_clip name ("ViT-B-16"; "ViT-B-16-quickgelu" for OpenAI's weights; "ViT-B-16-SigLIP2"), an
            open_clip folder such as training leaves, "hf-hub:owner/name", or "toy/clip".
        pretrained: for a name: an open_clip tag ("openai", "laion2b_s34b_b88k", "webli") or a file of weights, of
            Long-CLIP's too. None gives random weights from torch's current seed.

    Raises:
        UserError: the model, the weights or the tokenizer are unknown or broken, or do not fit each other; or the text
            tower is neither CLIP's nor SigLIP's.
    """
    with explain_failure(f"The weights of {model!r} (pretrained={pretrained!r}) could not be loaded"):
        return _load(shipped(model), pretrained)


def load_tokenizer(model: str, pretrained: str | None, keep: int, factor: int) -> CaptionTokenizer:
    """The tokenizer of a two-tower for its stretched context length, without the weights.

    Args:
        model, pretrained: as for `load_backbone`.
        keep, factor: what the model would be stretched with; one that is stretched already keeps its length.
    """
    with explain_failure(f"The tokenizer of {model!r} could not be loaded"):
        model = shipped(model)
        config, source, family = _find(model, pretrained)
        file = Path(pretrained) if pretrained and os.path.isfile(pretrained) else None
        tokenizer = family.load_tokenizer(model, _folder(source, file), config["model_cfg"]["text_cfg"])
        if "keep" in config.get("debias_diffusion", {}):
            return tokenizer
        if file and is_long_clip(read_weights(file) or {}):
            keep, factor = KEEP, FACTOR
        return tokenizer.with_context_length(stretched_length(tokenizer.context_length, keep, factor))


def _find(model: str, pretrained: str | None) -> tuple[dict, str | None, Family]:
    """The configuration and source of `_find_config`, and the family; weights fit the model as far as names say it."""
    config, source = _find_config(model)
    family = find_family(model, config["model_cfg"])
    if source is None:
        _check_pretrained(model, pretrained)
    elif pretrained is not None:
        raise UserError(f"{model!r} brings its own weights; leave out pretrained={pretrained!r}, or give a model name.")
    return config, source, family


def _load(model: str, pretrained: str | None) -> Backbone:
    config, source, family = _find(model, pretrained)
    with _quiet_logging():
        file = find_weights(model, source, pretrained)
        if source is not None:
            check_bounds(config, f"The configuration of {model!r}")
        state = read_weights(file) if file else None
        if source is not None:  # open_clip's own configurations are valid
            _check_config(source, count_numbers(file, state), model)
        tokenizer = family.load_tokenizer(model, _folder(source, file), config["model_cfg"]["text_cfg"])
        clip = open_clip.create_model(source or model, pretrained=pretrained, load_weights=False)
        _check_blocks(model, family, getattr(clip, "text", clip))
        _add_prompts_of(config, clip, model)
        stretched = file and load_weights(clip, file, state, model, bool(config["model_cfg"].get("quick_gelu")))
    if file:
        check_finite(clip.state_dict().items(), f"{str(file)!r}")
    if stretched:
        tokenizer = tokenizer.with_context_length(clip.context_length)
        config["model_cfg"]["text_cfg"]["context_length"] = clip.context_length
        config["debias_diffusion"] = stretched
    config.setdefault("preprocess_cfg", open_clip.get_model_preprocess_cfg(clip))
    backbone = Backbone(clip, tokenizer, config, random_weights=file is None)
    _load_short_positions(backbone, file)
    check_preprocessing(backbone, model)
    return backbone


def _add_prompts_of(config: dict, clip: nn.Module, model: str) -> None:
    """The prompts that a saved model's configuration names; their weights are loaded with all others."""
    prompts = config.get("debias_diffusion", {}).get(_PROMPTS)
    if prompts is not None:
        with explain_failure(f"The regional prompts of {model!r} cannot be used"):
            add_prompts(clip.visual, PromptSettings.of_config(prompts))


def _load_short_positions(backbone: Backbone, weights: Path | None) -> None:
    """The table of short captions beside a folder's weights, if there is one."""
    file = weights and weights.with_name(SHORT_POSITIONS_FILE)
    if not file or weights.name != WEIGHTS_FILE or not file.is_file():
        return
    table, width = read_state(file).get(_SHORT_POSITIONS), backbone.text.tower.positional_embedding.shape[1]
    if table is None or table.ndim != 2 or table.shape[1] != width or not 3 <= len(table) <= backbone.context_length:
        raise UserError(
            f"{str(file)!r} holds no table of at most {backbone.context_length} positions of width {width}. Get it "
            "again, or remove it: it is only read for training and for `export --positions short`."
        )
    check_finite([(_SHORT_POSITIONS, table)], f"{str(file)!r}")
    set_short_positions(backbone.text.tower, table)


def check_preprocessing(backbone: Backbone, model: str) -> None:
    """Raises UserError if the preprocessing does not give finite images of the image tower's size."""
    pixels = backbone.preprocess(Image.new("RGB", (8, 8)))
    size = backbone.model.visual.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    if pixels.shape != (3, height, width) or not pixels.isfinite().all():
        raise UserError(
            f"The preprocessing of {model!r} gives images of {tuple(pixels.shape)}, or not finite; its tower takes "
            f"{(3, height, width)}. Correct preprocess_cfg in its configuration: size, three means and deviations."
        )


def _check_config(source: str, numbers: int, model: str) -> None:
    """Raises UserError for sizes that weights of so many numbers cannot have; a library's error for invalid settings.

    Builds and runs a module without weights, which takes no memory and a fraction of a second.
    """
    clip = build_empty(lambda: open_clip.create_model(source, load_weights=False, device="meta"), numbers, repr(model))
    size, text = clip.visual.image_size, getattr(clip, "text", clip)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    with torch.no_grad():
        features = [
            clip.encode_image(torch.empty(1, 3, height, width, device="meta")),
            clip.encode_text(torch.zeros(1, text.context_length, dtype=torch.long, device="meta")),
        ]
    if features[0].shape != features[1].shape:
        raise UserError(f"The towers of {model!r} give features of sizes {[part.shape[-1] for part in features]}.")


def _find_config(model: str) -> tuple[dict, str | None]:
    """(content of open_clip_config.json, open_clip's name of the folder or hub repository; None for a plain name)."""
    folder = Path(model.removeprefix("local-dir:"))
    if model.startswith("hf-hub:"):
        config, source = _hub_config(model), model
    elif (folder / CONFIG_FILE).is_file():
        config, source = _read_config(folder / CONFIG_FILE), f"local-dir:{folder}"
    elif folder.is_dir() or model.startswith("local-dir:"):
        raise UserError(f"The folder {os.fspath(folder)!r} holds no {CONFIG_FILE}; give an open_clip folder.")
    else:
        config, source = {"model_cfg": open_clip.get_model_config(model)}, None
    if config["model_cfg"] is None:
        raise UserError(
            f"Unknown model {model!r}.{near_matches(model, open_clip.list_models())} Give an open_clip model name "
            "(`python -c 'import open_clip; print(open_clip.list_models())'` lists them) or an open_clip folder."
        )
    text_cfg = config["model_cfg"]["text_cfg"]
    text_cfg.setdefault("context_length", CLIPTextCfg.context_length)
    text_cfg.setdefault("vocab_size", CLIPTextCfg.vocab_size)
    return config, source


def _hub_config(model: str) -> dict:
    advice = "Check the name and the network, or give a folder that holds the repository's files."
    with explain_failure(f"{model!r} could not be fetched from the Hugging Face hub", advice):
        config = {"model_cfg": open_clip.get_model_config(model)}
        file = find_file(model.removeprefix("hf-hub:"), CONFIG_FILE)  # open_clip keeps only its part of it
        extra = (read_config(file) if file else {}).get("debias_diffusion")
    return config | ({"debias_diffusion": extra} if extra else {})


def _read_config(file: Path) -> dict:
    config = read_config(file)
    model_cfg = config.get("model_cfg")
    parts = [model_cfg.get(name) for name in ("vision_cfg", "text_cfg")] if isinstance(model_cfg, dict) else [None]
    extra = config.get("debias_diffusion", {})
    if not all(isinstance(part, dict) for part in (*parts, extra)):
        raise UserError(
            f"{str(file)!r} is not an open_clip configuration: model_cfg, its vision_cfg and text_cfg, and "
            "debias_diffusion must be JSON objects."
        )
    if not all(type(extra.get(name, 1)) is int and extra.get(name, 1) >= 0 for name in ("keep", "factor")):
        raise UserError(f"{str(file)!r} has debias_diffusion {extra}; keep and factor must be whole numbers.")
    return config


def _check_blocks(model: str, family: Family, tower: nn.Module) -> None:
    if family.causal and not all(type(block) is ResidualAttentionBlock for block in tower.transformer.resblocks):
        raise UserError(f"The text tower of {model!r} has unusual blocks; only plain CLIP blocks can be used.")


def _check_pretrained(model: str, pretrained: str | None) -> None:
    """Raises UserError unless the weights exist and fit the model's activation, which a state dict does not hold."""
    if pretrained is None or os.path.isfile(pretrained):
        return
    tags = open_clip.list_pretrained_tags_by_model(model)
    if pretrained not in tags:
        raise UserError(
            f"No weights {pretrained!r} for {model!r}.{near_matches(pretrained, tags)} "
            f"Give a file or one of: {', '.join(tags) or '(no tags for this model)'}."
        )
    quick = open_clip.get_pretrained_cfg(model, pretrained).get("quick_gelu", False)
    if quick != bool(open_clip.get_model_config(model).get("quick_gelu")):
        other = f"{model}-quickgelu" if quick else model.removesuffix("-quickgelu")
        raise UserError(
            f"The weights {pretrained!r} were trained {'with' if quick else 'without'} QuickGELU, which {model!r} "
            f"{'lacks' if quick else 'has'}. Use --model {other}."
        )


def _folder(source: str | None, file: Path | None) -> Path | None:
    """The folder beside the weights that may hold a tokenizer."""
    if source is not None and source.startswith("local-dir:"):
        return Path(source.removeprefix("local-dir:"))
    return file and file.parent


@contextlib.contextmanager
def _quiet_logging() -> Iterator[None]:
    """Silences open_clip's warning about random weights, which were asked for."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(previous)
