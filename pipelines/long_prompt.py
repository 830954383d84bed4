"""Prompts of any length for diffusers' SDXL and Stable Diffusion 1.5 pipelines."""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from diffusers import DiffusionPipeline
from diffusers.loaders import TextualInversionLoaderMixin
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from debias_diffusion.text.chunks import PROGRAMS, Tokens
from debias_diffusion.text.reading import encode_texts, last_states, penultimate_states, pooling_eos
from debias_diffusion.text.schedules import find_schedules, last_steps, text_at

from .prompt_reader import LongPromptOptions, PromptLayout, PromptReader, scheduled_texts, sentences
from .scheduling import EMBEDDINGS, ExchangeEmbeddings, schedule_of, scheduled
from .sharpening import SharpenedMixin, note_sentences

try:
    from diffusers.utils.torch_utils import get_module_execution_device
except ImportError:  # older diffusers run both encoders on the pipeline's one device
    get_module_execution_device = None

_Pipe = TypeVar("_Pipe")
_Options = ParamSpec("_Options")
# One thread encodes at a time: pipelines may share encoders, and the scale of a LoRA is set in the encoder's layers.
_ENCODING = threading.RLock()


def _with_options_of(
    options: Callable[_Options, LongPromptOptions],
) -> Callable[[Callable[..., Any]], Callable[Concatenate[_Pipe, _Options], _Pipe]]:
    """For type checkers: a method that takes the arguments of `options` and returns the pipeline."""
    return lambda method: method


