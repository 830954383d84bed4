"""Prompts of any length for diffusers' SDXL and Stable Diffusion 1.5 pipelines."""

import functools
import inspect
import itertools
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, get_args

import torch
from diffusers import DiffusionPipeline
from diffusers.loaders import TextualInversionLoaderMixin
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from debias_diffusion.text.chunks import (
    KOHYA_POSITIONS,
    MOST_BETWEEN_SENTENCES,
    MOST_SHARPENING,
    PROGRAMS,
    TRAINED_POSITIONS,
    WHOLE_ROWS,
    Breaks,
    Chunk,
    Cut,
    Emphasis,
    Reading,
    Tokens,
    positions_for,
    split_text,
)
from debias_diffusion.text.reading import (
    chunk_length,
    encode_texts,
    fast_tokenizer,
    last_states,
    penultimate_states,
    pooling_eos,
    tokenize_parts,
)
from debias_diffusion.text.schedules import MANY_STEPS, find_schedules, last_steps, text_at
from debias_diffusion.text.weighting import has_weights, parse_prompt, take_out, unread_syntax

from .scheduling import EMBEDDINGS, ExchangeEmbeddings, schedule_of, scheduled
from .sharpening import SharpenedMixin, check_sharpening, note_sentences

try:
    from diffusers.utils.torch_utils import get_module_execution_device
except ImportError:  # older diffusers run both encoders on the pipeline's one device
    get_module_execution_device = None

_Pipe = TypeVar("_Pipe")
_Options = ParamSpec("_Options")
# One thread encodes at a time: pipelines may share encoders, and the scale of a LoRA is set in the encoder's layers.
_ENCODING = threading.RLock()


class PromptLayout(NamedTuple):
    """How a prompt is encoded.

    Attributes:
        tokens: tokens of the longest text without BOS and EOS, the most of any tokenizer, also where it is cut.
        positions: length of the embeddings.
        chunks: for each text encoder, the number of chunks that the longest text takes.
        cut_at: the number of tokens, BOS and EOS included, at which texts are cut; None if they are read whole.
        cut_off: for each text encoder, what is not read of the first prompt: text, and number of tokens.
        texts: for each text encoder, of each chunk of the first prompt the text that it adds, as its tokenizer spells
            it, and the number of its tokens.
        taken_out: comments and tags of the first prompt that are not read, as in A1111.
        schedules: of the first prompt, such as "[cat:dog:0.5]"; all else is of the text at the first step.
        sentences: of each prompt, for the first encoder, the number of each position's sentence, from 0; -1 for BOS,
            EOS and pads. Empty in the readings of programs.
    """

    tokens: int
    positions: int
    chunks: tuple[int, ...]
    cut_at: int | None = None
    cut_off: tuple[tuple[str, int], ...] = ()
    texts: tuple[tuple[tuple[str, int], ...], ...] = ()
    taken_out: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    sentences: tuple[tuple[int, ...], ...] = ()

    def settings(self) -> dict:
        """What an image's settings say of it."""
        return {name: getattr(self, name) for name in ("tokens", "positions", "chunks", "cut_at")}


