"""`debias-diffusion generate`: images from prompts of any length."""

from debias_diffusion.lazy import lazy_names

from .options import GenerateConfig

__all__ = ["GenerateConfig", "generate"]

__getattr__ = lazy_names(__name__, {"generate": ".command"})
