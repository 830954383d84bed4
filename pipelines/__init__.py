"""diffusers pipelines that read prompts of any length."""

from importlib import import_module

_MODULES = {
    "LongPromptOptions": ".long_prompt",
    "LongPromptTextEncoderStep": ".modular",
    "PromptLayout": ".long_prompt",
    "SDLongPromptMixin": ".long_prompt",
    "SDXLLongPromptMixin": ".long_prompt",
    "StableDiffusionLongPromptImg2ImgPipeline": ".classes",
    "StableDiffusionLongPromptPipeline": ".classes",
    "StableDiffusionXLLongPromptBlocks": ".modular",
    "StableDiffusionXLLongPromptControlNetImg2ImgPipeline": ".classes",
    "StableDiffusionXLLongPromptControlNetPipeline": ".classes",
    "StableDiffusionXLLongPromptImg2ImgPipeline": ".classes",
    "StableDiffusionXLLongPromptInpaintPipeline": ".classes",
    "StableDiffusionXLLongPromptPipeline": ".classes",
    "parse_prompt": ".weighting",
    "sharpened": ".sharpening",
    "with_long_prompts": ".classes",
    "write_block": ".custom_pipeline",
    "write_custom_pipeline": ".custom_pipeline",
}
__all__ = list(_MODULES)


def __getattr__(name: str):  # PEP 562: diffusers takes seconds to import
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