@dataclass(frozen=True, kw_only=True)
class LongPromptOptions:
    """How prompts are read: the options of `set_long_prompt`.

    Attributes:
        reading: of texts longer than the context length. "overlap" reads each chunk but the first together with the
            end of the text before it (`split_text`), so that pronouns keep their antecedents; the text encoders read
            at most twice as many chunks. "separate" reads each chunk by itself. "cut" cuts at 77 tokens, as diffusers
            does. "a1111" (and Forge), "kohya" and "comfyui" read as these programs do, short texts too.
        emphasis: what weights such as `(word:1.3)` do, see `parse_prompt` and `chunks.weigh`. "none": they are text.
            "ignore": they are read and dropped. "comfyui": a weight moves a token's states away from those of the empty
            prompt. "original" and "no_norm" are A1111's. None: what the program does that is imitated, else "none".
        breaks: what BREAK does where weights are read. "concatenate" begins a new chunk. "average" encodes each part as
            a prompt of its own and gives the UNet their mean, weighted by `BREAK:0.7`.
        positions: length of all embeddings, at least 77, for pipelines that encode in several calls and for backends
            with static shapes; a longer prompt is a ValueError, except in kohya, which cuts it there (at 227, if None).
            None: as many as the longest text needs.
        split_special_tokens: "!" is text for SDXL's second encoder, too, whose tokenizer in diffusers reads it as its
            pad. The imitated programs always read so.
        zero_empty_negative: an empty negative prompt is zeros, not the encoded empty text. None: as in the program that
            is imitated (in SDXL, A1111's are zeros), else as in diffusers.
        negative_clip_skip: apply `clip_skip` to the negative prompt too. diffusers never does.
        strict: raise a ValueError for a prompt that an encoder would read in more than one chunk.
        sharpen: the scale of the UNet's cross-attention is multiplied by this for prompts of more than 77 positions,
            see `sharpened`. Above 0, at most 4; 1 changes nothing.
        sharpen_sentences: there each sentence's share of the attention to the words is raised to this power, see
            `choose`; within a sentence attention stays as it is. Above 0, at most 16; 1 changes nothing. Not with the
            readings of programs, nor with averaged parts. A call with `prompt_embeds` needs `sentences`, a tensor of
            `prompt_layout(...).sentences`.
    """

    reading: Reading = "overlap"
    emphasis: Emphasis | None = None
    breaks: Breaks = "concatenate"
    positions: int | None = None
    split_special_tokens: bool = False
    zero_empty_negative: bool | None = None
    negative_clip_skip: bool = False
    strict: bool = False
    sharpen: float = 1.0
    sharpen_sentences: float = 1.0

    def __post_init__(self):
        choices = {"reading": get_args(Reading), "emphasis": (None, *get_args(Emphasis)), "breaks": get_args(Breaks)}
        for name, allowed in choices.items():
            if (given := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} is {given!r}, but must be {' or '.join(map(str, allowed))}.")
        check_sharpening("sharpen", self.sharpen, MOST_SHARPENING, 1.5)
        check_sharpening("sharpen_sentences", self.sharpen_sentences, MOST_BETWEEN_SENTENCES, 4)
        if self.sharpen_sentences != 1 and (self.reading in PROGRAMS or self.breaks == "average"):
            raise ValueError(
                f"sharpen_sentences is {self.sharpen_sentences:g}, which needs sentences that are read one after the"
                f' other, not reading={self.reading!r} with breaks={self.breaks!r}: leave it at 1, or use "overlap".'
            )
        step = TRAINED_POSITIONS - 2 * (self.reading == "kohya")
        if self.positions is None:
            return
        if self.positions < TRAINED_POSITIONS:
            raise ValueError(f"positions is {self.positions}, but must be at least {TRAINED_POSITIONS}, or None.")
        if self.reading in PROGRAMS and (self.positions - TRAINED_POSITIONS) % step:
            raise ValueError(
                f"positions is {self.positions}, but with reading={self.reading!r} it must be {TRAINED_POSITIONS} or a"
                f" multiple of {step} more, such as {TRAINED_POSITIONS + 2 * step}."
            )

    @property
    def weights(self) -> Emphasis:
        """What weights do."""
        return self.emphasis or PROGRAMS.get(self.reading, "none")


def _with_options_of(
    options: Callable[_Options, LongPromptOptions],
) -> Callable[[Callable[..., Any]], Callable[Concatenate[_Pipe, _Options], _Pipe]]:
    """For type checkers: a method that takes the arguments of `options` and returns the pipeline."""
    return lambda method: method


