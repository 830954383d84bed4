"""SDXL prompts of any length: tokens cut into windows, and the windows' states joined as if they were one."""

import itertools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple

import torch
from diffusers import DiffusionPipeline
from diffusers.loaders import StableDiffusionXLLoraLoaderMixin, TextualInversionLoaderMixin
from transformers import PreTrainedModel, PreTrainedTokenizerBase

try:
    from diffusers.utils.torch_utils import get_module_execution_device
except ImportError:  # older diffusers run both encoders on the pipeline's one device
    get_module_execution_device = None


class Cut(IntEnum):
    """How good it is to end a window after a token."""

    NEVER = 0  # inside the vectors of one textual inversion
    TOKEN = 1
    WORD = 2
    COMMA = 3
    SENTENCE = 4


class Tokens(NamedTuple):
    """One text as one encoder reads it.

    Attributes:
        ids: the text's tokens, without BOS and EOS.
        cuts: for each token, how good it is to end a window after it.
    """

    ids: list[int]
    cuts: list[Cut]


class PromptLayout(NamedTuple):
    """How a prompt is read.

    Attributes:
        tokens: the prompt's tokens without BOS and EOS; of its longest text in its most talkative tokenizer.
        positions: the length of its embeddings.
        windows: for each text encoder, how many windows the longest text of the prompt takes.
    """

    tokens: int
    positions: int
    windows: tuple[int, ...]


def positions_for(n_tokens: int, windows: list[int]) -> int:
    """The length of the embeddings that hold `n_tokens` tokens, BOS and EOS.

    As many whole windows of the shortest kind as are needed, as long as they fit the longest window; else that window,
    or as many of it as are needed. For windows of 77 and 248 that is 77, 152, 227, 248, 494, 740, ...; for two windows
    of 248 it begins at 248.

    Args:
        n_tokens: of the longest text, without BOS and EOS.
        windows: positions of each text encoder, BOS and EOS included.
    """

    def whole(window: int) -> int:
        return 2 + (window - 2) * max(1, math.ceil(n_tokens / (window - 2)))

    positions = whole(min(windows))
    return positions if positions <= max(windows) else whole(max(windows))


def rate_cuts(text: str, spans: list[tuple[int, int]], names: list[str | None]) -> list[Cut]:
    """How good it is to end a window after each token of a text.

    Args:
        text: what was tokenized.
        spans: where in `text` each token starts and ends, in characters.
        names: the content of each added token, None for the vocabulary's own.
    """
    cuts = []
    for (_, end), (start, _), name, next_name in zip(spans, spans[1:], names, names[1:], strict=False):
        gap = text[end:start]
        # What ends a sentence or a clause may stand inside quotation marks or brackets: (like this.)
        last = text[max(0, end - 8) : end].rstrip("\"'”’»)]}")[-1:] or " "
        if next_name is not None and next_name == _next_vector(name):
            cuts.append(Cut.NEVER)
        elif start < end:  # both tokens are bytes of one character
            cuts.append(Cut.TOKEN)
        elif "\n" in gap or last in "。！？" or (gap and last in ".!?…"):
            cuts.append(Cut.SENTENCE)
        elif last in "，、；：" or (gap and last in ",;:"):
            cuts.append(Cut.COMMA)
        else:
            cuts.append(Cut.WORD if gap else Cut.TOKEN)
    return cuts + [Cut.SENTENCE] * (len(spans) > 0)


def _next_vector(name: str | None) -> str | None:
    """The token of a textual inversion that follows `name`: "<x>_1" after "<x>", "<x>_2" after "<x>_1"."""
    if name is None:
        return None
    stem, _, number = name.rpartition("_")
    return f"{stem}_{int(number) + 1}" if stem and number.isdecimal() else f"{name}_1"


def split_windows(tokens: Tokens, slots: int) -> list[list[int]]:
    """A text's ids in pieces of at most `slots`, each cut where it hurts least.

    A cut leaves at most half of the window unused. Among the places that allows, the best kind wins (a sentence's end,
    then a comma, a word, a token), and among equals the last. The vectors of one textual inversion stay together, also
    where that leaves more unused; only one that has more vectors than there are slots is cut.

    Returns:
        at least one piece; an empty text is one empty piece.
    """
    pieces, start = [], 0
    while len(tokens.ids) - start > slots:
        end = _best_end(tokens.cuts, start, slots)
        pieces.append(tokens.ids[start:end])
        start = end
    return [*pieces, tokens.ids[start:]]


