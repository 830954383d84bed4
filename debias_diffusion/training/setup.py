"""What a run needs before its first step: the base model, and which pairs it learns from."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Sequence

import torch
from torch import nn

from ..data import Captions, Record
from ..errors import UserError
from ..models.backbone import Backbone, load_backbone
from ..models.weights import weights_digest
from .config import TrainConfig
from .step import MAX_LOGIT_SCALE


def load_base_model(config: TrainConfig) -> Backbone:
    """The base model as it is, with random weights, if any, from the seed."""
    torch.manual_seed(config.seed)
    backbone = load_backbone(config.model, config.pretrained)
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in backbone.modules()):
        raise UserError(
            f"{config.model!r} has batch normalisation, whose result depends on how a batch is split. Take a ViT."
        )
    return backbone


def base_model_digest(backbone: Backbone) -> str | None:
    """sha256 of a base model's weights and configuration; None for random weights, which the seed decides.

    A run that continues takes more of them than its checkpoint holds: the kept positions, a frozen image tower's
    features, what becomes of an image.
    """
    if backbone.random_weights:
        return None
    parts = [weights_digest(backbone.model), backbone.config]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def prepare_backbone(backbone: Backbone, config: TrainConfig) -> Backbone:
    """The base model with its window stretched and its scale set, in place."""
    if "keep" not in backbone.config.get("debias_diffusion", {}):
        most = backbone.context_length - 2
        if config.keep_positions > most:
            raise UserError(
                f"keep_positions is {config.keep_positions}, but must be at most {most} for {config.model!r}, which "
                f"has {backbone.context_length} positions."
            )
        backbone.stretch(config.keep_positions, config.stretch)
    backbone.pooling = config.make_recipe().pooling
    _set_scale(backbone, config)
    if config.freeze_image_tower:
        backbone.model.visual.requires_grad_(False)
    if config.checkpoint_activations:
        backbone.checkpoint_activations()
    if config.compile:
        if not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++", "cl"))):
            raise UserError("compile needs a C++ compiler, and there is none. Install g++ or clang++, or leave it out.")
        backbone.compile()
    return backbone


def _set_scale(backbone: Backbone, config: TrainConfig) -> None:
    if backbone.loss == "sigmoid":
        if config.label_smoothing is not None:
            raise UserError(
                f"label_smoothing is {config.label_smoothing}, but the sigmoid loss of {config.model!r} has no labels "
                "to smooth. Leave it out."
            )
        scale = None if config.initial_scale == "auto" else config.initial_scale
    else:
        scale = 100.0 if config.initial_scale == "auto" else config.initial_scale
    if scale is not None:
        with torch.no_grad():
            backbone.logit_scale.fill_(min(math.log(scale), MAX_LOGIT_SCALE))


def split(captions: Captions, config: TrainConfig, reserve: float) -> tuple[Sequence[Record], Sequence[Record], int]:
    """(held out, trained on, how many of these are each epoch's reserve).

    Args:
        reserve: the share of the records that are each epoch's reserve, if enough for a batch remain.

    Raises:
        UserError: too few remain for a batch.
    """
    records, validation = captions.records, config.validation
    left = max(0, len(records) - validation)
    if left < config.batch:
        raise UserError(
            f"{len(records)} usable pairs less {validation} held out leave {left} to train on, fewer than "
            f"a batch of {config.batch}. Lower --validation or --batch, or give more pairs."
        )
    spare = min(math.ceil(reserve * left), left - config.batch)
    return records[:validation], records[validation:], spare
