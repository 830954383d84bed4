"""Tiny CLIPs with regional prompts."""

import torch
from helpers.tiny_clip import everyday, tiny_clip

from debias_diffusion.clip.regional_prompts import PromptSettings

LAYERS, PROMPTS = 4, 3
N = 16  # patches


def pixels(count=3):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def prompted(mask="bands", layers="own", count=PROMPTS):
    """A float64 backbone of four blocks a tower with prompts of everyday size."""
    backbone = tiny_clip(layers=LAYERS)
    torch.manual_seed(2)
    backbone.add_prompts(PromptSettings(count, mask, layers))
    everyday(backbone.model.visual.regional_prompts)
    return backbone.double()
