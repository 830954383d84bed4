"""How prompts of any length are read, of which tokenizers and context lengths say all: no model, nor diffusers."""

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import torch
from transformers import PreTrainedTokenizerBase

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
from debias_diffusion.text.reading import chunk_length, fast_tokenizer, tokenize_parts
from debias_diffusion.text.schedules import MANY_STEPS, find_schedules, text_at
from debias_diffusion.text.weighting import has_weights, parse_prompt, take_out, unread_syntax


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


def check_sharpening(name: str, value: float, most: float, usual: float) -> None:
    """Raises ValueError for a value that is not above 0 and at most `most`."""
    if not 0 < value <= most:  # nor NaN
        raise ValueError(
            f"{name} is {value!r}, but must be above 0 and at most {most:g}; 1 changes nothing, and {usual:g} makes"
            " attention sharper."
        )


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
        schedules = find_schedules(*scheduled_texts(self.options, [text]))
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


def scheduled_texts(options: LongPromptOptions, prompts: Sequence, negatives: Sequence = ()) -> list[str]:
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


def sentences(texts: list[Tokens], positions: int) -> tuple[tuple[int, ...], ...]:
    """See `PromptLayout`."""
    rows = []
    for tokens in texts:
        numbers = [0, *itertools.accumulate(cut == Cut.SENTENCE for cut in tokens.cuts[:-1])][: len(tokens.ids)]
        rows.append((-1, *numbers, *[-1] * (positions - 1 - len(numbers))))
    return tuple(rows)


def _longest(texts: list[list[Tokens]]) -> int:
    return max(len(tokens.ids) for batch in texts for tokens in batch)
