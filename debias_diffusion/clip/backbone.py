"""One interface over CLIP-family two-towers from open_clip: load, encode images, encode text, save.

The towers are open_clip's modules, with forwards that skip what a causal mask hides (`TextTower`) and what is not
pooled (`ImageTower`). `families` says how CLIP and SigLIP differ.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from torch import nn
from torchvision.transforms import Compose, PILToTensor

from ..errors import UserError
from ..limits import Tower
from ..text.tokens import CaptionTokenizer, TokenBatch
from .blocks import Attention, block_numbers
from .families import find_family
from .image_tower import PROMPTS_AND_ATTENTION, ImageTower, add_prompts, has_plain_blocks
from .positions import FACTOR, KEEP, stretch_positions
from .regional_prompts import PromptSettings
from .text_tower import POOLINGS, TextTower, set_positions, set_short_positions
from .weight_files import CONFIG_FILE, WEIGHTS_FILE, model_digest, save_tensors

# Beside the weights, where short captions had a table of their own.
SHORT_POSITIONS_FILE = "short_positions.safetensors"
_SHORT_POSITIONS = "positional_embedding"
_PROMPTS = "regional_prompts"  # in `config`
_IMAGE_SETTINGS = ("embed_dim", "quick_gelu", "vision_cfg")  # of `model_cfg`, what open_clip builds an image tower of


class Backbone(nn.Module):
    """A two-tower CLIP or SigLIP, or one of another family: images and captions to features in one space.

    `load_two_tower` makes one. Features are not normalised; `logit_scale` is the log of the scale, as in CLIP.

    Attributes:
        model: open_clip's module, whose state dict `save` writes.
        text: the text tower, sharing `model`'s weights.
        tokenizer: CaptionTokenizer for the model's context length.
        preprocess: open_clip's validation transform, PIL image -> float [3, height, width].
        read_pixels: the same resizing and cropping to uint8 [3, height, width], a quarter of the bytes. It is separate
            from the model, so that worker processes can have it alone.
        config: the content of `open_clip_config.json`.
        family: see `Family`.
        random_weights: whether the model has no loaded weights.
    """

    def __init__(self, model: Any, tokenizer: CaptionTokenizer, config: dict, random_weights: bool = False):
        super().__init__()
        self.model = model
        self.random_weights = random_weights
        self.tokenizer = tokenizer
        self.config = config
        self.family = find_family("this model", config["model_cfg"])
        self.text = self.family.text_tower(getattr(model, "text", model))
        self.pooling = self._extra_config.get("pooling", "eot")
        preprocess_cfg = open_clip.get_model_preprocess_cfg(model)
        self.preprocess = image_transform_v2(PreprocessCfg(**preprocess_cfg), is_train=False)
        self.read_pixels = Compose([*self.preprocess.transforms[:-2], PILToTensor()])
        # the last step of `preprocess`, for images that are normalised where the model is
        normalise = self.preprocess.transforms[-1]
        mean, std = (torch.tensor(part, dtype=torch.float32, device="cpu") for part in (normalise.mean, normalise.std))
        # Every image would count as unreadable, or have features that are not finite.
        if not (len(mean) == len(std) == 3 and torch.cat([1 / std, mean / std]).isfinite().all()):
            raise ValueError(
                f"by its preprocess configuration, with mean {list(normalise.mean)} and std {list(normalise.std)}, "
                "images cannot be normalised. Each must be three finite numbers, and std none of 0; correct it in the "
                "model's configuration"
            )
        for name, values in (("_pixel_mean", mean), ("_pixel_std", std)):  # [3, 1, 1] each
            self.register_buffer(name, values.view(-1, 1, 1).to(torch.get_default_device()), persistent=False)

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
        self._check_attention("image")
        encode = self.image if has_plain_blocks(self.model.visual) else self.model.visual
        return encode(self.as_floats(images))

    @cached_property
    def image(self) -> ImageTower:
        """The image tower block by block, sharing `model`'s weights. Raises UserError for a ResNet and for timm's."""
        return ImageTower(self.model.visual)

    @property
    def image_attention(self) -> dict | None:
        """Describes the replaced attention of the image tower; None for the plain one."""
        return self._extra_config.get("image_attention")

    @property
    def text_attention(self) -> dict | None:
        """Describes the replaced attention of the text tower; None for the plain one."""
        return self._extra_config.get("text_attention")

    def tower(self, name: Tower) -> ImageTower | TextTower:
        """The tower of this name. Raises UserError as `image` does."""
        return self.image if name == "image" else self.text

    def replace_attention(
        self, name: Tower, changes: Mapping[int, Callable[[Attention], Attention]], description: dict | None
    ) -> None:
        """Gives blocks of a tower another attention, in `encode_image` and `encode_text` too.

        open_clip does not know this setting: it runs a saved folder with the plain attention.

        Args:
            name: of the tower.
            changes: by number of the block, a function that makes another attention of its plain one, see
                `TextTower.changes`; all other blocks keep the plain one.
            description: JSON values that identify this attention. They are written into `config`, so that caches,
                evaluations and saved folders differ from the plain model's. None, where no block is changed.

        Raises:
            UserError: a block is none, or the image tower is a ResNet or timm's, or has regional prompts.
        """
        if name == "image" and self.prompt_settings is not None:
            raise UserError(PROMPTS_AND_ATTENTION)
        tower = self.tower(name)
        tower.changes = dict(zip(block_numbers(tower.transformer, changes), changes.values(), strict=True))
        self._configure(**{f"{name}_attention": description})

    def _check_attention(self, name: Tower) -> None:
        description = self._extra_config.get(f"{name}_attention")
        if description is not None and not self.tower(name).changes:
            raise UserError(
                f"This model was saved with other attention in its {name} tower, {description}. Replace it again first "
                "(`Backbone.replace_attention`)."
            )

    @property
    def prompt_settings(self) -> PromptSettings | None:
        """Of the image tower's regional prompts (Fix-CLIP); None: it has none."""
        return PromptSettings(**self._extra_config[_PROMPTS]) if _PROMPTS in self._extra_config else None

    def add_prompts(self, settings: PromptSettings) -> None:
        """Adds regional prompts to the image tower, random ones of torch's generator. Every image is read with them.

        open_clip does not know them: its strict loading refuses the saved weights.
        """
        add_prompts(self.model.visual, settings)
        self._configure(**{_PROMPTS: asdict(settings)})

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
                "a run of the recipe fix-clip whose short positions are its own, or leave out short."
            )
        set_short_positions(self.text.tower, None)
        self._set_positions(table.clone())
        self._configure(keep=None, factor=None)

    def digest(self) -> str:
        """sha256 of all that decides a feature or a training: weights, configuration and tokenizer."""
        short = {} if self.short_positions is None else {SHORT_POSITIONS_FILE: self.short_positions}
        config = self.config | {"preprocess_cfg": open_clip.get_model_preprocess_cfg(self.model)}
        return model_digest(self.model, config, self.tokenizer.tokenizer, **short)

    def image_digest(self) -> str:
        """sha256 of all but the opened image that decides its features, whatever the text tower and the tokenizer."""
        settings = {name: self.config["model_cfg"].get(name) for name in _IMAGE_SETTINGS}
        settings |= {name: self._extra_config.get(name) for name in ("image_attention", _PROMPTS)}
        settings["preprocess_cfg"] = open_clip.get_model_preprocess_cfg(self.model)
        return model_digest(self.model.visual, settings)

    def as_floats(self, images: torch.Tensor) -> torch.Tensor:
        """Images from `preprocess` as they are; uint8 ones from `read_pixels`, [batch, 3, height, width], normalised.

        Bit for bit as torchvision's ToTensor and Normalize.
        """
        if images.dtype != torch.uint8:
            return images
        return (images.to(self._pixel_mean.dtype) / 255 - self._pixel_mean) / self._pixel_std

    def encode_text(self, tokens: TokenBatch) -> torch.Tensor:
        """Tokens -> [batch, embed_dim]"""
        self._check_attention("text")
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
        """Compiles both towers with torch.compile on their first use, which takes a minute and a C compiler.

        Values and gradients stay the same up to rounding; the names in the state dict do not change. Captions of other
        lengths compile nothing anew, images of another number once.

        Args:
            options: of torch.compile, for example `backend`.
        """
        (self.image if has_plain_blocks(self.model.visual) else self.model.visual).compile(**options)
        self.text.compile(**options)

    def save(self, folder: str | os.PathLike) -> None:
        """Writes an open_clip folder that `open_clip.create_model("local-dir:" + folder)` loads, and the tokenizer."""
        folder = Path(folder)
        self.family.save_tokenizer(self.tokenizer, folder)
        save_tensors(self.model.state_dict(), folder / WEIGHTS_FILE)
        if self.short_positions is not None:
            save_tensors({_SHORT_POSITIONS: self.short_positions}, folder / SHORT_POSITIONS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(self.config, indent=2) + "\n")
