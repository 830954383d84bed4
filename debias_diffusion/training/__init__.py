"""Training: configuration, order of samples, one exact step, checkpoints, the loop."""

from ..lazy import lazy_names
from .config import TrainConfig

__all__ = ["TrainConfig", "train"]

__getattr__ = lazy_names(__name__, {"train": ".loop"})
