"""`debias-diffusion export`: from a training run to what other programs load."""

from .command import ExportConfig, export

__all__ = ["ExportConfig", "export"]
