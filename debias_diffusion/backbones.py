"""One interface over CLIP-family two-towers from open_clip: load, encode images, encode text, save.

The towers are open_clip's own modules; only the text tower's forward is ours, because it need not compute what a causal
mask hides (see `TextTower`).
"""

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import open_clip
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from open_clip.transformer import ResidualAttentionBlock
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision.transforms import Compose
from torchvision.transforms.functional import pil_to_tensor

from .errors import UserError, near_matches
from .positions import FACTOR, KEEP, stretch_positions
from .text_tower import TextTower
from .tokens import CaptionTokenizer, TokenBatch, clip_tokenizer, load_tokenizer
from .toyworld.shipped import shipped

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
TOKENIZER_FOLDER = "tokenizer"


class Backbone(nn.Module):
    """A two-tower CLIP: images and captions to features in one space.

    Made by `load_backbone`. Features are not normalised; `logit_scale` is the log of the scale, as in CLIP.

    Attributes:
        model: open_clip's own module; its state dict is what is saved.
        text: the text tower, sharing `model`'s weights.
        tokenizer: CaptionTokenizer for the model's window.
        preprocess: open_clip's validation transform, PIL image -> float [3, height, width].
        config: what `open_clip_config.json` holds.
        random_weights: whether nothing was loaded into it.
    """

    def __init__(self, model: nn.Module, tokenizer: CaptionTokenizer, config: dict, random_weights: bool = False):
        super().__init__()
        self.model = model
        self.random_weights = random_weights
        self.text = TextTower(getattr(model, "text", model))
        self.tokenizer = tokenizer
        self.config = config
        preprocess_cfg = open_clip.get_model_preprocess_cfg(model)
        self.preprocess = image_transform_v2(PreprocessCfg(**preprocess_cfg), is_train=False)
        # [3, 1, 1] each: the last step of `preprocess`, for images that are normalised where the model is
        for name in ("mean", "std"):
            values = torch.tensor(getattr(self.preprocess.transforms[-1], name), dtype=torch.float32)
            self.register_buffer(f"_pixel_{name}", values.view(-1, 1, 1), persistent=False)

    @property
    def context_length(self) -> int:
        return self.text.context_length

    @property
    def kept_positions(self) -> int:
        """How many first rows of the position table stay as they are in training."""
        return self.config.get("debias_diffusion", {}).get("keep", 0)

    @property
    def logit_scale(self) -> nn.Parameter:
        return self.model.logit_scale

    def tokenize(self, captions: list[str]) -> TokenBatch:
        return self.tokenizer(captions)

    def read_pixels(self, image: Image.Image) -> torch.Tensor:
        """An image resized and cropped as by `preprocess`, but as uint8 [3, height, width]: a quarter of the bytes."""
        return pil_to_tensor(Compose(self.preprocess.transforms[:-2])(image))

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        """[batch, 3, height, width] images, from `preprocess` or uint8 from `read_pixels` -> [batch, embed_dim]"""
        if images.dtype == torch.uint8:
            # As torchvision's ToTensor and Normalize do it, to the last bit.
            images = (images.to(self._pixel_mean.dtype) / 255 - self._pixel_mean) / self._pixel_std
        return self.model.encode_image(images)

    def encode_text(self, tokens: TokenBatch) -> torch.Tensor:
        """Tokens -> [batch, embed_dim]"""
        return self.text(tokens)

    def stretch(self, keep: int = KEEP, factor: int = FACTOR) -> None:
        """Stretches the text tower's positions in place (see `stretch_positions`)."""
        tower = self.text.tower
        table = stretch_positions(tower.positional_embedding.detach(), keep, factor)
        tower.positional_embedding = nn.Parameter(table)
        tower.context_length = len(table)
        if hasattr(tower, "num_pos"):
            tower.num_pos = len(table)
        tower.register_buffer(
            "attn_mask", torch.full((len(table),) * 2, -torch.inf).triu_(1).to(table), persistent=False
        )
        self.tokenizer = self.tokenizer.with_context_length(len(table))
        self.config["model_cfg"]["text_cfg"]["context_length"] = len(table)
        self.config["debias_diffusion"] = {"keep": keep, "factor": factor}

    def save(self, folder: str | os.PathLike) -> None:
        """Writes an open_clip folder that `open_clip.create_model("local-dir:" + folder)` loads, and the tokenizer."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.model.state_dict().items()}
        save_file(state, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / CONFIG_FILE).write_text(json.dumps(self.config, indent=2) + "\n")
        self.tokenizer.tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)


def load_backbone(model: str, pretrained: str | None = None) -> Backbone:
    """Loads a CLIP two-tower.

    Args:
        model: an open_clip name ("ViT-B-16"; "ViT-B-16-quickgelu" for OpenAI's weights), an open_clip folder such as
            training leaves, "hf-hub:owner/name", or "toy/clip".
        pretrained: for a name: an open_clip tag ("openai", "laion2b_s34b_b88k") or a file of weights. None gives random
            weights from torch's current seed.

    Raises:
        UserError: the model or the weights are unknown, or the text tower is not a causal, EOT-pooled CLIP one.
    """
    model = shipped(model)
    config, source = _find_config(model)
    _check_text_config(model, config["model_cfg"])
    if source is None:
        _check_pretrained(model, pretrained)
    elif pretrained is not None:
        raise UserError(f"{model!r} brings its own weights; leave out pretrained={pretrained!r}, or give a model name.")
    with _quiet_logging():
        try:
            clip = open_clip.create_model(source or model, pretrained=pretrained, weights_only=True)
        except Exception as error:  # whatever a wrong or hostile file makes the libraries raise
            reason = str(error).splitlines()[0][:300]
            raise UserError(
                f"The weights of {model!r} (pretrained={pretrained!r}) could not be loaded: {reason}"
            ) from error
    config.setdefault("preprocess_cfg", open_clip.get_model_preprocess_cfg(clip))
    _check_blocks(model, getattr(clip, "text", clip))
    context_length = config["model_cfg"]["text_cfg"].get("context_length", open_clip.tokenizer.DEFAULT_CONTEXT_LENGTH)
    tokenizer = CaptionTokenizer(_tokenizer(source, context_length), context_length)
    return Backbone(clip, tokenizer, config, random_weights=source is None and pretrained is None)


def _find_config(model: str) -> tuple[dict, str | None]:
    """(contents of open_clip_config.json, open_clip's name of the folder or hub repository; None for a plain name)."""
    if model.startswith("hf-hub:"):
        return {"model_cfg": deepcopy(open_clip.factory._get_hf_config(model[7:])["model_cfg"])}, model
    folder = Path(model.removeprefix("local-dir:"))
    if (folder / CONFIG_FILE).is_file():
        return json.loads((folder / CONFIG_FILE).read_text()), f"local-dir:{folder}"
    if folder.is_dir() or model.startswith("local-dir:"):
        raise UserError(f"The folder {os.fspath(folder)!r} holds no {CONFIG_FILE}; give an open_clip folder.")
    model_cfg = open_clip.get_model_config(model)
    if model_cfg is None:
        raise UserError(
            f"Unknown model {model!r}.{near_matches(model, open_clip.list_models())} Give an open_clip model name "
            "(`python -c 'import open_clip; print(open_clip.list_models())'` lists them) or an open_clip folder."
        )
    return {"model_cfg": deepcopy(model_cfg)}, None


def _check_text_config(model: str, model_cfg: dict) -> None:
    text_cfg = model_cfg["text_cfg"]
    unfit = [key for key in ("hf_model_name", "no_causal_mask", "embed_cls") if text_cfg.get(key)]
    if text_cfg.get("pool_type", "argmax") != "argmax":
        unfit.append(f"pool_type={text_cfg['pool_type']}")
    if "multimodal_cfg" in model_cfg:
        unfit.append("multimodal_cfg")
    if unfit:
        raise UserError(
            f"The text tower of {model!r} cannot be used ({', '.join(unfit)}): it must have a causal mask and pool at "
            "EOT, as OpenAI's and LAION's CLIP models do, for example ViT-B-16 or ViT-L-14."
        )


def _check_blocks(model: str, tower: nn.Module) -> None:
    if not all(type(block) is ResidualAttentionBlock for block in tower.transformer.resblocks):
        raise UserError(f"The text tower of {model!r} has blocks of its own kind; only plain CLIP blocks can be used.")


def _check_pretrained(model: str, pretrained: str | None) -> None:
    """Weights must exist, and fit the model's activation: a state dict cannot tell QuickGELU from GELU."""
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


def _tokenizer(source: str | None, context_length: int):
    """The tokenizer saved beside the weights, or CLIP's own."""
    folder = Path((source or "").removeprefix("local-dir:")) / TOKENIZER_FOLDER
    if source and folder.is_dir():
        return load_tokenizer(folder)
    return clip_tokenizer(context_length)


@contextlib.contextmanager
def _quiet_logging() -> Iterator[None]:
    """open_clip warns that random weights are random; whoever asked for them knows."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(previous)
