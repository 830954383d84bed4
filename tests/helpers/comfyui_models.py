"""Random models of the sizes that ComfyUI's loaders know, for its server: `python tests/comfyui_models.py MODELS`.

Run it with a checkout of ComfyUI on PYTHONPATH. Its loaders take no other sizes of text encoders and VAE. The UNet has
the blocks of Segmind-Vega, the smallest relative of SDXL that is detected as such, all as narrow as the first.
"""

import sys
from pathlib import Path

import torch
from comfy.cli_args import args
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from debias_diffusion.encoders.text_encoders import prefixed_state

args.cpu = True  # before the imports that look for a GPU


def random_like(state, prefix=""):
    """Weights that keep values finite: each matrix divides by its inputs, norms do nothing."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, tensor in state.items():
        if tensor.ndim < 2:
            weight = torch.full(tensor.shape, float(name.endswith("weight")))
        else:
            scale = 0.5 if "embedding.weight" in name else tensor[0].numel() ** -0.5
            weight = scale * torch.randn(tensor.shape, generator=generator)
        weights[f"{prefix}{name}"] = weight.half()
    return weights


def text_encoder(cls, width, blocks, positions, **settings):
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": blocks}
    heads = {"num_attention_heads": width // 64, "max_position_embeddings": positions}
    return prefixed_state(cls(CLIPTextConfig(**sizes, **heads, vocab_size=49408, **settings)))


def write_models(folder):
    from comfy import ops
    from comfy.ldm.models.autoencoder import AutoencoderKL
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    folder = Path(folder)
    vae = {"z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4]}
    vae |= {"double_z": True, "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    with torch.device("meta"):
        first, longer = (text_encoder(CLIPTextModel, 768, 12, positions) for positions in (77, 248))
        second = text_encoder(CLIPTextModelWithProjection, 1280, 32, 77, projection_dim=1280)
        unet = UNetModel(
            image_size=32, in_channels=4, out_channels=4, model_channels=320, channel_mult=[1, 1, 1],
            num_res_blocks=[2, 2, 2], transformer_depth=[0, 0, 1, 1, 2, 2], transformer_depth_middle=-1,
            transformer_depth_output=[0, 0, 0, 1, 1, 1, 2, 2, 2], context_dim=2048, num_head_channels=64,
            use_spatial_transformer=True, use_linear_in_transformer=True, num_classes="sequential",
            adm_in_channels=2816, operations=ops.disable_weight_init,
        ).state_dict()  # fmt: skip
        vae = AutoencoderKL(ddconfig=vae, embed_dim=4).state_dict()
    checkpoint = random_like(unet, "model.diffusion_model.") | random_like(vae, "first_stage_model.")
    files = {"checkpoints/sd_xl_base_1.0": checkpoint, "text_encoders/debias_clip_l": random_like(longer)}
    files |= {"text_encoders/clip_l": random_like(first), "text_encoders/clip_g": random_like(second)}
    files["embeddings/style"] = {"clip_l": torch.randn(3, 768), "clip_g": torch.randn(3, 1280)}
    for name, weights in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / f"{name}.safetensors")


if __name__ == "__main__":
    write_models(sys.argv[1])