def _best_end(cuts: list[Cut], start: int, slots: int) -> int:
    """Where a window that begins at token `start` ends, exclusive."""
    half = start + slots - slots // 2

    def goodness(end: int) -> tuple:
        return cuts[end - 1] > Cut.NEVER, end >= half, cuts[end - 1], end

    return max(range(start + 1, start + slots + 1), key=goodness)


def join_windows(states: torch.Tensor, n_tokens: list[int], empty: torch.Tensor | None, length: int) -> torch.Tensor:
    """The states of a text's windows as those of one long window.

    BOS of the first window, every text token in order, EOS of the last window, then pads: the last window's own, and
    when those run out the positions after BOS of an empty window, as often as needed. So token j of a text stands at
    position 1 + j, whatever an encoder's window is, and two encoders' states belong together.

    Args:
        states: [windows, window, width], each `[BOS, text, EOS, pads]`.
        n_tokens: [windows] text tokens in each.
        empty: [window, width] states of `[BOS, EOS, pads]`; None if the last window's pads suffice.
        length: positions wanted, at least the text's tokens and two.

    Returns:
        [length, width]
    """
    texts = [row[1 : 1 + n] for row, n in zip(states, n_tokens, strict=True)]
    parts = [states[0, :1], *texts, states[-1, 1 + n_tokens[-1] :]]
    missing = length - sum(len(part) for part in parts)
    if missing > 0:
        parts += [empty[1:]] * math.ceil(missing / len(empty[1:]))
    return torch.cat(parts)[:length]


