"""Long prompts for a pipeline that is already there, of whatever class."""

import copy
import functools
import inspect

from diffusers import DiffusionPipeline

from .long_prompt import LongPromptMixin, SDLongPromptMixin, SDXLLongPromptMixin


def with_long_prompts(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """The same pipeline, reading prompts of any length.

    A shallow copy under a subclass of its own class: both share all models, nothing is copied, cast or moved. Works for
    each class of diffusers that encodes prompts as SDXL or Stable Diffusion 1.5 do, as the refiner, PAG and adapter
    pipelines; LoRAs, adapters, hooks and offloading that the pipeline has remain as they are.

    Raises:
        ValueError: the pipeline's `encode_prompt` has other arguments, so it is another kind of model.
    """
    if isinstance(pipe, LongPromptMixin):
        return copy.copy(pipe)
    takes = _arguments(type(pipe))
    mixin = next((mixin for mixin in (SDXLLongPromptMixin, SDLongPromptMixin) if _arguments(mixin) == takes), None)
    if mixin is None:
        raise ValueError(
            f"{type(pipe).__name__} does not encode prompts as SDXL or Stable Diffusion 1.5 do: its `encode_prompt` "
            + (f"takes {', '.join(takes)}." if takes else "is missing.")
        )
    copied = copy.copy(pipe)
    copied.__class__ = _long_prompt_class(mixin, type(pipe))
    return copied


def _arguments(cls: type) -> list[str]:
    method = getattr(cls, "encode_prompt", None)
    return [] if method is None else list(inspect.signature(method).parameters)[1:]


@functools.cache
def _long_prompt_class(mixin: type, cls: type) -> type:
    # Under the name of its parent, by which diffusers' AutoPipelines find what belongs to it.
    return type(cls.__name__, (mixin, cls), {"__doc__": f"`{cls.__name__}`, with prompts of any length."})
