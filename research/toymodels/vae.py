"""The toy world's AutoencoderKL: pictures of 48 pixels to latents of 6 x 6, so that each place has four of its own."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from tqdm import tqdm

from debias_diffusion.toyworld.render import SIZE, render
from debias_diffusion.toyworld.scenes import Scene, draw_scene, generator

from .stage import run_stage

LATENT_CHANNELS = 16
_KL_WEIGHT = 5e-5  # per latent number, against errors of pixels in [-1, 1]


def new_vae(seed: int = 0) -> AutoencoderKL:
    """The untrained autoencoder."""
    torch.manual_seed(seed)
    return AutoencoderKL(
        block_out_channels=(16, 32, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=2,
        sample_size=SIZE,
        force_upcast=False,
    )


def picture_tensor(pictures) -> torch.Tensor:
    """PIL pictures of one size as uint8 [N, 3, size, size]."""
    return torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(0, 3, 1, 2).contiguous()


def draw_scenes(count: int) -> list[Scene]:
    """`count` scenes of one to nine objects."""
    return [draw_scene(generator("train", index, "vae"), 1, 9) for index in range(count)]


def draw_pictures(scenes: list[Scene]) -> torch.Tensor:
    """Pictures of scenes, uint8 [len(scenes), 3, 48, 48]."""
    return picture_tensor(render(scene, SIZE) for scene in tqdm(scenes, desc="drawing"))


def as_input(pictures: torch.Tensor) -> torch.Tensor:
    """uint8 pictures as the autoencoder reads them, in [-1, 1]."""
    return pictures.float() / 127.5 - 1


def train_vae(folder: Path, *, pictures: int = 20_000, steps: int = 7000, batch: int = 16, seed: int = 0):
    """Trains the autoencoder, and sets its scaling factor so that latents have unit variance."""
    vae = new_vae(seed)
    rendered = draw_pictures(draw_scenes(pictures))
    run_stage(folder, vae, partial(_loss, vae, rendered, batch, seed), steps=steps, peak=1e-3)
    with torch.inference_mode():
        latents = torch.cat([vae.encode(as_input(part)).latent_dist.mean for part in rendered[:2000].split(250)])
    vae.register_to_config(scaling_factor=round(1 / latents.std().item(), 5))
    return vae.eval()


def _loss(vae: AutoencoderKL, pictures: torch.Tensor, batch: int, seed: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    images = as_input(pictures[torch.randint(len(pictures), (batch,), generator=generator)])
    with torch.autocast("cpu", torch.bfloat16):
        posterior = vae.encode(images).latent_dist
        decoded = vae.decode(posterior.sample(generator)).sample.float()
    error = decoded - images
    # The squares find colours soon, the absolute values sharpen edges.
    reconstruction = error.abs().mean() + 2 * error.square().mean()
    return reconstruction + _KL_WEIGHT * posterior.kl().mean() / posterior.mean[0].numel()
