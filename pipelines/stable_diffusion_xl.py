"""Stable Diffusion XL from text, with prompts of any length."""

from diffusers import StableDiffusionXLPipeline

from .long_prompt import SDXLLongPromptMixin


class StableDiffusionXLLongPromptPipeline(SDXLLongPromptMixin, StableDiffusionXLPipeline):
    """diffusers' `StableDiffusionXLPipeline`, with prompts of any length.

    Loads from any SDXL folder, and from those that `save_pretrained` of either class wrote. A 248-token encoder goes in
    as an ordinary component: `from_pretrained(base, text_encoder=..., tokenizer=...)`.
    """
