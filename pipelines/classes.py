"""diffusers' pipelines for Stable Diffusion XL and 1.5, with prompts of any length.

Each class loads everything its parent loads (folders, single files, other pipelines), and both load what it saves.
A 248-token encoder is an ordinary component: `from_pretrained(base, text_encoder=..., tokenizer=...)`.
"""

from diffusers import (
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLControlNetImg2ImgPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
)

from .long_prompt import SDLongPromptMixin, SDXLLongPromptMixin


class StableDiffusionXLLongPromptPipeline(SDXLLongPromptMixin, StableDiffusionXLPipeline):
    """diffusers' `StableDiffusionXLPipeline`, with prompts of any length.

    Loads any SDXL folder, and folders written by `save_pretrained` of either class. A 248-token encoder is an ordinary
    component: `from_pretrained(base, text_encoder=..., tokenizer=...)`.
    """


class StableDiffusionXLLongPromptImg2ImgPipeline(SDXLLongPromptMixin, StableDiffusionXLImg2ImgPipeline):
    """diffusers' `StableDiffusionXLImg2ImgPipeline`, with prompts of any length."""


class StableDiffusionXLLongPromptInpaintPipeline(SDXLLongPromptMixin, StableDiffusionXLInpaintPipeline):
    """diffusers' `StableDiffusionXLInpaintPipeline`, with prompts of any length."""


class StableDiffusionXLLongPromptControlNetPipeline(SDXLLongPromptMixin, StableDiffusionXLControlNetPipeline):
    """diffusers' `StableDiffusionXLControlNetPipeline`, with prompts of any length."""


class StableDiffusionXLLongPromptControlNetImg2ImgPipeline(
    SDXLLongPromptMixin, StableDiffusionXLControlNetImg2ImgPipeline
):
    """diffusers' `StableDiffusionXLControlNetImg2ImgPipeline`, with prompts of any length."""


class StableDiffusionLongPromptPipeline(SDLongPromptMixin, StableDiffusionPipeline):
    """diffusers' `StableDiffusionPipeline`, with prompts of any length."""


class StableDiffusionLongPromptImg2ImgPipeline(SDLongPromptMixin, StableDiffusionImg2ImgPipeline):
    """diffusers' `StableDiffusionImg2ImgPipeline`, with prompts of any length."""
