"""The package's names, which `__init__.py` imports when they are first used."""

from .encoders import load_text_encoder
from .models.positions import stretch_positions
from .sentences import split_sentences

__all__ = ["load_text_encoder", "split_sentences", "stretch_positions"]
