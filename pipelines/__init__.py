"""diffusers pipelines that read prompts of any length."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # diffusers takes seconds to import
