"""diffusers' pipelines for Stable Diffusion XL and 1.5, with prompts of any length.

Each class loads everything its parent loads (folders, single files, other pipelines), and both load what it saves.
"""

import copy
import functools
import inspect

from diffusers import (
    DiffusionPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLControlNetImg2ImgPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
)

from .long_prompt import LongPromptMixin, SDLongPromptMixin, SDXLLongPromptMixin


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


def with_long_prompts(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """Lets an existing pipeline read prompts of any length.

    Returns a shallow copy under a subclass of the pipeline's class. Both share all models; nothing is copied, cast or
    moved. Works for every class of diffusers that encodes prompts as SDXL or Stable Diffusion 1.5 do, such as the
    refiner, PAG and adapter pipelines. LoRAs, adapters, hooks and offloading of the pipeline stay in place.

    Raises:
        ValueError: the pipeline's `encode_prompt` has other arguments, so the pipeline is for another kind of model.
    """
    if isinstance(pipe, LongPromptMixin):
        return copy.copy(pipe)
    names = _arguments(type(pipe))
    mixin = next((mixin for mixin in (SDXLLongPromptMixin, SDLongPromptMixin) if _arguments(mixin) == names), None)
    if mixin is None:
        raise ValueError(
            f"{type(pipe).__name__} does not encode prompts as SDXL or Stable Diffusion 1.5 do: its `encode_prompt` "
            + (f"takes {', '.join(names)}." if names else "is missing.")
        )
    copied = copy.copy(pipe)
    copied.__class__ = _long_prompt_class(mixin, type(pipe))
    return copied


def _arguments(cls: type) -> list[str]:
    method = getattr(cls, "encode_prompt", None)
    return [] if method is None else list(inspect.signature(method).parameters)[1:]


@functools.cache
def _long_prompt_class(mixin: type, cls: type) -> type:
    # Named as the parent: diffusers' AutoPipelines look up related classes by name.
    return type(cls.__name__, (mixin, cls), {"__doc__": f"`{cls.__name__}`, with prompts of any length."})
