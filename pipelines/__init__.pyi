"""The package's names, which `__init__.py` imports when they are first used."""

from .classes import (
    StableDiffusionLongPromptImg2ImgPipeline,
    StableDiffusionLongPromptPipeline,
    StableDiffusionXLLongPromptControlNetImg2ImgPipeline,
    StableDiffusionXLLongPromptControlNetPipeline,
    StableDiffusionXLLongPromptImg2ImgPipeline,
    StableDiffusionXLLongPromptInpaintPipeline,
    StableDiffusionXLLongPromptPipeline,
    with_long_prompts,
)
from .custom_pipeline import write_block, write_custom_pipeline
from .long_prompt import LongPromptOptions, PromptLayout, SDLongPromptMixin, SDXLLongPromptMixin
from .modular import LongPromptTextEncoderStep, StableDiffusionXLLongPromptBlocks
from .sharpening import sharpened

__all__ = [
    "LongPromptOptions",
    "LongPromptTextEncoderStep",
    "PromptLayout",
    "SDLongPromptMixin",
    "SDXLLongPromptMixin",
    "StableDiffusionLongPromptImg2ImgPipeline",
    "StableDiffusionLongPromptPipeline",
    "StableDiffusionXLLongPromptBlocks",
    "StableDiffusionXLLongPromptControlNetImg2ImgPipeline",
    "StableDiffusionXLLongPromptControlNetPipeline",
    "StableDiffusionXLLongPromptImg2ImgPipeline",
    "StableDiffusionXLLongPromptInpaintPipeline",
    "StableDiffusionXLLongPromptPipeline",
    "sharpened",
    "with_long_prompts",
    "write_block",
    "write_custom_pipeline",
]
