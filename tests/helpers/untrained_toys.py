"""The toy world's models before any training, with the vocabulary of those that come with the package."""

from pathlib import Path

import torch
from diffusers import StableDiffusionXLPipeline
from transformers import CLIPTokenizer, ViTConfig, ViTModel

from debias_diffusion.app.quickstart import Setup
from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.encoders.text_encoders import to_transformers
from debias_diffusion.toyworld.shipped import WEIGHTS
from research.toymodels import sdxl
from research.toymodels.clip import new_clip
from research.toymodels.second_text_encoder import new_second_text_encoder
from research.toymodels.vae import SIZE, new_vae


def untrained_models() -> tuple[Backbone, StableDiffusionXLPipeline]:
    """(CLIP, SDXL with that CLIP's text encoder)"""
    clip = new_clip(CLIPTokenizer.from_pretrained(WEIGHTS / "clip" / "tokenizer"))
    text_encoder, tokenizer = to_transformers(clip)
    return clip, sdxl.assemble(text_encoder, new_second_text_encoder(tokenizer), tokenizer, new_vae())


def save_untrained_toys(folder: Path) -> Setup:
    """The same in folders, and a network of features."""
    clip, pipe = untrained_models()
    clip.save(folder / "clip")
    sdxl.save(pipe, folder / "sdxl")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    network = ViTModel(ViTConfig(image_size=SIZE, patch_size=8, **sizes), add_pooling_layer=False)
    network.save_pretrained(folder / "features")
    models = [str(folder / name) for name in ("clip", "sdxl", "features")]
    return Setup(*models, pairs=16, training={"steps": 1, "batch": 8}, denoising_steps=1)
