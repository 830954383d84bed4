"""`debias-diffusion export`: from a training run to the formats of other programs."""

from .command import ExportConfig, export

__all__ = ["ExportConfig", "export"]
