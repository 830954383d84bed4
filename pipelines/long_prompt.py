"""Prompts of any length for diffusers' SDXL and Stable Diffusion 1.5 pipelines."""

import json
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple, get_args

import torch
from diffusers import DiffusionPipeline
from diffusers.loaders import TextualInversionLoaderMixin
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from debias_diffusion.chunks import TRAINED_POSITIONS, Tokens, fast_tokenizer, positions_for, split_text
from debias_diffusion.encoders import Reading
from debias_diffusion.reading import context_length, encode_texts, last_states, penultimate_states, tokenize_parts

from .weighting import parse_weights

try:
    from diffusers.utils.torch_utils import get_module_execution_device
except ImportError:  # older diffusers run both encoders on the pipeline's one device
    get_module_execution_device = None

# One thread encodes at a time: pipelines may share encoders, and the scale of a LoRA is set in the encoder's layers.
_ENCODING = threading.RLock()


class PromptLayout(NamedTuple):
    """How a prompt is encoded.

    Attributes:
        tokens: tokens of the longest text without BOS and EOS, the most of any tokenizer, also where it is cut.
        positions: length of the embeddings.
        chunks: for each text encoder, the number of chunks that the longest text takes.
        cut_at: the number of tokens, BOS and EOS included, at which texts are cut; None if they are read whole.
    """

    tokens: int
    positions: int
    chunks: tuple[int, ...]
    cut_at: int | None = None


@dataclass(frozen=True, kw_only=True)
class LongPromptOptions:
    """How prompts are read: the options of `set_long_prompt`.

    Attributes:
        negative_clip_skip: apply `clip_skip` to the negative prompt too. diffusers never does.
        strict: raise a ValueError for a prompt that an encoder would read in more than one chunk.
        weighting: read `(word:1.3)`, `word++`, `[word]` and BREAK as A1111's interface and compel do, see
            `parse_weights`; a weight moves a token's hidden states away from those of the empty prompt, as in ComfyUI.
        reading: of texts longer than the context length. "overlap" reads each chunk but the first together with the
            end of the text before it (`split_text`), so that pronouns keep their antecedents; costs the text encoders
            up to twice the chunks. "separate" reads each chunk by itself, as other programs do. "cut" cuts at 77
            tokens, as diffusers does.
        positions: length of all embeddings, at least 77, for pipelines that encode in several calls and for backends
            with static shapes; a longer prompt is a ValueError. None: as many as the longest text needs.
    """

    negative_clip_skip: bool = False
    strict: bool = False
    weighting: bool = False
    reading: Reading = "overlap"
    positions: int | None = None

    def __post_init__(self):
        if self.reading not in get_args(Reading):
            raise ValueError(f"reading is {self.reading!r}, but must be {' or '.join(get_args(Reading))}.")
        if self.positions is not None and self.positions < TRAINED_POSITIONS:
            raise ValueError(f"positions is {self.positions}, but must be at least {TRAINED_POSITIONS}, or None.")


