"""CLIP text encoders that read long prompts to the end: training, and import and export."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # torch takes seconds to import
