"""Two-towers of open_clip's real classes at tiny sizes, CLIP's and SigLIP's, as a folder or in memory."""

import contextlib
import json
import string
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import open_clip
import torch
from helpers.vocabulary import tiny_tokenizer
from open_clip import factory
from open_clip.tokenizer import bytes_to_unicode
from torch import nn
from transformers import CLIPTokenizer, GemmaTokenizer, PreTrainedTokenizerBase, T5Tokenizer

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.clip.families import find_family
from debias_diffusion.text.tokens import CaptionTokenizer, make_clip_tokenizer

CONFIG = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 3},
}
# As open_clip's SigLIP configurations stand, with timm's smallest vision transformer.
SIGLIP_CONFIG = {
    "embed_dim": 64,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {"image_size": 160, "timm_model_name": "test_vit", "timm_pool": "map", "timm_proj": "none"},
    "text_cfg": {
        "context_length": 64,
        "hf_tokenizer_name": "tests/no-such-repository",
        "tokenizer_kwargs": {"clean": "canonicalize"},
        "width": 32,
        "heads": 4,
        "layers": 2,
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
    },
}


def tiny_clip(
    seed: int = 0,
    quick_gelu: bool = False,
    context_length: int = 77,
    tokenizer: CLIPTokenizer | None = None,
    layers: int | None = None,
    embed_dim: int = CONFIG["embed_dim"],
) -> Backbone:
    """A backbone with random weights, of everyday size: open_clip's own initialisation is too small to tell errors.

    `layers`: of both towers, instead of two and three.
    """
    config = deepcopy(CONFIG) | {"embed_dim": embed_dim} | ({"quick_gelu": True} if quick_gelu else {})
    for tower in ("vision_cfg", "text_cfg"):
        config[tower] |= {"layers": layers} if layers else {}
    tokenizer = tokenizer or tiny_tokenizer(context_length)
    config["text_cfg"] |= {"context_length": context_length, "vocab_size": len(tokenizer)}
    torch.manual_seed(seed)
    model = everyday(open_clip.CLIP(**deepcopy(config)))
    return Backbone(
        model,
        CaptionTokenizer(tokenizer, context_length),
        {"model_cfg": config, "preprocess_cfg": {}},
        random_weights=True,
    )


def everyday(model: nn.Module) -> nn.Module:
    """The model with noise of everyday size on all its weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 0:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tiny_siglip(version: int = 1, seed: int = 0) -> Backbone:
    config, tokenizer = deepcopy(SIGLIP_CONFIG), siglip_tokenizer(version)
    config["text_cfg"] |= {"vocab_size": len(tokenizer)} | (
        {"act_kwargs": {"approximate": "tanh"}} if version == 2 else {}
    )
    torch.manual_seed(seed)
    settings = {name: value for name, value in deepcopy(config).items() if name != "custom_text"}
    model = everyday(open_clip.CustomTextCLIP(**settings))
    open_clip.set_model_preprocess_cfg(model, {"size": 160, "mean": (0.5,) * 3, "std": (0.5,) * 3})
    captions = find_family("tiny", config).caption_tokenizer(tokenizer, config["text_cfg"])
    return Backbone(
        model, captions, {"model_cfg": config, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}, True
    )


def siglip_tokenizer(version: int) -> PreTrainedTokenizerBase:
    """SigLIP's kind of tokenizer with few words: a T5 that pads with its EOS (1), or a Gemma (PAD 0, EOS 1)."""
    letters = list(string.ascii_lowercase + string.digits)
    if version == 1:
        pieces = ["<pad>", "</s>", "<unk>", "▁", *letters, "▁a", "▁the", "▁cat", "ing"]
        scores = [(piece, -float(index > 2) - index / 100) for index, piece in enumerate(pieces)]
        return T5Tokenizer(vocab=scores, extra_ids=0, pad_token="</s>")
    merges = [("c", "a"), ("ca", "t"), ("t", "h"), ("th", "e"), ("the", "▁")]
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    words += ["".join(merge) for merge in merges]
    vocabulary = {word: index for index, word in enumerate(words)}
    around = {"add_bos_token": False, "add_eos_token": True, "padding_side": "right"}
    return GemmaTokenizer(vocab=vocabulary, merges=merges, **around)


@contextlib.contextmanager
def registered(folder: Path, **configs: dict) -> Iterator[None]:
    """open_clip knows models of these names while the context lasts."""
    before = dict(factory._MODEL_CONFIGS), list(factory._MODEL_CONFIG_PATHS)
    folder.mkdir()
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    try:
        yield
    finally:
        factory._MODEL_CONFIGS, factory._MODEL_CONFIG_PATHS = before


def byte_tokenizer(context_length: int) -> CLIPTokenizer:
    """A CLIPTokenizer without merges: 512 symbols, then SOT (512) and EOT (513)."""
    symbols = list(bytes_to_unicode().values())
    words = [*symbols, *(f"{symbol}</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    return make_clip_tokenizer({word: i for i, word in enumerate(words)}, [], model_max_length=context_length)


def without_weights(model, config):
    """A Backbone around `model`, with a tiny tokenizer of the kind the family has."""
    family, text_cfg = find_family("this", config), config["text_cfg"]
    tokenizer = byte_tokenizer(77) if family.causal else siglip_tokenizer(2 if "act_kwargs" in text_cfg else 1)
    return Backbone(model, family.caption_tokenizer(tokenizer, text_cfg), {"model_cfg": config}, random_weights=True)


def save_tiny_clip(folder: Path, **settings) -> str:
    """The same as an open_clip folder, without traces of training: a base model."""
    tiny_clip(**settings).save(folder)
    return str(folder)


# What decides a model's results besides its weights.
CORRECTIONS = ("quick_gelu", "preprocess_cfg", "tokenizer")


def correct(folder: Path, part: str) -> None:
    """Changes one of CORRECTIONS in an open_clip folder: its weights stay as they are."""
    if part == "tokenizer":
        file = folder / "tokenizer" / "tokenizer.json"
        content = json.loads(file.read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary["a</w>"], vocabulary["b</w>"] = vocabulary["b</w>"], vocabulary["a</w>"]
    else:
        file = folder / "open_clip_config.json"
        content = json.loads(file.read_text())
        if part == "quick_gelu":
            content["model_cfg"]["quick_gelu"] = True
        else:
            content["preprocess_cfg"] = content["preprocess_cfg"] | {"mean": [0.1] * 3}
    file.write_text(json.dumps(content))
