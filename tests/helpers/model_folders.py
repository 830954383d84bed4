"""Every kind of folder and file with a model: how one is written, where its weights lie, and what loads it."""

import shutil
from functools import partial
from pathlib import Path

import torch
from helpers.tiny_clip import byte_tokenizer, tiny_clip, tiny_siglip
from helpers.tiny_sdxl import build_tiny_sdxl
from transformers import ViTConfig, ViTModel

from debias_diffusion.encoders.clip_model import export_clip_model
from debias_diffusion.encoders.single_file import write_file
from debias_diffusion.encoders.spec import load_text_encoder, load_two_tower
from debias_diffusion.encoders.text_encoders import export_text_encoder, to_transformers
from debias_diffusion.eval.images.networks import ClsFeatures
from debias_diffusion.pipelines.rendering.loading import load_pipeline
from debias_diffusion.text.tokens import clip_tokenizer
from debias_diffusion.toyworld.shipped import shipped

CPU = torch.device("cpu")
load_sdxl = partial(load_pipeline, encoder=None, device=CPU)


def small_clip():
    return tiny_clip(tokenizer=byte_tokenizer(77))


def save_vit(folder: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    ViTModel(ViTConfig(image_size=32, patch_size=8, **sizes)).save_pretrained(folder)


def save_file_alone(folder: Path) -> None:
    folder.mkdir()
    write_file(to_transformers(tiny_clip(tokenizer=clip_tokenizer(77)))[0], folder / "weights.safetensors")


def copy_difference(folder: Path) -> None:
    folder.mkdir()
    shutil.copy(Path(shipped("toy/debias-clip"), "difference.safetensors"), folder)


# A file of weights, its configuration, and what loads them.
MODEL = ("model.safetensors", "config.json")
OPEN_CLIP = ("open_clip_model.safetensors", "open_clip_config.json", load_two_tower)
TEXT = ("text_encoder/model.safetensors", "text_encoder/config.json", load_text_encoder)
# What is saved -> how, and these.
KINDS = {
    "open_clip": (lambda folder: small_clip().save(folder), *OPEN_CLIP),
    "siglip": (lambda folder: tiny_siglip().save(folder), *OPEN_CLIP),
    "text encoder": (lambda folder: export_text_encoder(small_clip(), folder), *TEXT),
    "clip": (lambda folder: export_clip_model(small_clip(), folder), *MODEL, load_two_tower),
    "vit": (save_vit, *MODEL, lambda folder: ClsFeatures(folder, CPU)),
    "sdxl": (build_tiny_sdxl, "unet/diffusion_pytorch_model.safetensors", "unet/config.json", load_sdxl),
    "sdxl vae": (build_tiny_sdxl, "vae/diffusion_pytorch_model.safetensors", "vae/config.json", load_sdxl),
    "sdxl text": (build_tiny_sdxl, "text_encoder_2/model.safetensors", "text_encoder_2/config.json", load_sdxl),
    "file": (save_file_alone, "weights.safetensors", None, lambda folder: load_text_encoder(next(folder.iterdir()))),
    "difference": (copy_difference, "difference.safetensors", None, load_two_tower),
}
