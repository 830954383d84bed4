"""`debias-diffusion align`: fit SDXL's text encoders to the UNet that reads them."""

from .command import AlignConfig, align

__all__ = ["AlignConfig", "align"]
