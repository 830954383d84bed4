"""Latents of images, computed once and cached on disk."""

import math
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL
from PIL import Image
from torchvision.transforms.v2 import CenterCrop, Compose, InterpolationMode, PILToTensor, Resize

from debias_diffusion.errors import UserError
from debias_diffusion.models.weight_files import weights_digest
from debias_diffusion.training.feature_cache import FrozenEncoder, check_features
from debias_diffusion.training.plan import GB


class FrozenVAE(FrozenEncoder):
    """SDXL's autoencoder, which turns images into latents, scaled as the UNet reads them.

    In float32 whatever the run's precision is: SDXL's autoencoder overflows in float16. The mean of the distribution is
    taken, so that an image has one latent.

    Args:
        vae: the autoencoder; moved to the accelerator's device.
        pixels: side of the square that images are scaled and cropped to.
    """

    def __init__(self, vae: AutoencoderKL, pixels: int, accelerator: Accelerator):
        self.vae, self.accelerator = vae.to(accelerator.device).float().eval(), accelerator
        side = pixels // 2 ** (len(vae.config.block_out_channels) - 1)
        self.shape = (vae.config.latent_channels, side, side)
        # With its scaling factor, means and standard deviations; names with a line before them say where it lies.
        config = {name: value for name, value in vae.config.items() if not name.startswith("_")}
        self.key = {"vae": weights_digest(vae), "config": config, "pixels": pixels}
        resize = Resize(pixels, InterpolationMode.LANCZOS)
        self._read_pixels = Compose([resize, CenterCrop(pixels), PILToTensor()])

    def read_pixels(self, image: Image.Image) -> torch.Tensor:
        return self._read_pixels(image)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        config = self.vae.config
        latents = self.vae.encode(pixels.to(self.accelerator.device).float() / 127.5 - 1).latent_dist.mean
        if getattr(config, "latents_mean", None) is not None:
            mean, std = (
                torch.tensor(values, device=latents.device).view(1, -1, 1, 1)
                for values in (config.latents_mean, config.latents_std)
            )
            latents = (latents - mean) / std
        return check_features(latents.flatten(1) * config.scaling_factor, "autoencoder", "fp32")


def check_latents(vae: FrozenVAE, images: int, folder: Path) -> None:
    """Raises UserError if the disk of the cache has no room for the latents of so many images."""
    folder.mkdir(parents=True, exist_ok=True)
    needed = 4 * math.prod(vae.shape) * images
    free, used = shutil.disk_usage(folder).free, sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    if needed > free + used:
        raise UserError(
            f"The latents of {images:,} images take {needed / GB:.1f} GB in {str(folder)!r}, and {free / GB:.1f} GB "
            "are free. Give another --latent-cache, smaller --pixels, or fewer --max-steps."
        )
