"""A two-tower CLIP of open_clip's real classes at tiny sizes, with CLIP's own vocabulary, as a folder or in memory."""

from copy import deepcopy
from pathlib import Path

import open_clip
import torch
from open_clip.tokenizer import bytes_to_unicode
from transformers import CLIPTokenizer

from debias_diffusion.backbones import Backbone
from debias_diffusion.tokens import CaptionTokenizer, clip_tokenizer

CONFIG = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 3},
}


def tiny_clip(
    seed: int = 0, quick_gelu: bool = False, context_length: int = 77, tokenizer: CLIPTokenizer | None = None
) -> Backbone:
    """A backbone with random weights, of everyday size: open_clip's own initialisation is too small to tell errors."""
    config = deepcopy(CONFIG) | ({"quick_gelu": True} if quick_gelu else {})
    tokenizer = tokenizer or clip_tokenizer(context_length)
    config["text_cfg"] |= {"context_length": context_length, "vocab_size": len(tokenizer)}
    torch.manual_seed(seed)
    model = open_clip.CLIP(**deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 0:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return Backbone(
        model,
        CaptionTokenizer(tokenizer, context_length),
        {"model_cfg": config, "preprocess_cfg": {}},
        random_weights=True,
    )


def byte_tokenizer(context_length: int) -> CLIPTokenizer:
    """A CLIPTokenizer without merges: 512 symbols, then SOT (512) and EOT (513)."""
    symbols = list(bytes_to_unicode().values())
    words = [*symbols, *(f"{symbol}</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=context_length)


def save_tiny_clip(folder: Path, **settings) -> str:
    """The same as an open_clip folder, without traces of training: a base model."""
    tiny_clip(**settings).save(folder)
    return str(folder)
