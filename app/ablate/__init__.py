"""`debias-diffusion ablate`: find the attention heads of a CLIP that hurt, and quiet them."""

from .command import AblateConfig, ablate

__all__ = ["AblateConfig", "ablate"]
