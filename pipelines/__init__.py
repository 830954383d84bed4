"""diffusers pipelines that read prompts of any length."""

from .any_pipeline import with_long_prompts
from .custom_pipeline import write_custom_pipeline
from .keys_values import keep_keys_values
from .long_prompt import PromptLayout, SDLongPromptMixin, SDXLLongPromptMixin
from .stable_diffusion import StableDiffusionLongPromptImg2ImgPipeline, StableDiffusionLongPromptPipeline
from .stable_diffusion_xl import (
    StableDiffusionXLLongPromptControlNetImg2ImgPipeline,
    StableDiffusionXLLongPromptControlNetPipeline,
    StableDiffusionXLLongPromptImg2ImgPipeline,
    StableDiffusionXLLongPromptInpaintPipeline,
    StableDiffusionXLLongPromptPipeline,
)
from .weighting import parse_weights

__all__ = [
    "PromptLayout",
    "SDLongPromptMixin",
    "SDXLLongPromptMixin",
    "StableDiffusionLongPromptImg2ImgPipeline",
    "StableDiffusionLongPromptPipeline",
    "StableDiffusionXLLongPromptControlNetImg2ImgPipeline",
    "StableDiffusionXLLongPromptControlNetPipeline",
    "StableDiffusionXLLongPromptImg2ImgPipeline",
    "StableDiffusionXLLongPromptInpaintPipeline",
    "StableDiffusionXLLongPromptPipeline",
    "keep_keys_values",
    "parse_weights",
    "with_long_prompts",
    "write_custom_pipeline",
]
