"""Prompts of any length for diffusers' SDXL and Stable Diffusion 1.5 pipelines."""

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from diffusers import DiffusionPipeline
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from debias_diffusion.text.chunks import PROGRAMS
from debias_diffusion.text.encoding import encode, last_states, penultimate_states
from debias_diffusion.text.options import LongPromptOptions, PromptLayout
from debias_diffusion.text.prompt import Batch, Plan, Texts, read
from debias_diffusion.text.schedules import MANY_STEPS

from .calls import EMBEDDINGS, CallMixin, Embeddings, call_of, calling, exchange_embeddings
from .sharpening import view_of

try:
    from diffusers.utils.torch_utils import get_module_execution_device
except ImportError:  # older diffusers run both encoders on the pipeline's one device
    get_module_execution_device = None

_Pipe = TypeVar("_Pipe")
_Options = ParamSpec("_Options")
# One thread encodes at a time: pipelines may share encoders, and the scale of a LoRA is set in the encoder's layers.
_ENCODING = threading.RLock()
OWN = ("long_prompt", "words")  # arguments of a call, beside those of diffusers


def takes_options(
    options: Callable[_Options, LongPromptOptions],
) -> Callable[[Callable[..., Any]], Callable[Concatenate[_Pipe, _Options], _Pipe]]:
    """A function of a pipeline and `**options`, which returns a pipeline, with each option in its signature."""

    def with_options(function: Callable) -> Any:
        pipe, *_ = inspect.signature(function).parameters.values()
        return _with_parameters(function, [pipe, *inspect.signature(options).parameters.values()])

    return with_options


def _with_parameters(function: Any, parameters: Iterable[inspect.Parameter]) -> Any:
    """The function, with these parameters in its signature, in the order that Python wants."""
    function.__signature__ = inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))
    return function


