"""diffusers' Stable Diffusion 1.5 pipelines, with prompts of any length."""

from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline

from .long_prompt import SDLongPromptMixin


class StableDiffusionLongPromptPipeline(SDLongPromptMixin, StableDiffusionPipeline):
    """diffusers' `StableDiffusionPipeline`, with prompts of any length."""


class StableDiffusionLongPromptImg2ImgPipeline(SDLongPromptMixin, StableDiffusionImg2ImgPipeline):
    """diffusers' `StableDiffusionImg2ImgPipeline`, with prompts of any length."""