class LongPromptMixin:
    """Shared by SDXL and Stable Diffusion 1.5: from texts to the hidden states of each text encoder.

    A subclass has `_text_encoders()`, (tokenizer, encoder) of each; and `_states(encoder, ids, clip_skip)`, which gives
    hidden states [rows, positions, width] for the UNet, and pooled embeddings [rows, width] or None.
    """

    _long_prompt = LongPromptOptions()

    def set_long_prompt(self, **options):
        """Sets how prompts are read, by the fields of `LongPromptOptions`; what is not passed returns to its default.

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

    def __setattr__(self, name: str, value):
        if name in ("text_encoder", "text_encoder_2") and value is not None:
            # A LoRA lives in the layers it was loaded into; diffusers does not say when it goes with them.
            lost = set(getattr(self.__dict__.get(name), "peft_config", ())) - set(getattr(value, "peft_config", ()))
            if lost:
                warnings.warn(
                    f"the new {name} is without the LoRA {', '.join(sorted(lost))}, which was loaded into the old one:"
                    " set the encoder first, then load LoRAs (unload_lora_weights(), then load_lora_weights(...)).",
                    stacklevel=2,
                )
        super().__setattr__(name, value)

    def to_json_string(self) -> str:
        """The configuration, with the name of the class without this mixin, so that both load a saved folder."""
        config = json.loads(super().to_json_string())
        config["_class_name"] = next(
            cls.__name__
            for cls in type(self).__mro__
            if issubclass(cls, DiffusionPipeline) and not issubclass(cls, LongPromptMixin)
        )
        return json.dumps(config, indent=2, sort_keys=True) + "\n"

    def _layout(self, texts: list[list[Tokens]], positions: int) -> PromptLayout:
        read, overlap = self._cut(texts), self._long_prompt.reading != "separate"
        chunks = tuple(
            max(len(split_text(text, context_length(encoder, positions) - 2, overlap)) for text in batch)
            for (_, encoder), batch in zip(self._text_encoders(), read, strict=False)
        )
        return PromptLayout(_longest(texts), positions, chunks, self._cut_at)

    @property
    def _cut_at(self) -> int | None:
        if self._long_prompt.reading != "cut":
            return None
        return min(TRAINED_POSITIONS, *(context_length(encoder) for _, encoder in self._text_encoders()))

    def _cut(self, texts: list[list[Tokens]]) -> list[list[Tokens]]:
        """What is read of the tokens."""
        end = self._cut_at and self._cut_at - 2
        return [[tokens.first(end) for tokens in batch] for batch in texts] if end else texts

    def _tokenize(self, *texts: str | list[str] | None, batch_size: int | None = None) -> list[list[Tokens]]:
        """[encoders][batch] tokens. An encoder without a text of its own reads the first one.

        A single text is used for the whole batch.
        """
        first = texts[0]
        if batch_size is None:
            batch_size = 1 if isinstance(first, str) else len(first)
        if not batch_size:
            raise ValueError("the batch of prompts is empty: give a prompt, or a list of at least one")
        tokens = []
        for (tokenizer, _), prompts in zip(self._text_encoders(), texts, strict=False):
            prompts = prompts or first
            prompts = [prompts] * batch_size if isinstance(prompts, str) else list(prompts)
            if len(prompts) != batch_size:
                raise ValueError(f"prompts must have one batch size, got {batch_size} and {len(prompts)}: {prompts}")
            tokens.append(self._tokens(prompts, tokenizer))
        return tokens

    def _tokenize_negative(
        self, negative: str | list[str] | None, *negative_2: str | list[str] | None, batch_size: int
    ) -> list[list[Tokens]] | None:
        """What is read of the negative prompt, as `_tokenize` gives it; None if it is encoded as zeros."""
        if negative is None and self.config.get("force_zeros_for_empty_prompt"):
            return None
        return self._cut(self._tokenize(negative or "", *negative_2, batch_size=batch_size))

    def _tokens(self, texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
        added = tokenizer.added_tokens_encoder
        # Only inversions of several vectors need converting.
        converts = isinstance(self, TextualInversionLoaderMixin) and any(name.endswith("_1") for name in added)
        # verbose=False: transformers' warning about texts beyond the context length does not apply
        quiet = SimpleNamespace(
            tokenize=partial(fast_tokenizer(tokenizer).tokenize, verbose=False), added_tokens_encoder=added
        )
        tokens = []
        for text in texts:
            text.encode()  # raises ValueError for half of a surrogate pair, which is no character
            parts = parse_weights(text) if self._long_prompt.weighting else [[(text, 1.0)]]
            if converts:
                parts = [[(self.maybe_convert_prompt(run, quiet), weight) for run, weight in part] for part in parts]
            tokens.append(tokenize_parts(parts, tokenizer))
        return tokens

    def _shared_length(
        self, prompts: list[list[Tokens]] | None, negatives: list[list[Tokens]] | None, *given: torch.Tensor | None
    ) -> int | None:
        """Positions for both prompts: of embeddings passed in, else as set, else as many as the longest text needs."""
        texts = (prompts or []) + (negatives or [])
        fixed = next((embeds.shape[1] for embeds in given if embeds is not None), self._long_prompt.positions)
        if not texts:
            return fixed
        n_tokens = _longest(texts)
        if fixed is None:
            return positions_for(n_tokens, [context_length(encoder) for _, encoder in self._text_encoders()])
        if n_tokens + 2 > fixed:
            raise ValueError(
                f"a text of {n_tokens} tokens, BOS and EOS do not fit the {fixed} positions: encode prompt and negative"
                " prompt together, so that they share a length, or call set_long_prompt with more positions."
            )
        return fixed

    def _encode(
        self, texts: list[list[Tokens]], length: int, clip_skip: int | None, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Embeddings [batch, length, width of all encoders] and the last encoder's pooled [batch, pooled width]."""
        encoders = [encoder for _, encoder in self._text_encoders()]
        if self._long_prompt.strict and max((layout := self._layout(texts, length)).chunks) > 1:
            raise ValueError(
                f"a text of {layout.tokens} tokens takes {' and '.join(map(str, layout.chunks))} chunks of the text"
                f" encoders, which have {' and '.join(str(context_length(encoder)) for encoder in encoders)} positions,"
                " and `strict` allows one: shorten it, use an encoder with more positions, or call"
                " set_long_prompt(strict=False)."
            )
        most = min(encoder.config.num_hidden_layers for encoder in encoders) - 1
        if not 0 <= (clip_skip or 0) <= most:
            raise ValueError(f"`clip_skip` is {clip_skip}, but must be from 0 to {most} for these text encoders")

        def states(encoder: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            inputs = device if get_module_execution_device is None else get_module_execution_device(encoder)
            return self._states(encoder, ids.to(inputs), clip_skip)

        embeds, pooled, overlap = [], None, self._long_prompt.reading != "separate"
        for (tokenizer, encoder), batch in zip(self._text_encoders(), texts, strict=False):
            embedded, pooled = encode_texts(
                encoder, tokenizer, batch, length, overlap=overlap, states=states, device=device
            )
            embeds.append(embedded)
        return torch.concat(embeds, dim=-1), pooled

    def _encode_pair(
        self,
        prompts: tuple,
        negatives: tuple,
        embeds: torch.Tensor | None,
        negative_embeds: torch.Tensor | None,
        *,
        guided: bool,
        device: torch.device | None,
        lora_scale: float | None,
        clip_skip: int | None,
        repeats: int,
        pooled: torch.Tensor | None = None,
        negative_pooled: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Embeddings, negative, pooled and negative pooled ones, of texts for each encoder; what is given stays."""
        device = device or self._execution_device
        tokens = None if embeds is not None else self._cut(self._tokenize(*prompts))
        batch_size = embeds.shape[0] if tokens is None else len(tokens[0])
        negative_tokens = None
        if guided and negative_embeds is None:
            negative_tokens = self._tokenize_negative(*negatives, batch_size=batch_size)
        length = self._shared_length(tokens, negative_tokens, embeds, negative_embeds if guided else None)

        with _ENCODING, self._scaled_lora(lora_scale):
            if tokens is not None:
                embeds, encoded = self._encode(tokens, length, clip_skip, device)
                pooled = encoded if pooled is None else pooled
            if negative_tokens is not None:
                negative_clip_skip = clip_skip if self._long_prompt.negative_clip_skip else None
                negative_embeds, encoded = self._encode(negative_tokens, length, negative_clip_skip, device)
                negative_pooled = encoded if negative_pooled is None else negative_pooled
        if guided and negative_embeds is None:
            negative_embeds, negative_pooled = torch.zeros_like(embeds), torch.zeros_like(pooled)

        # The UNet's input dtype: the encoder's, as in diffusers, unless that only stores its weights (float8).
        model = getattr(self, "text_encoder_2", self.text_encoder)
        model = self.unet if model is None else model  # a compiled model has no truth value
        dtype = embeds.dtype if model is None or model.dtype.itemsize == 1 else model.dtype
        embeds, pooled = _repeat(embeds.to(dtype=dtype, device=device), repeats), _repeat(pooled, repeats)
        if guided:
            negative_embeds = _repeat(negative_embeds.to(dtype=dtype, device=device), repeats)
            negative_pooled = _repeat(negative_pooled, repeats)
        return embeds, negative_embeds, pooled, negative_pooled

    def _pair_layout(self, prompts: tuple, negatives: tuple, guided: bool) -> PromptLayout:
        tokens = self._tokenize(*prompts)
        negative_tokens = self._tokenize_negative(*negatives, batch_size=len(tokens[0])) if guided else None
        return self._layout(tokens, self._shared_length(self._cut(tokens), negative_tokens))

    @contextmanager
    def _scaled_lora(self, scale: float | None) -> Iterator[None]:
        """Scales the text encoders' LoRA layers within the context, and restores their scales exactly."""
        with ExitStack() as stack:
            if scale is not None:
                self._lora_scale = scale  # what diffusers' `lora_scale` reports
                for encoder in (self.text_encoder, getattr(self, "text_encoder_2", None)):
                    if getattr(encoder, "peft_config", None):
                        from peft.helpers import rescale_adapter_scale  # optional

                        stack.enter_context(rescale_adapter_scale(encoder, scale))
            yield


class SDXLLongPromptMixin(LongPromptMixin):
    """Lets any SDXL pipeline of diffusers read prompts of any length. Put it first: `class X(Mixin, Pipeline)`.

    A prompt that fits the shorter context length (77 tokens with BOS and EOS, for SDXL's encoders) is encoded as in
    diffusers, bit for bit. A longer one is encoded at the shortest of 152, 227 and 248 positions that holds it (without
    a 248-token encoder: 152, 227, 302, ...), beyond that at whole chunks more, see `positions_for`. Prompt, negative
    prompt and the other prompts of a batch share the longest length that any of them needs. An encoder of a shorter
    context length reads the text in several chunks (`split_text`, `join_chunks`). Nothing is ever truncated.
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
        prompt_embeds, negative_prompt_embeds, pooled_prompt_embeds, negative_pooled_prompt_embeds = self._encode_pair(
            (prompt, prompt_2),
            (negative_prompt, negative_prompt_2),
            prompt_embeds,
            negative_prompt_embeds,
            guided=do_classifier_free_guidance,
            device=device,
            lora_scale=lora_scale,
            clip_skip=clip_skip,
            repeats=num_images_per_prompt,
            pooled=pooled_prompt_embeds,
            negative_pooled=negative_pooled_prompt_embeds,
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

    def _states(self, encoder, ids, clip_skip):
        return penultimate_states(encoder, ids, clip_skip)


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
        prompt_embeds, negative_prompt_embeds, *_ = self._encode_pair(
            (prompt,),
            (negative_prompt,),
            prompt_embeds,
            negative_prompt_embeds,
            guided=do_classifier_free_guidance,
            device=device,
            lora_scale=lora_scale,
            clip_skip=clip_skip,
            repeats=num_images_per_prompt,
        )
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

    def _states(self, encoder, ids, clip_skip):
        mask = None
        if getattr(encoder.config, "use_attention_mask", False):  # up to the first EOS, which pads, too
            ends = (ids == self.tokenizer.eos_token_id).int().argmax(-1, keepdim=True)
            mask = (torch.arange(ids.shape[1], device=ids.device) <= ends).to(ids.dtype)
        return last_states(encoder, ids, clip_skip, mask)


def _longest(texts: list[list[Tokens]]) -> int:
    return max(len(tokens.ids) for batch in texts for tokens in batch)


def _repeat(embeds: torch.Tensor | None, times: int) -> torch.Tensor | None:
    """Each row `times` times in succession, [batch, ...] -> [batch * times, ...]."""
    return None if embeds is None else embeds.repeat_interleave(times, dim=0)