class LongPromptMixin(CallMixin):
    """Shared by SDXL and Stable Diffusion 1.5: from texts to the hidden states of each text encoder.

    A subclass has `_text_encoders()`, (tokenizer, encoder) of each; and `_states(encoder, ids, eos_token_id,
    clip_skip)`, which gives hidden states [rows, positions, width] for the UNet, and pooled embeddings [rows, width] or
    None.
    """

    _wrapped: Any = None  # the pipeline that `with_long_prompts` was given

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        pipelines = [base for base in cls.__mro__ if issubclass(base, DiffusionPipeline)]
        if pipelines:  # diffusers looks up related classes by name, and a saved folder says it
            cls.__name__ = next(base.__name__ for base in pipelines if not issubclass(base, LongPromptMixin))
            is_first = not any(issubclass(base, LongPromptMixin) for base in pipelines[1:])
            cls.__call__ = _long_prompt_call(cls, is_first)  # ty: ignore[invalid-assignment]

    @takes_options(LongPromptOptions)
    def set_long_prompt(self, **options):
        """Sets how prompts are read. Each call sets every option: what you leave out goes back to its default.

        So does `pipe(prompt, long_prompt={"reading": "a1111"})`, for that one call in its thread.

        Args:
            options: the attributes of `LongPromptOptions`.

        Returns:
            the pipeline itself

        Raises:
            TypeError: there is no option of a name.
            ValueError: a value that is not allowed.
        """
        self._long_prompt = LongPromptOptions.of(options)
        return self

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs):
        """As in diffusers; the options of `set_long_prompt` are taken over from the other pipeline."""
        pipe = super().from_pipe(pipeline, **kwargs)
        pipe._long_prompt = getattr(pipeline, "_long_prompt", cls._long_prompt)
        return pipe

    def _read(
        self, prompts: tuple[Texts, ...] | None, negatives: tuple[Texts, ...] | None, guided: bool, **given: Any
    ) -> Plan | None:
        """The plan of what is encoded; None for nothing. Negative prompts are not, without guidance or as zeros."""
        if negatives is not None and (not guided or self._reads_zeros(negatives)):
            negatives = None
        if prompts is None and negatives is None:
            return None
        encoders = [(tokenizer, encoder.config.max_position_embeddings) for tokenizer, encoder in self._text_encoders()]
        call, negatives = call_of(self), negatives and (negatives[0] or "", *negatives[1:])
        steps = call.steps if call and call.steps else MANY_STEPS
        return read(prompts, negatives, encoders, self._options, steps=steps, **given)

    def _reads_zeros(self, negatives: tuple[Texts, ...]) -> bool:
        """Whether negative prompts that are empty, or absent, are zeros, not the encoded empty text."""
        options, texts = self._options, ([each] if isinstance(each, str) else each or () for each in negatives)
        is_empty = not any(map(any, texts))
        if options.zero_empty_negative is not None:
            return is_empty and options.zero_empty_negative
        if options.reading in PROGRAMS:
            return is_empty and options.reading == "a1111" and hasattr(self, "text_encoder_2")
        return negatives[0] is None and bool(self.config.get("force_zeros_for_empty_prompt"))

    def _encode(
        self, plan: Plan, batch: Batch, clip_skip: int | None, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Embeddings [texts, positions, width of all encoders]; the last encoder's pooled [texts, width], or None."""
        encoders = [encoder for _, encoder in self._text_encoders()]
        if plan.options.strict and max((layout := plan.layout(batch)).chunks) > 1:
            raise ValueError(
                f"a text of {layout.tokens} tokens takes {' and '.join(map(str, layout.chunks))} chunks of the text"
                " encoders, and `strict` allows one: shorten it, or call set_long_prompt(strict=False)."
            )
        most = min(encoder.config.num_hidden_layers for encoder in encoders) - 1
        if not 0 <= (clip_skip or 0) <= most:
            raise ValueError(f"`clip_skip` is {clip_skip}, but must be from 0 to {most} for these text encoders")
        embeds, pooled, states = [], None, partial(self._states, clip_skip=clip_skip)
        for each, encoder in zip(batch.encoders, encoders, strict=True):
            inputs = device if get_module_execution_device is None else get_module_execution_device(encoder)
            embedded, pooled = encode(each, encoder, states, device, inputs)
            embeds.append(embedded)
        return torch.concat(embeds, dim=-1), pooled

    def _encode_prompts(
        self,
        prompts: tuple[Texts, ...],
        negatives: tuple[Texts, ...],
        given: tuple[torch.Tensor | None, ...],
        guided: bool,
        device: torch.device | None,
        lora_scale: float | None,
        clip_skip: int | None,
        repeats: int,
    ) -> tuple[torch.Tensor | None, ...]:
        """Embeddings, negative, pooled and negative pooled ones, of texts for each encoder; what is given stays.

        Those of the first step are returned. Where prompts change from step to step, the call gets all.
        """
        device, call = device or self._execution_device, call_of(self)
        lengths = [each.shape[1] for each in (given[0], given[1] if guided else None) if each is not None]
        plan = self._read(
            prompts if given[0] is None else None,
            negatives if given[1] is None else None,
            guided,
            batch_size=None if given[0] is None else len(given[0]),
            positions=lengths[0] if lengths else None,
        )
        batches, ends, encoded = (None, None), [1], [(None, None)] * 2
        if plan:
            batches, ends = (plan.prompts, plan.negatives), plan.steps
            plan.warn()
            if not (call and call.steps):
                plan.refuse_schedules()
        skips = clip_skip, clip_skip if self._options.negative_clip_skip else None
        with _ENCODING, self._scaled_lora(lora_scale):
            for side, batch in enumerate(batches):
                if plan and batch:
                    embeds, pooled = self._encode(plan, batch, skips[side], device)
                    encoded[side] = embeds, pooled if given[2 + side] is None else None
        # The UNet's input dtype: the encoder's, as in diffusers, unless that only stores its weights (float8).
        model = getattr(self, "text_encoder_2", self.text_encoder)
        model = self.unet if model is None else model  # a compiled model has no truth value
        own = encoded[0][0] if given[0] is None else given[0]
        dtype = own.dtype if model is None or model.dtype.itemsize == 1 else model.dtype
        if call and call.options.sharpen != 1:
            for batch, (embeds, _) in zip(batches, encoded, strict=True):
                if batch:
                    call.note(embeds.to(device, dtype), batch.words.to(device))
            rows = (row for each in given[:2] if each is not None for row in each.to(device, dtype))
            call.note(rows, torch.as_tensor(call.words, device=device))

        @functools.cache  # some steps have the same texts
        def arrange(*numbers: tuple[int, ...] | None) -> Embeddings:
            values = [
                value if each is None else each if len(ends) == 1 else each[[*numbers[at % 2]]]
                for at, (value, each) in enumerate(
                    zip(given, itertools.chain(*zip(*encoded, strict=True)), strict=True)
                )
            ]
            if guided and values[1] is None:
                values[1::2] = (each if each is None else torch.zeros_like(each) for each in values[::2])
            for at in range(0, 4, 1 if guided else 2):
                value = values[at] if at > 1 else values[at].to(device, dtype)
                values[at] = None if value is None else value.repeat_interleave(repeats, dim=0)
            return {name: value for name, value in zip(EMBEDDINGS, values, strict=True) if value is not None}

        parts = [(end, arrange(*(batch and batch.numbers[at] for batch in batches))) for at, end in enumerate(ends)]
        first = parts[0][1]
        if len(parts) > 1:
            call.sources[:], call.parts[:] = plan.schedules, parts
            first = {name: value.clone() for name, value in first.items()}  # pipelines write into what they are given
        return tuple(map(first.get, EMBEDDINGS))

    @contextmanager
    def _scaled_lora(self, scale: float | None) -> Iterator[None]:
        """Scales the text encoders' LoRA layers within the context, and restores their scales exactly."""
        with ExitStack() as stack:
            if scale is not None:
                self._lora_scale = scale  # what diffusers' `lora_scale` reports
                for encoder in (self.text_encoder, getattr(self, "text_encoder_2", None)):
                    if encoder is not None and getattr(encoder, "peft_config", None):
                        from peft.helpers import rescale_adapter_scale  # optional

                        stack.enter_context(rescale_adapter_scale(encoder, scale))
            yield


class SDXLLongPromptMixin(LongPromptMixin):
    """Lets any SDXL pipeline of diffusers read prompts of any length. Put it first: `class X(Mixin, Pipeline)`.

    A prompt that fits the shorter context length (77 tokens with BOS and EOS, for SDXL's encoders) is encoded as in
    diffusers, bit for bit, if the encoders have 77 positions. A longer one is encoded at the shortest of 152, 227 and
    248 positions that holds it (without a 248-token encoder: 152, 227, 302, ...), beyond that at whole chunks more, see
    `positions_for`. Prompt, negative prompt and the other prompts of a batch share the longest length that any of them
    needs. An encoder of a shorter context length reads the text in several chunks (`split_text`, `positions_of`).
    Nothing is ever truncated.
    """

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        prompt_2: str | list[str] | None = None,
        device: torch.device | None = None,
        num_images_per_prompt: int = 1,
        do_classifier_free_guidance: bool = True,
        negative_prompt: str | list[str] | None = None,
        negative_prompt_2: str | list[str] | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        negative_pooled_prompt_embeds: torch.Tensor | None = None,
        lora_scale: float | None = None,
        clip_skip: int | None = None,
    ):
        """Encodes prompts for the UNet. Arguments and results are those of diffusers' method.

        Args:
            prompt: one text or a batch; None if `prompt_embeds` is given.
            prompt_2: prompt of the second text encoder, if it differs. If `text_encoder` is None, the only encoder
                reads `prompt`, as in diffusers.
            do_classifier_free_guidance: if False, the negative prompt is not used and does not count for the length.
            negative_prompt: None means zeros if the pipeline has `force_zeros_for_empty_prompt`, which do not count for
                the length; otherwise it means "".
            prompt_embeds: [batch, positions, width] computed earlier, instead of `prompt`. Fixes the length.
            pooled_prompt_embeds: [batch, pooled width] computed earlier.
            lora_scale: LoRA layers of the text encoders are scaled by this during the call.
            clip_skip: counts as diffusers does, not as A1111: layers before the penultimate one, which is A1111's 2.

        Returns:
            prompt_embeds [batch * num_images_per_prompt, positions, width], negative_prompt_embeds of that shape,
            pooled_prompt_embeds [batch * num_images_per_prompt, pooled width], negative_pooled_prompt_embeds of that
            shape. Pooled embeddings are of the first chunk. Without guidance the negatives are returned as passed.

        Raises:
            ValueError: batches of different sizes; a text that does not fit the length of embeddings passed in, is no
                text, or has weights that cannot be used; `clip_skip` is out of range; under `strict`, a text of more
                than one chunk.
        """
        prompts, negatives = (prompt, prompt_2), (negative_prompt, negative_prompt_2)
        given = prompt_embeds, negative_prompt_embeds, pooled_prompt_embeds, negative_pooled_prompt_embeds
        settings = do_classifier_free_guidance, device, lora_scale, clip_skip, num_images_per_prompt
        prompt_embeds, negative_prompt_embeds, pooled_prompt_embeds, negative_pooled_prompt_embeds = (
            self._encode_prompts(prompts, negatives, given, *settings)
        )
        # diffusers reads the results' names from this line.
        return prompt_embeds, negative_prompt_embeds, pooled_prompt_embeds, negative_pooled_prompt_embeds

    def prompt_layout(
        self,
        prompt: str | list[str],
        prompt_2: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        negative_prompt_2: str | list[str] | None = None,
        do_classifier_free_guidance: bool = True,
    ) -> PromptLayout:
        """How `encode_prompt` would encode these prompts, without running the text encoders."""
        texts = (prompt, prompt_2), (negative_prompt, negative_prompt_2)
        return self._read(*texts, do_classifier_free_guidance).layout()

    def _text_encoders(self) -> list[tuple[PreTrainedTokenizerBase, PreTrainedModel]]:
        if self.text_encoder_2 is None:
            raise ValueError("`text_encoder_2` is None: give `prompt_embeds` and `pooled_prompt_embeds`, not prompts.")
        pairs = [(self.tokenizer, self.text_encoder), (self.tokenizer_2, self.text_encoder_2)]
        return [(tokenizer, encoder) for tokenizer, encoder in pairs if encoder is not None]

    _states = staticmethod(penultimate_states)