@dataclass(frozen=True)
class PromptReader:
    """Reads prompts and cuts them for text encoders, of which it needs tokenizers and context lengths alone.

    Attributes:
        encoders: the tokenizer of each text encoder and its context length, BOS and EOS included.
        options: how prompts are read.
        convert: writes out textual inversions of several vectors: diffusers' `maybe_convert_prompt`.
        step: of a scheduled prompt, the text at this step is read, from 1.
        steps: of how many.
    """

    encoders: Sequence[tuple[PreTrainedTokenizerBase, int]]
    options: LongPromptOptions = LongPromptOptions()
    convert: Callable | None = None
    step: int = 1
    steps: int = MANY_STEPS

    def layout(
        self, first: str | list[str], *others: str | list[str] | None, negatives: list[list[Tokens]] | None = None
    ) -> PromptLayout:
        """How the prompts of the encoders are read, which share their length with the tokens of negative ones."""
        tokens, text = self.tokenize(first, *others), first if isinstance(first, str) else first[0]
        read = self.cut(tokens)
        layout = self.layout_of(tokens, self.shared_length(read, negatives))
        if self.options.reading not in PROGRAMS:
            layout = layout._replace(sentences=sentences(read[0], layout.positions))
        taken_out = take_out(text, self.options.reading)[1]
        schedules = find_schedules(*_by_steps(self.options, [text]))
        return layout._replace(taken_out=tuple(taken_out), schedules=tuple(schedules))

    def text(self, prompt: str, negative: bool = False) -> str:
        """A prompt as it is read at this step, without what is not read."""
        text, _ = take_out(prompt, self.options.reading, negative)
        return text_at(text, self.step, self.steps) if self.options.reading == "a1111" else text

    def chunks(self, prompt: str) -> tuple[list[int], list[Chunk]]:
        """The token ids of a prompt for the first encoder, and what it reads of them at once, in order."""
        tokenizer, context = self.encoders[0]
        [tokens] = self.tokens([prompt], tokenizer)
        [[read]] = self.cut([[tokens]])
        return tokens.ids, self.split(read, context)

    def layout_of(self, texts: list[list[Tokens]], positions: int) -> PromptLayout:
        """`layout`, of tokens [encoders][batch] that are not cut yet, without what is taken out."""
        read = [[self.alone(tokens) for tokens in batch] for batch in self.cut(texts)]  # [encoders][batch][texts]
        counts, shown, cut_off = [], [], []
        for (tokenizer, context), batch, whole in zip(self.encoders, read, texts, strict=True):
            split = [[self.split(text, min(context, positions)) for text in alone] for alone in batch]
            counts.append(max(len(chunks) for alone in split for chunks in alone))
            first = [(text.ids, chunk.kept) for text, own in zip(batch[0], split[0], strict=True) for chunk in own]
            shown.append(tuple((tokenizer.decode(ids[kept.start : kept.stop]), len(kept)) for ids, kept in first))
            rest = whole[0].ids[sum(len(text.ids) for text in batch[0]) :]
            cut_off.append((tokenizer.decode(rest), len(rest)))
        return PromptLayout(_longest(texts), positions, tuple(counts), self.cut_at, tuple(cut_off), tuple(shown))

    def alone(self, tokens: Tokens) -> list[Tokens]:
        """The texts that are encoded apart: a prompt, or its parts between BREAKs."""
        return tokens.alone if self.options.breaks == "average" else [tokens]

    def split(self, tokens: Tokens, context: int) -> list[Chunk]:
        """What an encoder of this context length reads at once."""
        return split_text(tokens, chunk_length(context, self.options.reading) - 2, self.options.reading)

    @property
    def cut_at(self) -> int | None:
        """See `PromptLayout`."""
        if self.options.reading == "kohya":
            return self.options.positions or KOHYA_POSITIONS
        if self.options.reading != "cut":
            return None
        return min(TRAINED_POSITIONS, *(context for _, context in self.encoders))

    def cut(self, texts: list[list[Tokens]]) -> list[list[Tokens]]:
        """What is read of the tokens."""
        if not self.cut_at:
            return texts
        end, average = self.cut_at - 2, self.options.breaks == "average"

        def cut(tokens: Tokens) -> Tokens:
            if not average:
                return tokens.first(end)
            return Tokens.joined([part.first(end) for part in tokens.alone], tokens.strengths)

        return [[cut(tokens) for tokens in batch] for batch in texts]

    def tokenize(
        self,
        first: str | list[str],
        *others: str | list[str] | None,
        batch_size: int | None = None,
        negative: bool = False,
    ) -> list[list[Tokens]]:
        """[encoders][batch] tokens. An encoder without a text of its own reads the first one.

        A single text is used for the whole batch. Warns of other programs' syntax that is read as text.
        """
        if batch_size is None:
            batch_size = 1 if isinstance(first, str) else len(first)
        if not batch_size:
            raise ValueError("the batch of prompts is empty: give a prompt, or a list of at least one")
        tokens, texts = [], {}
        given = (first, *others, *[None] * len(self.encoders))
        for (tokenizer, _), prompts in zip(self.encoders, given, strict=False):
            prompts = prompts or first
            prompts = [prompts] * batch_size if isinstance(prompts, str) else list(prompts)
            if len(prompts) != batch_size:
                raise ValueError(f"prompts must have one batch size, got {batch_size} and {len(prompts)}: {prompts}")
            tokens.append(self.tokens(prompts, tokenizer, negative))
            texts |= dict.fromkeys(prompts)
        for text in texts:
            self._warn_of_syntax(self.text(text, negative))
        return tokens

    def _warn_of_syntax(self, text: str) -> None:
        if unread := unread_syntax(text):
            warnings.warn(f"In the prompt {text[:80]!r}, {unread}.", stacklevel=2)
        if self.options.emphasis is None and self.options.weights == "none" and has_weights(text):
            warnings.warn(
                "Weights such as (red:1.3), backslashes before brackets and BREAK are read as text."
                ' set_long_prompt(emphasis="comfyui"), or --emphasis comfyui, reads them; "none" keeps them as text.',
                stacklevel=2,
            )

    def tokens(self, texts: list[str], tokenizer: PreTrainedTokenizerBase, negative: bool = False) -> list[Tokens]:
        added = tokenizer.added_tokens_encoder
        # Only inversions of several vectors need converting.
        convert = self.convert if any(name.endswith("_1") for name in added) else None
        # verbose=False: transformers' warning about texts beyond the context length does not apply
        quiet: Any = SimpleNamespace(
            tokenize=partial(fast_tokenizer(tokenizer).tokenize, verbose=False), added_tokens_encoder=added
        )
        options, tokens = self.options, []
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"a prompt must be text, got {text!r}")
            text.encode()  # raises ValueError for half of a surrogate pair, which is no character
            parts = parse_prompt(self.text(text, negative), options.reading, options.weights, negative)
            if convert:
                parts = [
                    part._replace(runs=[(convert(run, quiet), weight) for run, weight in part.runs]) for part in parts
                ]
            settings = options.reading, options.split_special_tokens, options.breaks
            tokens.append(tokenize_parts(parts, tokenizer, *settings))
        return tokens

    def shared_length(
        self, prompts: list[list[Tokens]] | None, negatives: list[list[Tokens]] | None, *given: torch.Tensor | None
    ) -> int:
        """Positions for both prompts: of embeddings passed in, else as set, else as many as the longest text needs."""
        reading = self.options.reading
        fixed: Any = next((embeds.shape[1] for embeds in given if embeds is not None), self.options.positions)
        if fixed is None and reading == "kohya":
            fixed = KOHYA_POSITIONS
        columns = [
            [self.alone(tokens) for tokens in column]
            for texts in (prompts, negatives)
            if texts
            for column in zip(*texts, strict=True)
        ]
        contexts = [context for _, context in self.encoders]
        if reading in WHOLE_ROWS:
            size = chunk_length(contexts[0], reading)
            rows = {
                max(
                    len(self.split(text, context))
                    for texts, context in zip(column, contexts, strict=True)
                    for text in texts
                )
                for column in columns
            }
            if fixed is None:  # a text that is repeated leaves attention as it is
                return size * math.lcm(*rows)
            needed, multiple = size * max(rows), fixed % size == 0
        else:
            n_tokens = max(len(text.ids) for column in columns for texts in column for text in texts)
            if fixed is None:
                return positions_for(n_tokens, contexts)
            needed, multiple = n_tokens + 2, reading != "kohya" or (fixed - 2) % (TRAINED_POSITIONS - 2) == 0
        if needed > fixed or not multiple:
            raise ValueError(
                f"a text that takes {needed} positions, read as {reading!r}, does not fit the {fixed} positions: encode"
                " prompt and negative prompt together, so that they share a length, or call set_long_prompt with other"
                " positions."
            )
        return fixed


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
        texts = _by_steps(self._long_prompt, prompts, negatives if guided else ())
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


