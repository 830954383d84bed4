"""A FLUX and an SD3 of diffusers' and transformers' real classes, with random weights and tiny sizes, as folders."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from helpers import tiny_sdxl
from helpers.vocabulary import tiny_tokenizer
from transformers import CLIPTextModelWithProjection, T5Config, T5EncoderModel, T5TokenizerFast

CLIP_WIDTH, T5_WIDTH = 32, 80
SD3_POOLED = (24, tiny_sdxl.POOLED_WIDTH)


def t5(seed: int = 4) -> tuple[T5EncoderModel, T5TokenizerFast]:
    letters = [chr(code) for code in range(33, 127)]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0), *((letter, -3.0) for letter in letters)]
    tokenizer = T5TokenizerFast(vocab=pieces, extra_ids=0)
    torch.manual_seed(seed)
    sizes = {"d_model": T5_WIDTH, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=len(tokenizer), **sizes, feed_forward_proj="gated-gelu")
    return T5EncoderModel(config).eval(), tokenizer


def _projected_encoder() -> CLIPTextModelWithProjection:
    """SD3's first encoder: CLIP-L with its projection."""
    config = tiny_sdxl.text_encoder(CLIP_WIDTH).config
    config.projection_dim = SD3_POOLED[0]
    torch.manual_seed(0)
    return CLIPTextModelWithProjection(config).eval()


def _vae() -> AutoencoderKL:
    torch.manual_seed(5)
    sizes = {"sample_size": 32, "block_out_channels": (8, 8), "norm_num_groups": 4, "latent_channels": 4}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    plain = {"use_quant_conv": False, "use_post_quant_conv": False}
    return AutoencoderKL(**sizes, **blocks, **plain, scaling_factor=1.5, shift_factor=0.06)


def build_tiny_flux(folder: str | Path) -> Path:
    """Writes a FLUX: 32x32 pictures, a CLIP-L of 77 positions whose pooled output it reads, and a T5."""
    encoder_2, tokenizer_2 = t5()
    torch.manual_seed(6)
    blocks = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    widths = {"joint_attention_dim": T5_WIDTH, "pooled_projection_dim": CLIP_WIDTH, "axes_dims_rope": (4, 4, 8)}
    transformer = FluxTransformer2DModel(in_channels=16, **blocks, **widths)
    FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(),
        text_encoder=tiny_sdxl.text_encoder(CLIP_WIDTH),
        tokenizer=tiny_tokenizer(tiny_sdxl.POSITIONS),
        text_encoder_2=encoder_2,
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    ).save_pretrained(folder)
    return Path(folder)


def build_tiny_sd3(folder: str | Path) -> Path:
    """Writes an SD3: 32x32 pictures, two CLIPs of 77 positions with projections, and a T5."""
    encoder_3, tokenizer_3 = t5()
    torch.manual_seed(7)
    sizes = {"sample_size": 16, "patch_size": 2, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 16}
    blocks = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "caption_projection_dim": 32}
    widths = {"joint_attention_dim": T5_WIDTH, "pooled_projection_dim": sum(SD3_POOLED)}
    transformer = SD3Transformer2DModel(**sizes, **blocks, **widths)
    StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(),
        text_encoder=_projected_encoder(),
        tokenizer=tiny_tokenizer(tiny_sdxl.POSITIONS),
        text_encoder_2=tiny_sdxl.text_encoder_2(),
        tokenizer_2=tiny_tokenizer(tiny_sdxl.POSITIONS, pad_token="!"),
        text_encoder_3=encoder_3,
        tokenizer_3=tokenizer_3,
    ).save_pretrained(folder)
    return Path(folder)