class SDXLLongPromptMixin:
    """Lets any SDXL pipeline of diffusers read prompts of any length. Put it first: `class X(Mixin, Pipeline)`.

    A prompt that fits the shorter window (77 tokens with BOS and EOS, for SDXL's own encoders) is encoded as diffusers
    encodes it, bit for bit. A longer one is encoded at the shortest of 152, 227 and 248 positions that holds it
    (without a 248-position encoder: 152, 227, 302, ...), then at whole windows more, see `positions_for`. Prompt,
    negative prompt and batch-mates share the longest length that one of them needs. An encoder whose window is shorter
    than that reads the text in several windows (`split_windows`, `join_windows`). Nothing is ever truncated.
    """

    _negative_clip_skip = False

    def set_long_prompt(self, *, negative_clip_skip: bool = False):
        """Sets how long prompts are read; what is not named returns to its default.

        Args:
            negative_clip_skip: the negative prompt follows `clip_skip` too. In diffusers it never does.

        Returns:
            the pipeline itself
        """
        self._negative_clip_skip = negative_clip_skip
        return self

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
        """Prompts as the UNet reads them. Arguments and results are those of diffusers' method of this name.

        Args:
            prompt: what to draw, one text or a batch; None if `prompt_embeds` is given.
            prompt_2: for the second text encoder, if it is to read something else. Where `text_encoder` is None, the
                only encoder reads `prompt`, as in diffusers.
            device: where the results go; the pipeline's device if None.
            num_images_per_prompt: each row is repeated this often.
            do_classifier_free_guidance: if False, the negative prompt is not used and not counted.
            negative_prompt: what not to draw. None means zeros if the pipeline has `force_zeros_for_empty_prompt`, and
                those do not count; otherwise it means "".
            negative_prompt_2: for the second text encoder, if it is to read something else.
            prompt_embeds: [batch, positions, width] made earlier, instead of `prompt`. Fixes the length.
            negative_prompt_embeds: likewise for the negative prompt.
            pooled_prompt_embeds: [batch, pooled width] made earlier.
            negative_pooled_prompt_embeds: likewise for the negative prompt.
            lora_scale: LoRA layers of the text encoders are scaled by this during the call.
            clip_skip: how many layers before the penultimate one to stop.

        Returns:
            prompt_embeds [batch * num_images_per_prompt, positions, width], negative_prompt_embeds of that shape,
            pooled_prompt_embeds [batch * num_images_per_prompt, pooled width], negative_pooled_prompt_embeds of that
            shape. Pooled embeddings are those of the first window. Without guidance the negatives are what was passed.

        Raises:
            ValueError: batches of different sizes; a text that does not fit the length of embeddings passed in.
        """
        device = device or self._execution_device
        guided = do_classifier_free_guidance
        prompts = None if prompt_embeds is not None else self._tokenize(prompt, prompt_2)
        batch_size = prompt_embeds.shape[0] if prompts is None else len(prompts[0])
        negatives = None
        if guided and negative_prompt_embeds is None:
            negatives = self._tokenize_negative(negative_prompt, negative_prompt_2, batch_size)
        length = self._shared_length(prompts, negatives, prompt_embeds, negative_prompt_embeds if guided else None)

        with self._scaled_lora(lora_scale):
            if prompts is not None:
                prompt_embeds, pooled = self._encode(prompts, length, clip_skip, device)
                pooled_prompt_embeds = pooled if pooled_prompt_embeds is None else pooled_prompt_embeds
            if negatives is not None:
                negative_clip_skip = clip_skip if self._negative_clip_skip else None
                negative_prompt_embeds, pooled = self._encode(negatives, length, negative_clip_skip, device)
                if negative_pooled_prompt_embeds is None:
                    negative_pooled_prompt_embeds = pooled
        if guided and negative_prompt_embeds is None:
            negative_prompt_embeds = torch.zeros_like(prompt_embeds)
            negative_pooled_prompt_embeds = torch.zeros_like(pooled_prompt_embeds)

        dtype = self.unet.dtype if self.text_encoder_2 is None else self.text_encoder_2.dtype
        prompt_embeds = _repeat(prompt_embeds.to(dtype=dtype, device=device), num_images_per_prompt)
        pooled_prompt_embeds = _repeat(pooled_prompt_embeds, num_images_per_prompt)
        if guided:
            negative_prompt_embeds = _repeat(
                negative_prompt_embeds.to(dtype=dtype, device=device), num_images_per_prompt
            )
            negative_pooled_prompt_embeds = _repeat(negative_pooled_prompt_embeds, num_images_per_prompt)
        return prompt_embeds, negative_prompt_embeds, pooled_prompt_embeds, negative_pooled_prompt_embeds

    def prompt_layout(
        self,
        prompt: str | list[str],
        prompt_2: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        negative_prompt_2: str | list[str] | None = None,
        do_classifier_free_guidance: bool = True,
    ) -> PromptLayout:
        """How `encode_prompt` reads these prompts, without running the text encoders."""
        prompts = self._tokenize(prompt, prompt_2)
        negatives = None
        if do_classifier_free_guidance:
            negatives = self._tokenize_negative(negative_prompt, negative_prompt_2, len(prompts[0]))
        positions = self._shared_length(prompts, negatives)
        windows = []
        for (_, encoder), texts in zip(self._text_encoders(), prompts, strict=False):
            slots = min(encoder.config.max_position_embeddings, positions) - 2
            windows.append(max(len(split_windows(text, slots)) for text in texts))
        return PromptLayout(_longest(prompts), positions, tuple(windows))

    def to_json_string(self) -> str:
        """The pipeline's configuration under the name of diffusers' class, so that a saved folder loads with both."""
        config = json.loads(super().to_json_string())
        config["_class_name"] = next(
            cls.__name__
            for cls in type(self).__mro__
            if issubclass(cls, DiffusionPipeline) and cls.__module__.partition(".")[0] == "diffusers"
        )
        return json.dumps(config, indent=2, sort_keys=True) + "\n"

    def _text_encoders(self) -> list[tuple[PreTrainedTokenizerBase, PreTrainedModel]]:
        """The pipeline's one or two text encoders, each with its tokenizer."""
        if self.text_encoder_2 is None:
            raise ValueError(
                "`text_encoder_2` is None, so no prompt can be encoded: pass `prompt_embeds` and `pooled_prompt_embeds`"
                " (and the negative ones, with guidance)."
            )
        pairs = [(self.tokenizer, self.text_encoder), (self.tokenizer_2, self.text_encoder_2)]
        return [(tokenizer, encoder) for tokenizer, encoder in pairs if encoder is not None]

    def _tokenize_negative(
        self, negative: str | list[str] | None, negative_2: str | list[str] | None, batch_size: int
    ) -> list[list[Tokens]] | None:
        """Like `_tokenize`; None if the negative prompt is to be zeros."""
        if negative is None and self.config.force_zeros_for_empty_prompt:
            return None
        return self._tokenize(negative or "", negative_2, batch_size)

    def _tokenize(
        self, text: str | list[str], text_2: str | list[str] | None, batch_size: int | None = None
    ) -> list[list[Tokens]]:
        """[encoders][batch] tokens; a single text stands for the whole batch."""
        if batch_size is None:
            batch_size = 1 if isinstance(text, str) else len(text)
        tokens = []
        for (tokenizer, _), texts in zip(self._text_encoders(), (text, text_2 or text), strict=False):
            texts = [texts] * batch_size if isinstance(texts, str) else list(texts)
            if len(texts) != batch_size:
                raise ValueError(f"prompts must have one batch size, got {batch_size} and {len(texts)}: {texts}")
            tokens.append(self._tokens(texts, tokenizer))
        return tokens

    def _tokens(self, texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
        added = tokenizer.added_tokens_encoder
        # Only inversions of several vectors need converting, and converting warns of any text past the window.
        if isinstance(self, TextualInversionLoaderMixin) and any(name.endswith("_1") for name in added):
            texts = self.maybe_convert_prompt(texts, tokenizer)
        # verbose=False: the warning that a text exceeds the model's window does not hold here
        batch = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens = []
        for text, ids, spans in zip(texts, batch["input_ids"], batch["offset_mapping"], strict=True):
            names = [name if name in added else None for name in tokenizer.convert_ids_to_tokens(ids)]
            tokens.append(Tokens(ids, rate_cuts(text, spans, names)))
        return tokens

    def _shared_length(
        self, prompts: list[list[Tokens]] | None, negatives: list[list[Tokens]] | None, *given: torch.Tensor | None
    ) -> int | None:
        """Positions for both prompts: those of embeddings passed in, else as many as the longest text needs."""
        texts = (prompts or []) + (negatives or [])
        fixed = next((embeds.shape[1] for embeds in given if embeds is not None), None)
        if not texts:
            return fixed
        n_tokens = _longest(texts)
        if fixed is None:
            windows = [encoder.config.max_position_embeddings for _, encoder in self._text_encoders()]
            return positions_for(n_tokens, windows)
        if n_tokens + 2 > fixed:
            raise ValueError(
                f"a text of {n_tokens} tokens, BOS and EOS do not fit the {fixed} positions of the embeddings that were"
                " passed in: encode prompt and negative prompt together, so that they share a length."
            )
        return fixed

    def _encode(
        self, texts: list[list[Tokens]], length: int, clip_skip: int | None, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings [batch, length, width of both encoders] and the second encoder's pooled [batch, pooled width]."""
        embeds = []
        for (tokenizer, encoder), tokens in zip(self._text_encoders(), texts, strict=False):
            window = min(encoder.config.max_position_embeddings, length)
            split = [split_windows(text, window - 2) for text in tokens]  # [batch][windows] ids
            rows = [piece for pieces in split for piece in pieces]
            # One empty window lends its pads to all texts whose last window has too few of its own.
            lacking = any(window + sum(map(len, pieces[:-1])) < length for pieces in split)
            ids = _window_ids(rows + [[]] * lacking, window, tokenizer)
            inputs = device if get_module_execution_device is None else get_module_execution_device(encoder)
            output = encoder(ids.to(inputs), output_hidden_states=True)
            # "2": SDXL was trained on the penultimate layer.
            states = output.hidden_states[-2 - (clip_skip or 0)].to(device)
            counts = [len(pieces) for pieces in split]
            joined = [
                join_windows(own, [len(piece) for piece in pieces], states[-1] if lacking else None, length)
                for own, pieces in zip(states[: len(rows)].split(counts), split, strict=True)
            ]
            embeds.append(torch.stack(joined))
        # `output` and `counts` are now the second encoder's, the one whose pooled embedding SDXL uses.
        first_windows = list(itertools.accumulate([0, *counts[:-1]]))
        return torch.concat(embeds, dim=-1), output.text_embeds[first_windows]

    @contextmanager
    def _scaled_lora(self, scale: float | None) -> Iterator[None]:
        """Scales the text encoders' LoRA layers, and gives them back exactly the scales they had."""
        if scale is None or not isinstance(self, StableDiffusionXLLoraLoaderMixin):
            yield
            return
        self._lora_scale = scale  # what diffusers' `lora_scale` reports
        encoders = [encoder for encoder in (self.text_encoder, self.text_encoder_2) if encoder is not None]
        layers = [
            module
            for encoder in encoders
            for module in encoder.modules()
            if hasattr(module, "scale_layer") and hasattr(module, "scaling")  # PEFT's layers
        ]
        before = [dict(layer.scaling) for layer in layers]
        try:
            for layer in layers:
                layer.scale_layer(scale)
            yield
        finally:
            # Dividing by the scale would round, and cannot undo a scale of 0.
            for layer, scaling in zip(layers, before, strict=True):
                layer.scaling.update(scaling)


def _longest(texts: list[list[Tokens]]) -> int:
    return max(len(tokens.ids) for batch in texts for tokens in batch)


def _window_ids(rows: list[list[int]], window: int, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """[rows, window] ids `[BOS, row, EOS, pads]`, with the tokenizer's own pad token."""
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    return torch.tensor([[bos, *row, eos] + [pad] * (window - 2 - len(row)) for row in rows])


def _repeat(embeds: torch.Tensor, times: int) -> torch.Tensor:
    """Each row `times` times in succession, [batch, ...] -> [batch * times, ...]."""
    return embeds.repeat_interleave(times, dim=0)
