"""An SDXL of diffusers' and transformers' real classes, with random weights and tiny sizes, as a folder.

For tests, and to try an exported encoder without 7 GB of weights:

    python tests/tiny_sdxl.py OUT --text-encoder EXPORTED_FOLDER

makes one whose UNet has room for that encoder's width. What it draws is noise.
"""

import argparse
import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from debias_diffusion.tokens import clip_tokenizer

WINDOW = 77
WIDTH_2, POOLED_WIDTH = 40, 24


def _config(width: int, window: int, heads: int, **settings) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=49408,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=heads,
        max_position_embeddings=window,
        bos_token_id=49406,
        eos_token_id=49407,
        **settings,
    )


def text_encoder(width: int = 32, window: int = WINDOW, seed: int = 0) -> CLIPTextModel:
    """SDXL's first encoder, with the activation of OpenAI's CLIP-L."""
    torch.manual_seed(seed)
    return CLIPTextModel(_config(width, window, heads=4, hidden_act="quick_gelu", pad_token_id=49407)).eval()


def text_encoder_2(window: int = WINDOW, seed: int = 1) -> CLIPTextModelWithProjection:
    """SDXL's second encoder, which pads with id 0 and has a projection."""
    torch.manual_seed(seed)
    config = _config(WIDTH_2, window, heads=5, hidden_act="gelu", pad_token_id=0, projection_dim=POOLED_WIDTH)
    return CLIPTextModelWithProjection(config).eval()


def stretched(encoder: CLIPTextModel, window: int) -> CLIPTextModel:
    """The same encoder with more positions; those it has are kept."""
    longer = text_encoder(encoder.config.hidden_size, window, seed=2)
    weights = encoder.state_dict()
    name = next(name for name in weights if name.endswith("position_embedding.weight"))
    table = longer.state_dict()[name].clone()
    table[: len(weights[name])] = weights[name]
    longer.load_state_dict({**weights, name: table})
    return longer


def build_tiny_sdxl(folder: str | Path, text_width: int = 32, seed: int = 0) -> Path:
    """Writes the folder: 64x64 pictures from 8x8 latents, two text encoders of 77 positions.

    Args:
        folder: made if it is missing.
        text_width: hidden size of the first text encoder, 32 * n.
        seed: equal seeds make equal weights.

    Returns:
        the folder's path
    """
    encoder, encoder_2 = text_encoder(text_width, seed=seed), text_encoder_2(seed=seed + 1)
    torch.manual_seed(seed)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        cross_attention_dim=text_width + WIDTH_2,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + POOLED_WIDTH,
    )
    vae = AutoencoderKL(
        sample_size=64,
        block_out_channels=(8, 8, 16, 16),
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        scaling_factor=0.13025,
        force_upcast=False,
    )
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", timestep_spacing="leading", steps_offset=1
    )
    pipe = StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=encoder,
        text_encoder_2=encoder_2,
        tokenizer=clip_tokenizer(WINDOW),
        tokenizer_2=clip_tokenizer(WINDOW, pad_token="!"),
        unet=unet,
        scheduler=scheduler,
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )
    pipe.save_pretrained(folder)
    return Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny SDXL with random weights.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--text-encoder", type=Path, help="exported encoder folder whose width the UNet is to fit")
    arguments = parser.parse_args()
    width = 32
    if arguments.text_encoder is not None:
        configs = [arguments.text_encoder / part / "config.json" for part in ("text_encoder", "")]
        width = json.loads(next(path for path in configs if path.is_file()).read_text())["hidden_size"]
    print(build_tiny_sdxl(arguments.out, text_width=width))


if __name__ == "__main__":
    main()
