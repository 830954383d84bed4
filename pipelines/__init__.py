"""diffusers pipelines that read prompts of any length."""

from .custom_pipeline import write_custom_pipeline
from .long_prompt import PromptLayout, SDXLLongPromptMixin
from .stable_diffusion_xl import StableDiffusionXLLongPromptPipeline

__all__ = ["PromptLayout", "SDXLLongPromptMixin", "StableDiffusionXLLongPromptPipeline", "write_custom_pipeline"]
