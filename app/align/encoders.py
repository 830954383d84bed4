"""The text encoders of a run: those that are fitted, and the frozen ones that they are compared with."""

import copy

import torch
from diffusers import StableDiffusionXLPipeline
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from debias_diffusion.encoders import ORIGINAL, EncoderSpec
from debias_diffusion.errors import UserError
from debias_diffusion.interchange.stretch import stretch_text_encoder
from debias_diffusion.interchange.text_encoders import TextEncoder, to_transformers
from debias_diffusion.models.backbone import Backbone
from debias_diffusion.pipelines.checkpoints import STRETCH, Checkpoint

from .objective import Encoder, Slot


def first_slot(
    name: str | None, pipe: StableDiffusionXLPipeline, checkpoint: Checkpoint, dtype: torch.dtype
) -> tuple[Slot, Backbone | None]:
    """SDXL's first encoder, and the two-tower that the fitted one is the text tower of, if it has an image tower.

    Args:
        name: of the settings.
        dtype: of frozen encoders.

    Raises:
        UserError: it cannot be loaded, or does not fit the checkpoint.
    """
    base = Encoder(pipe.text_encoder.requires_grad_(False), pipe.tokenizer)
    if name is None:
        return Slot(base), None
    backbone = kept = None
    if name == ORIGINAL:
        encoder, tokenizer = copy.deepcopy(base.model), base.tokenizer
    else:
        backbone, encoder, tokenizer = _load(name)
        _check("text_encoder", name, encoder, tokenizer, base, checkpoint)
    if isinstance(encoder, CLIPTextModelWithProjection):
        kept = Encoder(copy.deepcopy(encoder).to(base.model.device, dtype).requires_grad_(False), tokenizer)
    return Slot(base, Encoder(encoder.float().requires_grad_(True), tokenizer), kept), backbone


def second_slot(name: str | None, pipe: StableDiffusionXLPipeline, checkpoint: Checkpoint) -> Slot:
    """SDXL's second encoder. Its pooled features stay near the checkpoint's own, which the UNet reads.

    Raises:
        UserError: it cannot be loaded, or does not fit the checkpoint.
    """
    base = Encoder(pipe.text_encoder_2.requires_grad_(False), pipe.tokenizer_2)
    if name is None:
        return Slot(base)
    if name in (ORIGINAL, STRETCH):
        encoder, tokenizer = copy.deepcopy(base.model).float(), base.tokenizer
        if name == STRETCH:
            encoder, tokenizer = stretch_text_encoder(encoder, tokenizer)
    else:
        encoder, tokenizer = EncoderSpec.parse(name).load_text_encoder()
        _check("text_encoder_2", name, encoder, tokenizer, base, checkpoint)
    tokenizer.pad_token = base.tokenizer.pad_token  # the one that the UNet was trained with
    return Slot(base, Encoder(encoder.float().requires_grad_(True), tokenizer), base)


def _load(name: str) -> tuple[Backbone | None, TextEncoder, CLIPTokenizer]:
    """An encoder with its projection if it is known, and the two-tower that it belongs to, if there is one."""
    spec = EncoderSpec.parse(name)
    try:
        backbone = spec.load_two_tower()
    except UserError:
        return None, *spec.load_text_encoder()
    return backbone, *to_transformers(backbone, projection=backbone.pooling == "eot")


def _check(
    slot: str, name: str, encoder: TextEncoder, tokenizer: CLIPTokenizer, base: Encoder, checkpoint: Checkpoint
) -> None:
    """Raises UserError unless the encoder can take the place of the checkpoint's own."""
    checkpoint.check_fits(slot, encoder, name)
    if tokenizer.get_vocab() != base.tokenizer.get_vocab():
        raise UserError(
            f"The encoder {name!r} and the one of {checkpoint.name!r} that it replaces have different tokens, so their "
            "states cannot be compared one by one. Give an encoder that was trained from the checkpoint's."
        )


def recompute_activations(encoder: TextEncoder) -> None:
    """Activations of the encoder's blocks are computed again in the backward pass, instead of kept."""
    renamed = getattr(encoder, "activation_checkpointing_enable", None)  # by transformers, which warns of the old name
    (renamed or encoder.gradient_checkpointing_enable)()
