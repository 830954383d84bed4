"""`debias-diffusion export`: from a training run to the formats of other programs."""

from debias_diffusion.lazy import lazy_names

from .options import ExportConfig

__all__ = ["ExportConfig", "export"]

__getattr__ = lazy_names(__name__, {"export": ".command"})
