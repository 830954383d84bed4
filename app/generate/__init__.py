"""`debias-diffusion generate`: images from prompts of any length."""

from .command import GenerateConfig, generate

__all__ = ["GenerateConfig", "generate"]
