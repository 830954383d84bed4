"""An SDXL of diffusers' and transformers' real classes, with random weights and tiny sizes, as a folder or as parts.

For tests, and to try an exported encoder without 7 GB of weights:

    python tests/tiny_sdxl.py OUT --text-encoder EXPORTED_FOLDER

makes one whose UNet has room for that encoder's width. What it draws is noise. For tests there are also the parts of a
Stable Diffusion 1.5, a ControlNet, an IP-Adapter and its image encoder.
"""

import argparse
import copy
import json
from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DDIMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from PIL import Image
from torch import nn
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

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


def unet(text_width: int = 32, seed: int = 0, **settings) -> UNet2DConditionModel:
    """SDXL's UNet on latents of 8x8; `settings` are those of diffusers' class."""
    torch.manual_seed(seed)
    sdxl = {
        "sample_size": 8,
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": 1,
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "cross_attention_dim": text_width + WIDTH_2,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + POOLED_WIDTH,
    }
    return UNet2DConditionModel(**{**sdxl, **settings}).eval()


def vae(seed: int = 0) -> AutoencoderKL:
    """Pictures of 64x64 from latents of 8x8."""
    torch.manual_seed(seed)
    return AutoencoderKL(
        sample_size=64,
        block_out_channels=(8, 8, 16, 16),
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        scaling_factor=0.13025,
        force_upcast=False,
    ).eval()


def sdxl_parts(text_width: int = 32, seed: int = 0) -> dict:
    """What the SDXL pipelines of diffusers are made of, by the names of their arguments."""
    return {
        "vae": vae(seed),
        "text_encoder": text_encoder(text_width, seed=seed),
        "text_encoder_2": text_encoder_2(seed=seed + 1),
        "tokenizer": clip_tokenizer(WINDOW),
        "tokenizer_2": clip_tokenizer(WINDOW, pad_token="!"),
        "unet": unet(text_width, seed),
        "scheduler": EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
            steps_offset=1,
        ),
    }


def sd15_parts(seed: int = 0) -> dict:
    """What the Stable Diffusion 1.5 pipelines of diffusers are made of; pads are EOT, as there."""
    encoder = text_encoder(seed=seed)
    plain = {"addition_embed_type": None, "projection_class_embeddings_input_dim": None, "use_linear_projection": False}
    return {
        "vae": vae(seed),
        "text_encoder": encoder,
        "tokenizer": clip_tokenizer(WINDOW),
        "unet": unet(seed=seed, cross_attention_dim=encoder.config.hidden_size, **plain),
        "scheduler": DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        ),
        "safety_checker": None,
        "feature_extractor": None,
    }


def controlnet(unet: UNet2DConditionModel, seed: int = 0) -> ControlNetModel:
    """A ControlNet for this UNet. One that was never trained does nothing; this one's outlets have random weights."""
    torch.manual_seed(seed)
    control = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 4, 8, 8)).eval()
    for weights in control.controlnet_cond_embedding.parameters():
        if weights.ndim > 1:
            nn.init.kaiming_normal_(weights)  # or nothing of the picture is left behind so many small layers
    outlets = (control.controlnet_down_blocks, control.controlnet_mid_block)
    for weights in (weights for outlet in outlets for weights in outlet.parameters()):
        nn.init.normal_(weights, std=0.3)
    return control


def ip_adapter(unet: UNet2DConditionModel, width: int = 24, face: bool = False, seed: int = 0) -> dict:
    """An IP-Adapter's weights for this UNet, in the layout of its published files.

    Args:
        width: of the image embeddings that it reads.
        face: the kind that reads embeddings of a face recogniser.
    """
    random = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) / shape[-1] ** 0.5

    text_width = unet.config.cross_attention_dim
    layers = [name.removesuffix(".processor") for name in unet.attn_processors]
    cross = [unet.get_submodule(name).to_k.weight.shape for name in layers if name.endswith("attn2")]
    attention = {
        # odd numbers: the even ones are the self-attentions, which it leaves alone
        f"{2 * i + 1}.to_{kind}_ip.weight": weights(*shape)
        for i, shape in enumerate(cross)
        for kind in ("k", "v")
    }
    tokens = 4
    projection = {"norm.weight": torch.ones(text_width), "norm.bias": torch.zeros(text_width)}
    if face:
        projection |= {"proj.0.weight": weights(2 * width, width), "proj.0.bias": weights(2 * width)}
        projection |= {
            "proj.2.weight": weights(tokens * text_width, 2 * width),
            "proj.2.bias": weights(tokens * text_width),
        }
    else:
        projection |= {"proj.weight": weights(tokens * text_width, width), "proj.bias": weights(tokens * text_width)}
    return {"image_proj": projection, "ip_adapter": attention}


def image_encoder(width: int = 24, seed: int = 0) -> CLIPVisionModelWithProjection:
    """What turns a picture into the embeddings that an IP-Adapter reads."""
    torch.manual_seed(seed)
    config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    return CLIPVisionModelWithProjection(config).eval()


def feature_extractor() -> CLIPImageProcessor:
    return CLIPImageProcessor(crop_size=32, size={"shortest_edge": 32})


def picture(seed: int = 0, side: int = 64) -> Image.Image:
    """Smooth noise in colour."""
    small = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)


def mask(side: int = 64) -> Image.Image:
    """White, to be drawn anew, in the right half."""
    values = np.zeros((side, side), dtype=np.uint8)
    values[:, side // 2 :] = 255
    return Image.fromarray(values)


def assemble(cls: type[DiffusionPipeline], parts: dict, **replaced) -> DiffusionPipeline:
    """A pipeline that shares its models with `parts`."""
    pipe = cls(**{**parts, **replaced})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def assemble_copy(cls: type[DiffusionPipeline], parts: dict, **replaced) -> DiffusionPipeline:
    """A pipeline with copies of the models, which a test may change."""
    copies = {name: copy.deepcopy(part) if isinstance(part, nn.Module) else part for name, part in parts.items()}
    return assemble(cls, copies, **replaced)


def build_tiny_sdxl(folder: str | Path, text_width: int = 32, seed: int = 0) -> Path:
    """Writes the folder: 64x64 pictures from 8x8 latents, two text encoders of 77 positions.

    Args:
        folder: made if it is missing.
        text_width: hidden size of the first text encoder, 32 * n.
        seed: equal seeds make equal weights.

    Returns:
        the folder's path
    """
    parts = sdxl_parts(text_width, seed)
    StableDiffusionXLPipeline(**parts, force_zeros_for_empty_prompt=True, add_watermarker=False).save_pretrained(folder)
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
