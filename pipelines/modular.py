"""A text step of diffusers' modular pipelines that reads prompts of any length."""

import copy
import inspect
import re
import warnings
from dataclasses import fields
from types import MethodType

import torch
from diffusers import StableDiffusionXLAutoBlocks
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam
from diffusers.modular_pipelines.stable_diffusion_xl.encoders import StableDiffusionXLTextEncoderStep

from .long_prompt import LongPromptOptions, SDXLLongPromptMixin

# `sharpened` does that here.
_OPTIONS = [option for option in fields(LongPromptOptions) if option.name != "sharpen"]


class _PromptEncoder(SDXLLongPromptMixin):
    """Reads prompts with the components of a modular pipeline."""

    def __init__(self, pipe, options: LongPromptOptions):
        self._pipe, self._long_prompt = pipe, options

    def __getattr__(self, name: str):
        return getattr(self.__dict__["_pipe"], name)


class LongPromptTextEncoderStep(StableDiffusionXLTextEncoderStep):
    """diffusers' text step of SDXL, with prompts of any length.

    Attributes:
        defaults: of its options.

    Components and outputs are those of diffusers' step. Its inputs are, too, and in addition the fields of
    `LongPromptOptions`, so they are arguments of the pipeline's call: `pipe(prompt=..., reading="a1111")`. All but
    `sharpen`, which is no matter of texts: `with sharpened(pipe.unet, 2): pipe(prompt=...)`.
    """

    defaults = LongPromptOptions()
    _requirements = {"diffusers": ">=0.36", "torch": ">=2.8", "transformers": ">=4.56"}  # noqa: RUF012 - as in diffusers

    @property
    def description(self) -> str:
        return "Text step that encodes prompts of any length, without truncation"

    @property
    def inputs(self) -> list[InputParam]:
        attributes = (inspect.getdoc(LongPromptOptions) or "").partition("Attributes:\n")[2]
        said = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE))
        return [
            *super().inputs,
            *(
                InputParam(name, kind, getattr(self.defaults, name), description=" ".join(said.get(name, "").split()))
                for name, kind in ((option.name, option.type) for option in _OPTIONS)
            ),
        ]

    @torch.no_grad()
    def __call__(self, components, state):
        """Writes the embeddings into the state. Raises ValueError as `SDXLLongPromptMixin.encode_prompt` does."""
        block_state = self.get_block_state(state)
        self.check_inputs(block_state)
        options = {option.name: getattr(block_state, option.name) for option in _OPTIONS}
        (
            block_state.prompt_embeds,
            block_state.negative_prompt_embeds,
            block_state.pooled_prompt_embeds,
            block_state.negative_pooled_prompt_embeds,
        ) = _PromptEncoder(components, LongPromptOptions(**options)).encode_prompt(
            block_state.prompt,
            block_state.prompt_2,
            do_classifier_free_guidance=components.guider.num_conditions > 1,
            negative_prompt=block_state.negative_prompt,
            negative_prompt_2=block_state.negative_prompt_2,
            lora_scale=(block_state.cross_attention_kwargs or {}).get("scale"),
            clip_skip=block_state.clip_skip,
        )
        self.set_block_state(state, block_state)
        return components, state


class StableDiffusionXLLongPromptBlocks(StableDiffusionXLAutoBlocks):
    """diffusers' `StableDiffusionXLAutoBlocks` with `LongPromptTextEncoderStep` as its text step."""

    block_classes = [  # noqa: RUF012 - as in diffusers
        LongPromptTextEncoderStep if name == "text_encoder" else cls
        for name, cls in zip(
            StableDiffusionXLAutoBlocks.block_names, StableDiffusionXLAutoBlocks.block_classes, strict=True
        )
    ]


def _save_pretrained(self, *args, **kwargs):
    """As in diffusers, which saves no step that was exchanged."""
    warnings.warn(
        "Loaded again, this pipeline cuts prompts as before: wrap it again by with_long_prompts.", stacklevel=2
    )
    return type(self).save_pretrained(self, *args, **kwargs)


def with_long_text_step(pipe, options: LongPromptOptions):
    """A modular pipeline of the same components whose text step reads prompts of any length, by default so.

    Raises:
        ValueError: `sharpen`; the pipeline's blocks have no text step of SDXL under the name `text_encoder`.
    """
    blocks = copy.deepcopy(pipe.blocks)
    if not isinstance(blocks.sub_blocks.get("text_encoder"), StableDiffusionXLTextEncoderStep):
        raise ValueError(f"{type(blocks).__name__} has no text step of SDXL, `text_encoder`: give a pipeline of SDXL.")
    if options.sharpen != 1:
        raise ValueError("A modular pipeline is sharpened by its caller: `with sharpened(pipe.unet, 2): pipe(...)`.")
    step = blocks.sub_blocks["text_encoder"] = LongPromptTextEncoderStep()
    step.defaults = options
    copied = copy.copy(pipe)
    setattr(copied, "_blocks" if hasattr(pipe, "_blocks") else "blocks", blocks)  # the latter in older diffusers
    copied.save_pretrained = MethodType(_save_pretrained, copied)
    copied._component_specs = dict(pipe._component_specs)  # new components belong to one of the two only
    return copied
