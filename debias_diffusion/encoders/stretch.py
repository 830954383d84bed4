"""A longer context for a text encoder without training, as Long-CLIP does with SDXL's bigG."""

import copy
from tempfile import TemporaryDirectory

import torch
from torch import nn
from transformers import CLIPTokenizer
from transformers.models.clip.modeling_clip import CLIPTextEmbeddings

from ..clip.positions import FACTOR, KEEP, stretch_positions, stretched_length
from ..errors import UserError
from ..text.chunks import TRAINED_POSITIONS
from .text_encoders import TextEncoder


def stretch_text_encoder(
    text_encoder: TextEncoder, tokenizer: CLIPTokenizer, keep: int = KEEP, factor: int = FACTOR
) -> tuple[TextEncoder, CLIPTokenizer]:
    """A text encoder with a longer context, and a tokenizer for it. Nothing is trained.

    The new encoder shares the memory of all weights but its table of positions (see `stretch_positions`): it takes 1.3
    MB for bigG in float32, not 2.8 GB. `.to()` on one of the two modules does not change the other (and ends the
    sharing); a weight changed in place changes in both. Forward hooks are copied.

        text_encoder_2, tokenizer_2 = stretch_text_encoder(pipe.text_encoder_2, pipe.tokenizer_2)

    It reads all tokens after the first `keep` positions differently, in short prompts too.

    Args:
        text_encoder: a transformers CLIPTextModel or CLIPTextModelWithProjection of at most 77 positions, as published.
        tokenizer: its tokenizer.
        keep: number of first positions to keep.
        factor: positions that every other position becomes.

    Returns:
        (text_encoder, tokenizer): new ones of the same classes, dtype, device and mode, with `keep + (77 - keep) *
        factor` positions, 248 by default.

    Raises:
        UserError: the encoder is of another class, already long, quantised or offloaded.
        ValueError: `keep` or `factor` is out of range.
    """
    _check(text_encoder)
    weights = {id(weight): nn.Parameter(weight.detach(), weight.requires_grad) for weight in text_encoder.parameters()}
    stretched = copy.deepcopy(text_encoder, memo=weights)
    length = stretched_length(text_encoder.config.max_position_embeddings, keep, factor)
    stretched.config.max_position_embeddings = length
    embeddings = next(module for module in stretched.modules() if isinstance(module, CLIPTextEmbeddings))
    table = embeddings.position_embedding.weight
    embeddings.position_embedding = nn.Embedding.from_pretrained(
        stretch_positions(table.detach(), keep, factor), freeze=not table.requires_grad
    )
    ids = torch.arange(length, device=embeddings.position_ids.device).expand(1, -1)
    embeddings.register_buffer("position_ids", ids, persistent=False)
    with TemporaryDirectory() as folder:  # copies by copy.deepcopy decode to "red</w>cat</w>" with transformers 5
        tokenizer.save_pretrained(folder)
        tokenizer = type(tokenizer).from_pretrained(folder, local_files_only=True)
    tokenizer.model_max_length = length
    return stretched, tokenizer


def _check(text_encoder: TextEncoder) -> None:
    kind = type(text_encoder).__name__
    if not isinstance(text_encoder, TextEncoder):
        raise UserError(f"A {kind} cannot be stretched: give a transformers CLIPTextModel, with or without projection.")
    positions = text_encoder.config.max_position_embeddings
    if positions > TRAINED_POSITIONS:
        raise UserError(
            f"This text encoder already has {positions} positions; a CLIP has {TRAINED_POSITIONS}. Use it unchanged."
        )
    weights, modules = list(text_encoder.parameters()), list(text_encoder.modules())
    if (
        getattr(text_encoder, "is_quantized", False)
        or any(type(weight) is not nn.Parameter or weight.element_size() < 2 or weight.is_meta for weight in weights)
        or any(hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook") for module in modules)
    ):
        raise UserError(
            "This text encoder is quantised, offloaded, cast as it runs, or has no weights yet. Stretch it as it is "
            "loaded in full or half precision, before you turn these on."
        )
