"""Tiny models in the original single-file layout, as shared checkpoints are."""

import re

import torch
from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING

LDM = DIFFUSERS_TO_LDM_MAPPING
# Names of diffusers -> names of the original layout, for the blocks of the tiny models.
RESNET = {"norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1"}
RESNET |= {"norm2": "out_layers.0", "conv2": "out_layers.3", "conv_shortcut": "skip_connection"}
UNET = {"down_blocks.0.resnets.0": "input_blocks.1.0", "down_blocks.0.downsamplers.0.conv": "input_blocks.2.0.op"}
UNET |= {"down_blocks.1.resnets.0": "input_blocks.3.0", "down_blocks.1.attentions.0": "input_blocks.3.1"}
UNET |= {"mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1"}
UNET |= {"mid_block.resnets.1": "middle_block.2", "up_blocks.0.upsamplers.0": "output_blocks.1.2"}
UNET |= {f"up_blocks.0.attentions.{i}": f"output_blocks.{i}.1" for i in range(2)}
UNET |= {f"up_blocks.{i // 2}.resnets.{i % 2}": f"output_blocks.{i}.0" for i in range(4)}
VAE = {"mid_block.attentions.0": "mid.attn_1", "down_blocks": "down", "to_q": "q", "to_k": "k", "to_v": "v"}
VAE |= {f"mid_block.resnets.{i}": f"mid.block_{i + 1}" for i in range(2)} | {"resnets": "block"}
VAE |= {f"up_blocks.{i}": f"up.{3 - i}" for i in range(4)} | {"group_norm": "norm", "to_out.0": "proj_out"}
VAE |= {"downsamplers.0": "downsample", "upsamplers.0": "upsample", "conv_shortcut": "nin_shortcut"}


def renamed(name, rules):
    return replaced(name, {f"{new}.": f"{old}." for new, old in rules.items()})


def unet_name(name):
    known = {new: old for part in LDM["unet"].values() for new, old in part.items()}
    return known.get(name) or renamed(name, UNET | (RESNET if ".resnets." in name else {}))


def open_clip(weights):
    """An encoder's weights as open_clip has them, with query, key and value in one matrix."""
    known, rules, original = LDM["openclip"]["layers"], LDM["openclip"]["transformer"], {}
    for name, weight in weights.items():
        if name in known:
            original[known[name]] = weight.T if "projection" in name else weight
        elif ".q_proj." in name:
            parts = [weights[name.replace(".q_", f".{kind}_")] for kind in "qkv"]
            original[f"transformer.{replaced(name, rules).replace('.q_proj.', '.in_proj_')}"] = torch.cat(parts)
        elif not re.search(r"\.[kv]_proj\.", name):
            original[f"transformer.{replaced(name, rules)}"] = weight
    return original


def replaced(name, rules):
    for new, old in rules.items():
        name = name.replace(new, old)
    return name


def text_weights(encoder):
    """With the prefix that older versions of transformers had in all text encoders."""
    state = encoder.state_dict().items()
    return {name if name.startswith("text_") else f"text_model.{name}": weight for name, weight in state}


def original_layout(parts):
    """{name: weight} of an SDXL's or Stable Diffusion 1.5's parts, as in a single-file checkpoint."""
    weights = {f"model.diffusion_model.{unet_name(name)}": w for name, w in parts["unet"].state_dict().items()}
    vae = parts["vae"].state_dict().items()
    weights |= {f"first_stage_model.{LDM['vae'].get(name) or renamed(name, VAE)}": w for name, w in vae}
    first = "conditioner.embedders.0.transformer." if "text_encoder_2" in parts else "cond_stage_model.transformer."
    weights |= {f"{first}{name}": weight for name, weight in text_weights(parts["text_encoder"]).items()}
    if "text_encoder_2" in parts:
        second = open_clip(text_weights(parts["text_encoder_2"]))
        weights |= {f"conditioner.embedders.1.model.{name}": weight for name, weight in second.items()}
    return {name: weight.clone().contiguous() for name, weight in weights.items()}