def _by_steps(options: LongPromptOptions, prompts: Sequence, negatives: Sequence = ()) -> list[str]:
    """The texts in which schedules are looked for: in A1111's reading all, without what it takes out.

    Args:
        prompts: a text, a list of them or None each, like the negative ones.
    """
    if options.reading != "a1111":
        return []
    given = [(batch, False) for batch in prompts] + [(batch, True) for batch in negatives]
    listed = [([batch] if isinstance(batch, str) else batch or (), negative) for batch, negative in given]
    texts = [(text, negative) for batch, negative in listed for text in batch if isinstance(text, str)]
    return [take_out(text, "a1111", negative)[0] for text, negative in texts]


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
        sources = find_schedules(*_by_steps(self._long_prompt, *texts))
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


def sentences(texts: list[Tokens], positions: int) -> tuple[tuple[int, ...], ...]:
    """See `PromptLayout`."""
    rows = []
    for tokens in texts:
        numbers = [0, *itertools.accumulate(cut == Cut.SENTENCE for cut in tokens.cuts[:-1])][: len(tokens.ids)]
        rows.append((-1, *numbers, *[-1] * (positions - 1 - len(numbers))))
    return tuple(rows)


def _longest(texts: list[list[Tokens]]) -> int:
    return max(len(tokens.ids) for batch in texts for tokens in batch)


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
