"""A checkpoint whose first text encoder was trained together with its UNet, as people fine-tune SDXL.

The UNet reads the penultimate hidden states. So the last block of the encoder, its final norm and its projection get no
gradient, and stay as they are.
"""

from pathlib import Path

import torch
from diffusers import StableDiffusionXLPipeline
from torch import Tensor, nn

from debias_diffusion.text.tokens import clean

from .stage import run_stage
from .unet import Pairs, denoising_loss, draw_pair, encode_pairs, in_training


class _Encoded:
    """The hidden states of captions, of which the first encoder's are computed when they are asked for."""

    def __init__(self, encoder: nn.Module, ids: Tensor, hidden_states: Tensor):
        self.encoder, self.ids = encoder, ids
        self.second = hidden_states[..., encoder.config.hidden_size :]

    def __getitem__(self, chosen: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            states = self.encoder(self.ids[chosen], output_hidden_states=True).hidden_states[-2]
        return torch.cat([states, self.second[chosen].float()], dim=-1)


def encode_for_both(pipe: StableDiffusionXLPipeline, count: int, start: int) -> Pairs:
    """As `encode_pairs`, with the ids of the captions, [N, 77], which the first encoder reads anew at each step."""
    texts = [clean(draw_pair(index)[1].text) for index in range(start, start + count)]
    ids = pipe.tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    return encode_pairs(pipe, count, start=start) | {"ids": ids}


def train_both(
    folder: Path, pipe: StableDiffusionXLPipeline, pairs: Pairs, *, steps: int, peak: float, seed: int = 0
) -> None:
    """Trains the pipeline's UNet and first encoder in place on what `encode_for_both` gave."""
    encoder = pipe.text_encoder.train()
    denoise = denoising_loss(pipe, 64, seed, compiled=True)
    data = {**pairs, "hidden_states": _Encoded(encoder, pairs["ids"], pairs["hidden_states"])}
    with in_training(pipe.unet):
        both = nn.ModuleDict({"unet": pipe.unet, "text_encoder": encoder})
        run_stage(folder, both, lambda step: denoise(data, step), steps=steps, peak=peak)
    encoder.eval()
