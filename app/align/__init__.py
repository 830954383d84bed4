"""`debias-diffusion align`: fit SDXL's text encoders to the UNet that reads them."""

from debias_diffusion.lazy import lazy_names

from .options import AlignConfig

__all__ = ["AlignConfig", "align"]

__getattr__ = lazy_names(__name__, {"align": ".command"})
