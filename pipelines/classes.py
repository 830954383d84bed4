"""diffusers' pipelines for Stable Diffusion XL and 1.5, with prompts of any length.

Each class loads everything its parent loads (folders, single files, other pipelines), and both load what it saves.
"""

import copy
import functools
import inspect
from typing import Any, TypeVar

import torch
from diffusers import (
    DiffusionPipeline,
    ModularPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLControlNetImg2ImgPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
)

from .long_prompt import LongPromptMixin, LongPromptOptions, SDLongPromptMixin, SDXLLongPromptMixin, takes_options

Pipeline = TypeVar("Pipeline")  # a class of diffusers, whose lazy imports are no bound


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


class _AnimateDiffSDXLMixin(SDXLLongPromptMixin):
    def encode_prompt(self, *args, num_videos_per_prompt: int | None = None, **kwargs):
        if num_videos_per_prompt is not None:
            kwargs["num_images_per_prompt"] = num_videos_per_prompt
        return super().encode_prompt(*args, **kwargs)


class _InstructPix2PixMixin(SDLongPromptMixin):
    def _encode_prompt(self, prompt, device, num_images_per_prompt, do_classifier_free_guidance, *args, **kwargs):
        embeds, negative_embeds = self.encode_prompt(
            prompt, device, num_images_per_prompt, do_classifier_free_guidance, *args, **kwargs
        )
        # guided by the text, by the image alone, and by nothing
        return torch.cat([embeds, negative_embeds, negative_embeds]) if do_classifier_free_guidance else embeds


@takes_options(LongPromptOptions)
def with_long_prompts(pipe: Pipeline, **options) -> Pipeline:
    """Lets an existing pipeline read prompts of any length: `with_long_prompts(pipe, reading="a1111")`.

    Args:
        options: those of `set_long_prompt`. Without any, a pipeline that reads long prompts keeps its own.

    Returns a shallow copy under a subclass of the pipeline's class. Both share all models; nothing is copied, cast or
    moved. Works for every class of diffusers that encodes prompts as SDXL or Stable Diffusion 1.5 do, such as the
    refiner, PAG and adapter pipelines. LoRAs, adapters, hooks and offloading of the pipeline stay in place.

    A modular pipeline of SDXL gives a new one of the same components, with `LongPromptTextEncoderStep` as its text
    step; the options are arguments of its call, too.

    Raises:
        TypeError: there is no option of a name.
        ValueError: a value is not allowed; the pipeline is for another kind of model, overrides `encode_prompt`, or
            never calls it.
    """
    if hasattr(pipe, "set_long_prompt"):  # also of a class from an exported pipeline.py
        copied = copy.copy(pipe)
        return copied.set_long_prompt(**options) if options else copied
    if isinstance(pipe, ModularPipeline):
        from .modular import with_long_text_step  # imports all of SDXL's blocks

        return with_long_text_step(pipe, LongPromptOptions.of(options))
    copied: Any = copy.copy(pipe)
    copied.__class__, copied._wrapped = _long_prompt_class(type(pipe)), pipe
    for name in ("text_encoder", "text_encoder_2"):
        encoder = getattr(pipe, name, None)
        if encoder is not None and encoder.config.model_type != "clip_text_model":
            raise ValueError(f"The `{name}` of {type(pipe).__name__} is a {type(encoder).__name__}, which is no CLIP.")
    return copied.set_long_prompt(**options)


@functools.cache
def _long_prompt_class(cls: type) -> type:
    names: dict[str, Any] = {"__module__": cls.__module__, "__doc__": f"`{cls.__name__}`, with prompts of any length."}
    names["__reduce__"] = lambda pipe: (_empty, (cls,), vars(pipe))
    return type(cls.__name__, (_mixin(cls), cls), names)


def _empty(cls: type) -> DiffusionPipeline:
    """An instance without state, for pickle."""
    cls = _long_prompt_class(cls)
    return cls.__new__(cls)  # ty: ignore[no-matching-overload]


def _mixin(cls: type) -> type[LongPromptMixin]:
    """What reads the prompts of a pipeline class. Raises ValueError for one that would not work or be ignored."""
    if issubclass(cls, StableDiffusionInstructPix2PixPipeline):
        return _InstructPix2PixMixin
    names = _arguments(cls, "encode_prompt")
    if names and not _calls(cls, "__call__", "encode_prompt"):
        raise ValueError(f"{cls.__name__} never calls its `encode_prompt`: wrap one of diffusers' own pipelines.")
    definitions = [base for base in cls.__mro__ if "encode_prompt" in vars(base)]
    if len(definitions) > 1 and not definitions[0].__module__.startswith("diffusers."):
        raise ValueError(
            f"{cls.__name__} overrides `encode_prompt`, which would be ignored: derive it from a pipeline that reads "
            "long prompts, such as StableDiffusionXLLongPromptPipeline, or wrap a pipeline without the override."
        )
    for mixin in (SDXLLongPromptMixin, SDLongPromptMixin):
        expected = _arguments(mixin, "encode_prompt")
        if names in (expected, expected[:-1]):  # InstructPix2Pix for SDXL has no `clip_skip`
            return mixin
        if [name.replace("videos", "images") for name in names] == expected:
            return _AnimateDiffSDXLMixin
    taken = [name for name in _arguments(cls, "__call__") if "prompt_embed" in name]
    raise ValueError(
        f"{cls.__name__} does not encode prompts as SDXL or Stable Diffusion 1.5 do: its `encode_prompt` "
        + (f"takes {', '.join(names)}." if names else "is missing.")
        + (f" It can be given {', '.join(taken)}: encode them with a wrapped base pipeline." if taken else "")
    )


def _calls(cls: type, method: str, target: str) -> bool:
    """Whether a method of a class, or one that it calls, names the method `target`."""
    names, identifiers = [method], {method}
    for name in names:
        function: Any = inspect.unwrap(getattr(cls, name))
        blocks = [getattr(function, "__code__", None)]
        for code in filter(None, blocks):  # with functions and comprehensions in it
            blocks += [constant for constant in code.co_consts if inspect.iscode(constant)]
            names += [used for used in code.co_names if used not in identifiers and callable(getattr(cls, used, None))]
            identifiers |= set(code.co_names)
    return target in identifiers


def _arguments(cls: type, method: str) -> list[str]:
    function = getattr(cls, method, None)
    return [] if function is None else list(inspect.signature(function).parameters)[1:]
