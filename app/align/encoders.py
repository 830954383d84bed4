"""The text encoders of a run: those that are fitted, and the frozen ones that they are compared with."""

import copy
from contextlib import suppress

import torch
from diffusers import StableDiffusionXLPipeline
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.encoders.spec import ORIGINAL, EncoderSpec
from debias_diffusion.encoders.stretch import stretch_text_encoder
from debias_diffusion.encoders.text_encoders import TextEncoder, to_transformers
from debias_diffusion.errors import UserError
from debias_diffusion.pipelines.rendering.checkpoints import STRETCH, Checkpoint

from .objective import Encoder, Slot


def make_slots(
    names: tuple[str | None, str | None],
    pipe: StableDiffusionXLPipeline,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    overlap: bool,
) -> tuple[tuple[Slot, Slot], Backbone | None]:
    """SDXL's encoders, and the two-tower that the fitted first one is the text tower of, if it has an image tower.

    A first encoder's pooled features stay where they are, the second's near the checkpoint's own, which the UNet reads.

    Args:
        names: of the settings; None is the checkpoint's own, frozen.
        dtype: of frozen encoders.
        overlap: whether chunks overlap.

    Raises:
        UserError: one cannot be loaded, or does not fit the checkpoint.
    """
    first = Encoder(pipe.text_encoder.requires_grad_(False), pipe.tokenizer)
    second = Encoder(pipe.text_encoder_2.requires_grad_(False), pipe.tokenizer_2)
    fitted, features, backbone = [None, None], [None, second], None
    if names[0] is not None:
        model, tokenizer, backbone = _load(names[0], "text_encoder", first, checkpoint)
        if isinstance(model, CLIPTextModelWithProjection):
            frozen = copy.deepcopy(model).to(first.model.device, dtype).requires_grad_(False)
            features[0] = Encoder(frozen, tokenizer)
        fitted[0] = Encoder(model.float().requires_grad_(True), tokenizer)
    if names[1] is not None:
        model, tokenizer, _ = _load(names[1], "text_encoder_2", second, checkpoint)
        tokenizer.pad_token = second.tokenizer.pad_token  # the one that the UNet was trained with
        fitted[1] = Encoder(model.float().requires_grad_(True), tokenizer)
    columns = zip((first, second), fitted, features, strict=True)
    return tuple(Slot(base, encoder, kept if encoder else None, overlap) for base, encoder, kept in columns), backbone


def _load(
    name: str, slot: str, base: Encoder, checkpoint: Checkpoint
) -> tuple[TextEncoder, CLIPTokenizer, Backbone | None]:
    """An encoder in the place of the checkpoint's, and of a first one the two-tower that it belongs to, if known."""
    if name in (ORIGINAL, *([STRETCH] if slot == "text_encoder_2" else [])):
        encoder = copy.deepcopy(base.model).float(), base.tokenizer
        return *(stretch_text_encoder(*encoder) if name == STRETCH else encoder), None
    spec, backbone = EncoderSpec.parse(name), None
    if slot == "text_encoder":
        with suppress(UserError):  # a text encoder alone
            backbone = spec.load_two_tower()
    if backbone is None:
        model, tokenizer = spec.load_text_encoder()
    else:
        model, tokenizer = to_transformers(backbone, projection=backbone.pooling == "eot")
    checkpoint.check_fits(slot, model, name)
    if tokenizer.get_vocab() != base.tokenizer.get_vocab():
        raise UserError(
            f"The encoder {name!r} and the one of {checkpoint.name!r} that it replaces have different tokens, so their "
            "states cannot be compared one by one. Give an encoder that was trained from the checkpoint's."
        )
    return model, tokenizer, backbone


def recompute_activations(encoder: TextEncoder) -> None:
    """Activations of the encoder's blocks are computed again in the backward pass, instead of kept."""
    renamed = getattr(encoder, "activation_checkpointing_enable", None)  # by transformers, which warns of the old name
    (renamed or encoder.gradient_checkpointing_enable)()
