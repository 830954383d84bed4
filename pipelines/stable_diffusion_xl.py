"""diffusers' Stable Diffusion XL pipelines, with prompts of any length.

Each loads from any SDXL folder, single file or other pipeline that its parent loads from, and saves what both load. A
248-token encoder goes in as an ordinary component: `from_pretrained(base, text_encoder=..., tokenizer=...)`.
"""

from diffusers import (
    StableDiffusionXLControlNetImg2ImgPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
)

from .long_prompt import SDXLLongPromptMixin


class StableDiffusionXLLongPromptPipeline(SDXLLongPromptMixin, StableDiffusionXLPipeline):
    """diffusers' `StableDiffusionXLPipeline`, with prompts of any length.

    Loads from any SDXL folder, and from those that `save_pretrained` of either class wrote. A 248-token encoder goes in
    as an ordinary component: `from_pretrained(base, text_encoder=..., tokenizer=...)`.
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
