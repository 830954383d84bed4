"""What a run needs before its first step: the base model, the method's modules and the split of the pairs."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from ..clip.backbone import Backbone
from ..data.captions import Captions
from ..data.records import Record
from ..encoders.loading import load_tokenizer
from ..errors import UserError
from ..text.tokens import CaptionTokenizer
from .config import RunConfig, TrainConfig, ablated
from .optimizer import MAX_LOGIT_SCALE

VALIDATION = 1000  # pairs held out by default: ShareGPT4V's validation split


def load_base_tokenizer(config: TrainConfig) -> CaptionTokenizer:
    """The tokenizer that the base model is trained with, without its weights. Raises UserError as `load_base_model`."""
    base = config.base_model()
    return load_tokenizer(base.place, base.weights, config.keep_positions, config.stretch)


def load_base_model(config: TrainConfig) -> Backbone:
    """The base model unchanged; random weights come from the seed.

    Raises:
        UserError: the model cannot be used, has suppressed heads, or no weights are named.
    """
    base = config.base_model()
    torch.manual_seed(config.seed)
    backbone = base.load_two_tower(random_weights=True)
    if backbone.image_attention or backbone.text_attention:
        raise ablated(config.model, "the model that it was made from")
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in backbone.modules()):
        raise UserError(
            f"{config.model!r} has batch normalisation, whose result depends on how a batch is split. Take a ViT."
        )
    return backbone


def prepare_backbone(backbone: Backbone, config: TrainConfig) -> Backbone:
    """The base model with its context length stretched, changed as the method wants it, its scale set, in place.

    Raises:
        UserError: the method or an option cannot be used with this model.
    """
    method = config.make_method()
    method.check_base(backbone, config.keep_positions, config.freeze_image_tower)
    if "keep" not in backbone.config.get("debias_diffusion", {}):
        most = backbone.context_length - 2
        if config.keep_positions > most:
            raise UserError(
                f"keep_positions is {config.keep_positions}, but must be at most {most} for {config.model!r}, which "
                f"has {backbone.context_length} positions."
            )
        backbone.stretch(config.keep_positions, config.stretch)
    torch.manual_seed(config.seed)
    method.prepare(backbone)
    _set_scale(backbone, config)
    if config.freeze_image_tower:
        backbone.model.visual.requires_grad_(False)
    if config.checkpoint_activations:
        backbone.checkpoint_activations()
    if config.compile:
        backbone.compile()
    return backbone


def _set_scale(backbone: Backbone, config: TrainConfig) -> None:
    is_sigmoid = backbone.loss == "sigmoid"
    if is_sigmoid and config.label_smoothing is not None:
        raise UserError(
            f"label_smoothing is {config.label_smoothing}, but the sigmoid loss of {config.model!r} has no labels to "
            "smooth. Leave it out."
        )
    scale = config.initial_scale
    if scale == "auto":
        scale = None if is_sigmoid else 100.0
    if scale is not None:
        with torch.no_grad():
            backbone.logit_scale.fill_(min(math.log(scale), MAX_LOGIT_SCALE))


def held_out_count(config: RunConfig, records: int) -> int:
    """How many pairs are held out; for `auto` never more than a tenth of the data."""
    return min(VALIDATION, records // 10) if config.validation == "auto" else config.validation


def batch_size(config: RunConfig, records: int) -> int:
    """Pairs of a step; for `auto` as many of so few as every usual number of processes can share, but at least 4."""
    if config.batch != "auto":
        return config.batch
    return config.LARGEST_BATCH if records >= config.LARGEST_BATCH else 1 << max(records, 4).bit_length() - 1


def warmup_steps(config: RunConfig, steps: int) -> int:
    """Steps of warm-up; for `auto` never more than a tenth of all."""
    return min(config.LONGEST_WARMUP, steps // 10) if config.warmup == "auto" else config.warmup


def split(captions: Captions, batch: int, validation: int) -> tuple[Sequence[Record], Sequence[Record]]:
    """(held-out pairs, training pairs).

    Args:
        batch: pairs of a step.
        validation: how many are held out, with those that choose the best model.

    Raises:
        UserError: too few remain for a batch.
    """
    records = captions.records
    left = max(0, len(records) - validation)
    if left < batch:
        raise UserError(
            f"{len(records)} usable pairs less {validation} held out leave {left} to train on, fewer than "
            f"a batch of {batch}. Lower --validation, --keep-best or --batch, or give more pairs."
        )
    return records[:validation], records[validation:]