class SDLongPromptMixin(LongPromptMixin):
    """Lets any Stable Diffusion 1.x pipeline of diffusers read prompts of any length, as `SDXLLongPromptMixin` does.

    Put it first: `class X(Mixin, Pipeline)`. Such a pipeline has one text encoder, whose last layer it reads.
    """

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        device: torch.device | None,
        num_images_per_prompt: int,
        do_classifier_free_guidance: bool,
        negative_prompt: str | list[str] | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        lora_scale: float | None = None,
        clip_skip: int | None = None,
    ):
        """Encodes prompts for the UNet. Arguments, results and errors are those of `SDXLLongPromptMixin.encode_prompt`.

        Args:
            negative_prompt: "" if None.
            clip_skip: counts as diffusers does, not as A1111: layers before the last one, which is A1111's 1. The final
                norm is still applied.

        Returns:
            prompt_embeds and negative_prompt_embeds, without pooled ones.
        """
        given = prompt_embeds, negative_prompt_embeds, None, None
        settings = do_classifier_free_guidance, device, lora_scale, clip_skip, num_images_per_prompt
        prompt_embeds, negative_prompt_embeds, *_ = self._encode_prompts(
            (prompt,), (negative_prompt,), given, *settings
        )
        return prompt_embeds, negative_prompt_embeds

    def prompt_layout(
        self,
        prompt: str | list[str],
        negative_prompt: str | list[str] | None = None,
        do_classifier_free_guidance: bool = True,
    ) -> PromptLayout:
        """How `encode_prompt` would encode these prompts, without running the text encoder."""
        return self._read((prompt,), (negative_prompt,), do_classifier_free_guidance).layout()

    def _text_encoders(self):
        if self.text_encoder is None:
            raise ValueError("`text_encoder` is None: give `prompt_embeds`, not prompts.")
        return [(self.tokenizer, self.text_encoder)]

    def _states(self, encoder, ids, clip_skip, eos_token_id):
        mask = None
        if getattr(encoder.config, "use_attention_mask", False):  # up to the first EOS, which pads, too
            ends = (ids == self.tokenizer.eos_token_id).int().argmax(-1, keepdim=True)
            mask = (torch.arange(ids.shape[1], device=ids.device) <= ends).to(ids.dtype)
        return last_states(encoder, ids, clip_skip, mask)