class LongPromptMixin(SharpenedMixin):
    """Shared by SDXL and Stable Diffusion 1.5: from texts to the hidden states of each text encoder.

    A subclass has `_text_encoders()`, (tokenizer, encoder) of each; and `_states(encoder, ids, clip_skip,
    eos_token_id)`, which gives hidden states [rows, positions, width] for the UNet, and pooled embeddings [rows, width]
    or None.
    """

    _long_prompt = LongPromptOptions()

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        pipelines = [base for base in cls.__mro__ if issubclass(base, DiffusionPipeline)]
        if pipelines:  # diffusers looks up related classes by name, and a saved folder says it
            cls.__name__ = next(base.__name__ for base in pipelines if not issubclass(base, LongPromptMixin))
            is_first = not any(issubclass(base, LongPromptMixin) for base in pipelines[1:])
            cls.__call__ = _with_long_prompt(cls.__call__, is_first)  # ty: ignore[invalid-assignment]

    @_with_options_of(LongPromptOptions)
    def set_long_prompt(self, **options):
        """Sets all options of `LongPromptOptions` at once: one that is not passed returns to its default.

        `pipe(prompt, long_prompt={"reading": "a1111"})` changes options for one call, and only those it names.

        Returns:
            the pipeline itself

        Raises:
            ValueError: a value that is not allowed.
        """
        self._long_prompt = LongPromptOptions(**options)
        return self

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs):
        """As in diffusers; the options of `set_long_prompt` are taken over from the other pipeline."""
        pipe = super().from_pipe(pipeline, **kwargs)
        pipe._long_prompt = getattr(pipeline, "_long_prompt", cls._long_prompt)
        return pipe

    @property
    def _reader(self) -> PromptReader:
        encoders = [(tokenizer, encoder.config.max_position_embeddings) for tokenizer, encoder in self._text_encoders()]
        convert = self.maybe_convert_prompt if isinstance(self, TextualInversionLoaderMixin) else None
        schedule = schedule_of(self)
        steps = (schedule.step, schedule.steps) if schedule else ()
        return PromptReader(encoders, self._long_prompt, convert, *steps)

    def _tokenize_negative(
        self, negative: str | list[str] | None, *negative_2: str | list[str] | None, batch_size: int
    ) -> list[list[Tokens]] | None:
        """What is read of the negative prompt, as `PromptReader.tokenize` gives it; None if it is encoded as zeros."""
        zeros = self._long_prompt.zero_empty_negative
        if zeros is None and self._long_prompt.reading not in PROGRAMS:
            zeros = negative is None and self.config.get("force_zeros_for_empty_prompt")
        else:
            if zeros is None:
                zeros = self._long_prompt.reading == "a1111" and hasattr(self, "text_encoder_2")
            texts = (negative, *negative_2)  # each a text, a list of them, or None
            zeros = zeros and not any(any([text] if isinstance(text, str) else text or ()) for text in texts)
        if zeros:
            return None
        reader = self._reader
        return reader.cut(reader.tokenize(negative or "", *negative_2, batch_size=batch_size, negative=True))

    def _encode(
        self, texts: list[list[Tokens]], length: int, clip_skip: int | None, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Embeddings [batch, length, width of all encoders] and the last encoder's pooled [batch, pooled width]."""
        encoders = [encoder for _, encoder in self._text_encoders()]
        if self._long_prompt.strict and max((layout := self._reader.layout_of(texts, length)).chunks) > 1:
            raise ValueError(
                f"a text of {layout.tokens} tokens takes {' and '.join(map(str, layout.chunks))} chunks of the text"
                f" encoders, which have {' and '.join(str(context) for _, context in self._reader.encoders)} positions,"
                " and `strict` allows one: shorten it, use an encoder with more positions, or call"
                " set_long_prompt(strict=False)."
            )
        most = min(encoder.config.num_hidden_layers for encoder in encoders) - 1
        if not 0 <= (clip_skip or 0) <= most:
            raise ValueError(f"`clip_skip` is {clip_skip}, but must be from 0 to {most} for these text encoders")

        embeds, pooled, options = [], None, self._long_prompt

        def states(encoder: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            inputs = device if get_module_execution_device is None else get_module_execution_device(encoder)
            return self._states(encoder, ids.to(inputs), clip_skip, eos_token_id)

        encode = partial(encode_texts, reading=options.reading, emphasis=options.weights, states=states, device=device)
        for (tokenizer, encoder), batch in zip(self._text_encoders(), texts, strict=False):
            eos_token_id = pooling_eos(tokenizer, length, options.reading)
            alone = [self._reader.alone(tokens) for tokens in batch]
            embedded, pooled = encode(encoder, tokenizer, [text for texts in alone for text in texts], length)
            strengths = [tokens.strengths[: len(texts)] for tokens, texts in zip(batch, alone, strict=True)]
            embeds.append(_means(embedded, strengths))
            pooled = None if pooled is None else _means(pooled, strengths)
        return torch.concat(embeds, dim=-1), pooled

    def _encode_pair(
        self, prompts: tuple, negatives: tuple, given: tuple[torch.Tensor | None, ...], guided: bool, *settings
    ) -> tuple[torch.Tensor | None, ...]:
        """As `_encode_step`, for each text of a schedule; those of the first step are returned.

        Raises ValueError for scheduled prompts where no steps are known.
        """
        texts = scheduled_texts(self._long_prompt, prompts, negatives if guided else ())
        sources = find_schedules(*texts)
        if not sources:
            return self._encode_step(prompts, negatives, given, guided, *settings)
        schedule = schedule_of(self)
        if schedule is None:
            raise ValueError(
                f"{', '.join(sources)} changes from step to step, which needs a call of a pipeline whose"
                f" `callback_on_step_end` can change embeddings; this is none, or no call, of {type(self).__name__}."
                r" Write one of the texts, or \[ for a bracket that is text."
            )
        encoded: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}
        schedule.parts.clear()
        for step in last_steps(schedule.steps, *texts):
            schedule.step, at_step = step, tuple(text_at(text, step, schedule.steps) for text in texts)
            if at_step not in encoded:
                embeds = self._encode_step(prompts, negatives, given, guided, *settings)
                named = zip(EMBEDDINGS, embeds, strict=True)
                encoded[at_step] = {name: embed for name, embed in named if embed is not None}
            schedule.parts.append((step, encoded[at_step]))
        # Pipelines write into what they are given.
        first = schedule.parts[0][1]
        return tuple(first[name].clone() if name in first else None for name in EMBEDDINGS)

    def _encode_step(
        self,
        prompts: tuple,
        negatives: tuple,
        given: tuple[torch.Tensor | None, ...],
        guided: bool,
        device: torch.device | None,
        lora_scale: float | None,
        clip_skip: int | None,
        repeats: int,
    ) -> tuple[torch.Tensor | None, ...]:
        """Embeddings, negative, pooled and negative pooled ones, of texts for each encoder; what is given stays."""
        (embeds, negative_embeds, pooled, negative_pooled), device = given, device or self._execution_device
        tokens = None if embeds is not None else self._reader.cut(self._reader.tokenize(*prompts))
        batch_size = embeds.shape[0] if tokens is None else len(tokens[0])
        negative_tokens, length = None, 0
        if guided and negative_embeds is None:
            negative_tokens = self._tokenize_negative(*negatives, batch_size=batch_size)
        if tokens is not None or negative_tokens is not None:
            length = self._reader.shared_length(tokens, negative_tokens, embeds, negative_embeds if guided else None)

        with _ENCODING, self._scaled_lora(lora_scale):
            if tokens is not None:
                embeds, encoded = self._encode(tokens, length, clip_skip, device)
                pooled = encoded if pooled is None else pooled
            if negative_tokens is not None:
                negative_clip_skip = clip_skip if self._long_prompt.negative_clip_skip else None
                negative_embeds, encoded = self._encode(negative_tokens, length, negative_clip_skip, device)
                negative_pooled = encoded if negative_pooled is None else negative_pooled
        if guided and negative_embeds is None:
            negative_embeds = torch.zeros_like(embeds)  # ty: ignore[invalid-argument-type] - they are encoded by now
            negative_pooled = None if pooled is None else torch.zeros_like(pooled)

        # The UNet's input dtype: the encoder's, as in diffusers, unless that only stores its weights (float8).
        model = getattr(self, "text_encoder_2", self.text_encoder)
        model = self.unet if model is None else model  # a compiled model has no truth value
        dtype = embeds.dtype if model is None or model.dtype.itemsize == 1 else model.dtype
        embeds = embeds.to(dtype=dtype, device=device)
        if self._long_prompt.sharpen_sentences != 1:
            numbers = None if tokens is None else torch.tensor(sentences(tokens[0], length))
            note_sentences(self, numbers, repeats, embeds)
        embeds, pooled = _repeat(embeds, repeats), _repeat(pooled, repeats)
        if guided:
            negative_embeds = _repeat(negative_embeds.to(dtype=dtype, device=device), repeats)
            negative_pooled = _repeat(negative_pooled, repeats)
        return embeds, negative_embeds, pooled, negative_pooled

    def _pair_layout(self, prompts: tuple, negatives: tuple, guided: bool) -> PromptLayout:
        batch_size = 1 if isinstance(prompts[0], str) else len(prompts[0])
        tokens = self._tokenize_negative(*negatives, batch_size=batch_size) if guided else None
        return self._reader.layout(*prompts, negatives=tokens)

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
    diffusers, bit for bit. A longer one is encoded at the shortest of 152, 227 and 248 positions that holds it (without
    a 248-token encoder: 152, 227, 302, ...), beyond that at whole chunks more, see `positions_for`. Prompt, negative
    prompt and the other prompts of a batch share the longest length that any of them needs. An encoder of a shorter
    context length reads the text in several chunks (`split_text`, `positions_of`). Nothing is ever truncated.
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
            clip_skip: number of layers to stop before the penultimate one, below that of an encoder's layers.

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
        prompt_embeds, negative_prompt_embeds, pooled_prompt_embeds, negative_pooled_prompt_embeds = self._encode_pair(
            prompts, negatives, given, *settings
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
        return self._pair_layout((prompt, prompt_2), (negative_prompt, negative_prompt_2), do_classifier_free_guidance)

    def _text_encoders(self) -> list[tuple[PreTrainedTokenizerBase, PreTrainedModel]]:
        if self.text_encoder_2 is None:
            raise ValueError(
                "`text_encoder_2` is None, so no prompt can be encoded: pass `prompt_embeds` and `pooled_prompt_embeds`"
                " (and the negative ones, with guidance)."
            )
        pairs = [(self.tokenizer, self.text_encoder), (self.tokenizer_2, self.text_encoder_2)]
        return [(tokenizer, encoder) for tokenizer, encoder in pairs if encoder is not None]

    def _states(self, encoder, ids, clip_skip, eos_token_id):
        return penultimate_states(encoder, ids, clip_skip, eos_token_id)


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
            clip_skip: number of layers to stop before the last one; the final norm is still applied.

        Returns:
            prompt_embeds and negative_prompt_embeds, without pooled ones.
        """
        given = prompt_embeds, negative_prompt_embeds, None, None
        settings = do_classifier_free_guidance, device, lora_scale, clip_skip, num_images_per_prompt
        prompt_embeds, negative_prompt_embeds, *_ = self._encode_pair((prompt,), (negative_prompt,), given, *settings)
        return prompt_embeds, negative_prompt_embeds

    def prompt_layout(
        self,
        prompt: str | list[str],
        negative_prompt: str | list[str] | None = None,
        do_classifier_free_guidance: bool = True,
    ) -> PromptLayout:
        """How `encode_prompt` would encode these prompts, without running the text encoder."""
        return self._pair_layout((prompt,), (negative_prompt,), do_classifier_free_guidance)

    def _text_encoders(self):
        if self.text_encoder is None:
            raise ValueError(
                "`text_encoder` is None, so no prompt can be encoded: pass `prompt_embeds` (and"
                " `negative_prompt_embeds`, with guidance)."
            )
        return [(self.tokenizer, self.text_encoder)]

    def _states(self, encoder, ids, clip_skip, eos_token_id):
        mask = None
        if getattr(encoder.config, "use_attention_mask", False):  # up to the first EOS, which pads, too
            ends = (ids == self.tokenizer.eos_token_id).int().argmax(-1, keepdim=True)
            mask = (torch.arange(ids.shape[1], device=ids.device) <= ends).to(ids.dtype)
        return last_states(encoder, ids, clip_skip, mask)


def _with_long_prompt(call: Callable, is_first: bool) -> Callable:
    """A pipeline's `__call__` that takes `long_prompt`; that of our first class also changes prompts by steps."""
    run = _by_schedule(call) if is_first else call

    @functools.wraps(call)  # so that its signature is still diffusers'
    def long_prompt_call(self, *args, long_prompt: dict | None = None, **kwargs):
        if long_prompt is None:
            return run(self, *args, **kwargs)
        options = self._long_prompt
        self.set_long_prompt(**asdict(options) | long_prompt)
        try:
            return run(self, *args, **kwargs)
        finally:
            self._long_prompt = options

    return long_prompt_call


def _by_schedule(call: Callable) -> Callable:
    """A pipeline's `__call__` in which scheduled prompts change, if its callback can change all embeddings."""
    signature = inspect.signature(call)

    def scheduled_call(self, *args, **kwargs):
        needed = {"prompt_embeds", "add_text_embeds"} if hasattr(self, "text_encoder_2") else {"prompt_embeds"}
        is_changed = needed <= {*getattr(self, "_callback_tensor_inputs", ())}
        if hasattr(self, "controlnet") and hasattr(type(self), "set_pag_applied_layers"):
            is_changed = False  # its ControlNet goes on with the embeddings of the first step
        if self._long_prompt.reading != "a1111" or not is_changed:
            return call(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = {name: bound.arguments.get(name, parameter.default) for name, parameter in signature.parameters.items()}
        texts = [[given.get(f"{kind}{number}") for number in ("", "_2")] for kind in ("prompt", "negative_prompt")]
        sources = find_schedules(*scheduled_texts(self._long_prompt, *texts))
        if not sources:
            return call(self, *args, **kwargs)
        listed = next((given[name] for name in ("timesteps", "sigmas") if given.get(name) is not None), None)
        with scheduled(self, (given["num_inference_steps"] or 0) if listed is None else len(listed)) as schedule:
            callback, names = given["callback_on_step_end"], given["callback_on_step_end_tensor_inputs"]
            exchange = ExchangeEmbeddings(schedule.parts, callback, getattr(callback, "tensor_inputs", names), sources)
            bound.arguments["callback_on_step_end"] = exchange
            bound.arguments["callback_on_step_end_tensor_inputs"] = exchange.inputs(self)
            return call(*bound.args, **bound.kwargs)

    return scheduled_call


def _means(encoded: torch.Tensor, strengths: Sequence[Sequence[float]]) -> torch.Tensor:
    """The weighted mean of each prompt's parts, [parts of all prompts, ...] -> [prompts, ...]."""
    means = []
    for part, weights in zip(encoded.split([len(own) for own in strengths]), strengths, strict=True):
        shares = part.new_tensor(weights).view(-1, *[1] * (part.ndim - 1)) / sum(weights)
        means.append(part[0] if len(weights) == 1 else (part * shares).sum(0))
    return torch.stack(means)


def _repeat(embeds: torch.Tensor | None, times: int) -> torch.Tensor | None:
    """Each row `times` times in succession, [batch, ...] -> [batch * times, ...]."""
    return None if embeds is None else embeds.repeat_interleave(times, dim=0)
