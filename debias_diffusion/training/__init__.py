"""Training: configuration, order of samples, one exact step, checkpoints, the loop."""

from .config import TrainConfig
from .loop import train

__all__ = ["TrainConfig", "train"]
