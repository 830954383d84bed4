"""`debias-diffusion synthesize`: captions for images, written by a multimodal model and cleaned."""

from debias_diffusion.lazy import lazy_names

from .options import SynthesizeConfig

__all__ = ["SynthesizeConfig", "drop_unfinished", "fault", "synthesize"]

__getattr__ = lazy_names(__name__, {"synthesize": ".command", "drop_unfinished": ".cleaning", "fault": ".cleaning"})
