"""CLIP text encoders that read long prompts to the end: training, and import and export."""

from .lazy import lazy_names
from .moved import keep_old_names

__all__ = ["load_text_encoder", "split_sentences", "stretch_positions"]

keep_old_names()
__getattr__ = lazy_names(
    __name__,
    {
        "load_text_encoder": ".interchange",
        "split_sentences": ".sentences",
        "stretch_positions": ".models.positions",
    },
)
