"""CLIP text encoders that read long prompts to the end: training, and import and export."""

from importlib import import_module

from .moved import keep_old_names

_HOMES = {
    "load_text_encoder": ".interchange",
    "split_sentences": ".sentences",
    "stretch_positions": ".models.positions",
}
__all__ = ["load_text_encoder", "split_sentences", "stretch_positions"]

keep_old_names()


def __getattr__(name: str):
    # Imported on first use, because some of the libraries take seconds to import.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
