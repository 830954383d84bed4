"""`debias-diffusion synthesize`: captions for images, written by a multimodal model and cleaned."""

from .cleaning import drop_unfinished, fault
from .command import SynthesizeConfig, synthesize

__all__ = ["SynthesizeConfig", "drop_unfinished", "fault", "synthesize"]