def _long_prompt_call(cls: type, is_first: bool) -> Callable:
    """A pipeline's `__call__` with options of its own; in our first class it also changes prompts from step to step."""
    own, signature = vars(cls).get("__call__"), inspect.signature(cls.__call__)

    @functools.wraps(cls.__call__)
    def long_prompt_call(self, *args, long_prompt: Mapping | LongPromptOptions | None = None, words=None, **kwargs):
        run = super(cls, self).__call__ if own is None else partial(own, self)
        for name in ("image_encoder", "feature_extractor"):  # of an IP-Adapter that the wrapped pipeline has loaded
            if getattr(self, name, None) is None and (part := getattr(self._wrapped, name, None)) is not None:
                self.register_modules(**{name: part})
        with calling(self, None if long_prompt is None else LongPromptOptions.of(long_prompt)) as call:
            if call.options.sharpen != 1:
                call.view = functools.cache(partial(view_of, call))
                call.words = () if words is None else words
            if is_first and call.options.reading == "a1111":
                args, kwargs = exchange_embeddings(self, call, signature.bind(self, *args, **kwargs))
            return run(*args, **kwargs)

    own_parameters = (inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in OWN)
    return _with_parameters(
        long_prompt_call, {**signature.parameters, **{each.name: each for each in own_parameters}}.values()
    )
