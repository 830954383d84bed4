"""`debias-diffusion ablate`: find the attention heads of a CLIP that hurt, and quiet them."""

from debias_diffusion.lazy import lazy_names

from .options import AblateConfig

__all__ = ["AblateConfig", "ablate"]

__getattr__ = lazy_names(__name__, {"ablate": ".command"})
