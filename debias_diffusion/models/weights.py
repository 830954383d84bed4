"""Files of weights for open_clip's two-towers: find them, check them first, and load them."""

from pathlib import Path

import open_clip
import torch
from open_clip.factory import _find_checkpoint_in_dir
from open_clip.pretrained import download_pretrained_from_hf
from torch import nn

from ..errors import UserError
from .positions import FACTOR, KEEP, stretched_length
from .text_tower import set_positions
from .weight_files import (
    POSITIONS,
    TEXT,
    fold_long_clip,
    has_text_prefix,
    is_long_clip,
    plain_text_names,
    read_state,
    table_names,
)


def find_weights(model: str, source: str | None, pretrained: str | None) -> Path | None:
    """The file of a model's weights; None for random weights.

    Args:
        model: as for `load_backbone`.
        source: "hf-hub:..." or "local-dir:...", which holds its weights; None for a plain name.
        pretrained: with a plain name, a file, or a tag whose file open_clip downloads unless it is cached.
    """
    if source is None:
        if pretrained is None or Path(pretrained).is_file():
            return pretrained and Path(pretrained)
        return Path(open_clip.download_pretrained(open_clip.get_pretrained_cfg(model, pretrained)))
    kind, _, place = source.partition(":")
    file = download_pretrained_from_hf(place) if kind == "hf-hub" else _find_checkpoint_in_dir(Path(place))
    if file is None:
        raise UserError(f"The folder {place!r} holds no weights (open_clip_model.safetensors, for example).")
    return Path(file)


def read_weights(file: Path) -> dict[str, torch.Tensor] | None:
    """`read_state`; None for big_vision's npz, which only open_clip reads, and refuses where a shape differs."""
    return None if file.suffix in (".npz", ".npy") else read_state(file)


def count_numbers(file: Path, state: dict[str, torch.Tensor] | None) -> int:
    """The numbers that a file of weights holds, at most."""
    if state is None:
        return file.stat().st_size
    return sum(tensor.numel() for tensor in state.values() if isinstance(tensor, torch.Tensor))


def load_weights(
    clip: nn.Module, file: Path, state: dict[str, torch.Tensor] | None, model: str, quick_gelu: bool
) -> dict[str, int] | None:
    """Loads weights into open_clip's module, and never interpolates text positions, as open_clip does silently.

    Args:
        clip: an `open_clip.CLIP` or `CustomTextCLIP`.
        file: weights that open_clip reads (safetensors, torch, big_vision's npz), or a Long-CLIP checkpoint.
        state: its content, from `read_weights`.
        model: its name in errors.
        quick_gelu: whether `clip` has OpenAI's activation, which is not in the file.

    Returns:
        {"keep", "factor"} that a Long-CLIP checkpoint's positions were stretched with; else None.

    Raises:
        UserError: the file has another context length, or is Long-CLIP's and of another model. Errors of the libraries
            for broken or hostile files and other sizes pass through.
    """
    if state is None:
        open_clip.load_checkpoint(clip, str(file))
        return None
    if is_long_clip(state):
        return _load_long_clip(clip, state, file, model, quick_gelu)
    table = state.get(POSITIONS, state.get(TEXT + POSITIONS))
    positions = len(getattr(clip, "text", clip).positional_embedding)
    if table is not None and len(table) != positions:
        raise UserError(
            f"{str(file)!r} holds {len(table)} text positions, {model!r} has {positions}; they are not interpolated. "
            f"Give weights of {positions} positions, or, for a stretched model, the folder of its training run, whose "
            "open_clip_config.json has the context length."
        )
    if has_text_prefix(state) and not hasattr(clip, "text"):
        clip.load_state_dict(plain_text_names(state))
    else:
        open_clip.load_checkpoint(clip, str(file), weights_only=True)
    return None


def _load_long_clip(
    clip: nn.Module, state: dict[str, torch.Tensor], file: Path, model: str, quick_gelu: bool
) -> dict[str, int]:
    """Loads weights with Long-CLIP's two tables into a two-tower, which gets their context length.

    Without the prefix `text.` they are from Long-CLIP's code, which trains OpenAI's CLIPs alone. With it (open_clip's
    CustomTextCLIP, as in the released weights of DeBias-CLIP) the base model can be any.
    """
    if not quick_gelu and not has_text_prefix(state):
        name = f"{model}-quickgelu"
        name = name if name in open_clip.list_models() else "ViT-B-16-quickgelu or ViT-L-14-quickgelu"
        raise UserError(
            f"{str(file)!r} is a Long-CLIP checkpoint, trained from OpenAI's weights with QuickGELU, which {model!r} "
            f"lacks. Use --model {name}."
        )
    positions, width = getattr(clip, "text", clip).positional_embedding.shape
    expected = [stretched_length(positions), width]
    shapes = {name: list(state[name].shape) for name in table_names(state) if name in state}
    if list(shapes.values()) != [expected, expected]:
        raise UserError(
            f"{str(file)!r} is a Long-CLIP checkpoint with tables of positions {shapes}; for {model!r} both must be "
            f"{expected}. longclip-B.pt belongs to ViT-B-16-quickgelu, longclip-L.pt to ViT-L-14-quickgelu."
        )
    set_positions(clip, torch.empty(expected))
    folded = fold_long_clip(state)
    clip.load_state_dict(folded if hasattr(clip, "text") else plain_text_names(folded))
    return {"keep": KEEP, "factor": FACTOR}
