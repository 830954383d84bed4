"""CLIP text encoders that read long prompts to the end: training, and import and export."""

from importlib import import_module

__all__ = ["load_text_encoder", "split_sentences", "stretch_positions"]

_MODULES = {
    "load_text_encoder": ".encoders",
    "split_sentences": ".sentences",
    "stretch_positions": ".models.positions",
}


def __getattr__(name: str):  # PEP 562: their modules take seconds to import
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
