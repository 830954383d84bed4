"""A longer window for a text encoder that nobody has trained at that length: Long-CLIP's way with SDXL's bigG."""

import copy
from tempfile import TemporaryDirectory

import torch
from torch import nn
from transformers import CLIPTokenizer

from ..errors import UserError
from ..models.positions import FACTOR, KEEP, stretch_positions, stretched_length
from .text_encoders import TextEncoder

_CLIP_POSITIONS = 77  # of every CLIP as its makers published it
_TABLE = "embeddings.position_embedding.weight"  # the end of its name, with or without a prefix
_IDS = "embeddings.position_ids"


def stretch_text_encoder(
    text_encoder: TextEncoder, tokenizer: CLIPTokenizer, keep: int = KEEP, factor: int = FACTOR
) -> tuple[TextEncoder, CLIPTokenizer]:
    """A text encoder with a longer window, and a tokenizer that knows it. Nothing is trained.

    The new encoder shares the memory of all weights but its table of positions (see `stretch_positions`), so it costs
    next to none: 1.3 MB for bigG in float32, instead of 2.8 GB. The two are otherwise modules of their own: `.to()` on
    either leaves the other as it was (and ends the sharing), while a change of a weight in place is a change of both.
    Forward hooks are not taken over.

        text_encoder_2, tokenizer_2 = stretch_text_encoder(pipe.text_encoder_2, pipe.tokenizer_2)

    What stands beyond the first `keep` positions is read differently from then on, also in short prompts.

    Args:
        text_encoder: a transformers CLIPTextModel or CLIPTextModelWithProjection of at most 77 positions, as published.
        tokenizer: its tokenizer.
        keep: how many positions stay as they are.
        factor: how many positions each of the others becomes.

    Returns:
        (text_encoder, tokenizer): of the same classes, dtype, device and mode, with `keep + (77 - keep) * factor`
        positions, 248 by default. The ones given are as they were.

    Raises:
        UserError: the encoder is something else, is long already, is quantised, or was given layers or hooks by
            something that runs it (LoRA, offloading).
        ValueError: `keep` or `factor` is out of range.
    """
    _check(text_encoder)
    length = stretched_length(text_encoder.config.max_position_embeddings, keep, factor)
    config = copy.deepcopy(text_encoder.config)
    config.max_position_embeddings = length
    with torch.device("meta"):  # no memory for weights that are replaced at once
        stretched = type(text_encoder)(config)
    _check_layers(text_encoder, stretched)
    for name, weight in text_encoder.named_parameters():
        tensor = stretch_positions(weight.detach(), keep, factor) if name.endswith(_TABLE) else weight.detach()
        _set(stretched, name, nn.Parameter(tensor, requires_grad=weight.requires_grad))
    for name, buffer in text_encoder.named_buffers():
        if name.endswith(_IDS):
            buffer = torch.arange(length, device=buffer.device).expand(1, -1)
        _set(stretched, name, buffer)
    tokenizer = _copy(tokenizer)
    tokenizer.model_max_length = length
    return stretched.train(text_encoder.training), tokenizer


def _copy(tokenizer: CLIPTokenizer) -> CLIPTokenizer:
    # Not copy.deepcopy, whose copies decode to "red</w>cat</w>" with transformers 5.
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return type(tokenizer).from_pretrained(folder, local_files_only=True)


def _set(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    module, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module), attribute, tensor)


def _check(text_encoder: TextEncoder) -> None:
    kind = type(text_encoder).__name__
    if not isinstance(text_encoder, TextEncoder):
        raise UserError(f"A {kind} cannot be stretched: give a transformers CLIPTextModel, with or without projection.")
    positions = text_encoder.config.max_position_embeddings
    if positions > _CLIP_POSITIONS:
        raise UserError(
            f"This text encoder has {positions} positions already, where a CLIP has {_CLIP_POSITIONS}. Use it as it is."
        )
    if getattr(text_encoder, "is_quantized", False) or any(
        type(weight) is not nn.Parameter or weight.element_size() < 2 for weight in text_encoder.parameters()
    ):
        raise UserError("This text encoder is quantised. Stretch the original, save it, and load that quantised.")
    if any(hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook") for module in text_encoder.modules()):
        raise UserError("This text encoder is being offloaded or cast as it runs. Stretch it before you turn that on.")
    if any(weight.is_meta for weight in text_encoder.parameters()):
        raise UserError("This text encoder has no weights (they are on the meta device). Load them first.")


def _check_layers(text_encoder: TextEncoder, fresh: TextEncoder) -> None:
    """Nothing of the encoder would be left behind in an untouched one."""
    theirs, ours = ({name: type(module) for name, module in m.named_modules()} for m in (text_encoder, fresh))
    if theirs == ours and text_encoder.state_dict().keys() == fresh.state_dict().keys():
        return
    odd = next((name for name in theirs if theirs[name] is not ours.get(name)), "its weights")
    raise UserError(
        f"This text encoder has layers that a {type(fresh).__name__} has not ({odd}: "
        f"{getattr(theirs.get(odd), '__name__', 'others')}), such as LoRA's. Stretch it before they are added."
    )
