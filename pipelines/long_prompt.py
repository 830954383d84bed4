"""Prompts of any length for diffusers' SDXL and Stable Diffusion 1.5 pipelines."""

import itertools
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from diffusers import DiffusionPipeline
from diffusers.loaders import (
    StableDiffusionLoraLoaderMixin,
    StableDiffusionXLLoraLoaderMixin,
    TextualInversionLoaderMixin,
)
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from debias_diffusion.chunks import (
    Chunk,
    Cut,
    Tokens,
    fast_tokenizer,
    join_chunks,
    lacks_pads,
    positions_for,
    split_text,
    tokenize_text,
    weigh,
)

from .weighting import parse_weights

try:
    from diffusers.utils.torch_utils import get_module_execution_device
except ImportError:  # older diffusers run both encoders on the pipeline's one device
    get_module_execution_device = None


class LongPromptOptions(NamedTuple):
    """See `set_long_prompt`."""

    negative_clip_skip: bool = False
    strict: bool = False
    weighting: bool = False
    overlap: bool = True


class PromptLayout(NamedTuple):
    """How a prompt is encoded.

    Attributes:
        tokens: tokens of the longest text without BOS and EOS, the most of any tokenizer.
        positions: length of the embeddings.
        chunks: for each text encoder, the number of chunks that the longest text takes.
    """

    tokens: int
    positions: int
    chunks: tuple[int, ...]


class LongPromptMixin:
    """Shared by SDXL and Stable Diffusion 1.5: from texts to the hidden states of each text encoder."""

    _long_prompt = LongPromptOptions()

    def set_long_prompt(
        self,
        *,
        negative_clip_skip: bool = False,
        strict: bool = False,
        weighting: bool = False,
        overlap: bool = True,
    ):
        """Sets how long prompts are read; every option that is not passed returns to its default.

        Args:
            negative_clip_skip: apply `clip_skip` to the negative prompt too. diffusers never does.
            strict: raise a ValueError for a prompt that an encoder would read in more than one chunk.
            weighting: read `(word:1.3)`, `word++`, `[word]` and BREAK as A1111's interface and compel do, see
                `parse_weights`; a weight moves a token's hidden states away from those of the empty prompt, as in
                ComfyUI.
            overlap: read each chunk but the first together with the end of the text before it (`split_overlapping`), so
                that "it" finds what it means. Costs the text encoders up to twice the chunks. False reads each chunk by
                itself, as other programs do.

        Returns:
            the pipeline itself
        """
        self._long_prompt = LongPromptOptions(negative_clip_skip, strict, weighting, overlap)
        return self

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs):
        """As in diffusers; the options of `set_long_prompt` are taken over from the other pipeline."""
        pipe = super().from_pipe(pipeline, **kwargs)
        pipe._long_prompt = getattr(pipeline, "_long_prompt", LongPromptOptions())
        return pipe

    def __setattr__(self, name: str, value):
        if name in ("text_encoder", "text_encoder_2"):
            _warn_of_lost_lora(name, self.__dict__.get(name), value)
        super().__setattr__(name, value)

    def to_json_string(self) -> str:
        """The configuration, with the name of diffusers' class, so that both classes load a saved folder."""
        config = json.loads(super().to_json_string())
        config["_class_name"] = next(
            cls.__name__
            for cls in type(self).__mro__
            if issubclass(cls, DiffusionPipeline) and cls.__module__.partition(".")[0] == "diffusers"
        )
        return json.dumps(config, indent=2, sort_keys=True) + "\n"

    def _text_encoders(self) -> list[tuple[PreTrainedTokenizerBase, PreTrainedModel]]:
        """The pipeline's text encoders, each with its tokenizer."""
        raise NotImplementedError

    def _states(
        self, encoder: PreTrainedModel, ids: torch.Tensor, clip_skip: int | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [rows, positions, width] for the UNet, and pooled embeddings [rows, width] or None."""
        raise NotImplementedError

    def _layout(self, texts: list[list[Tokens]], positions: int) -> PromptLayout:
        chunks = tuple(
            max(len(self._split(text, _context_length(encoder, positions) - 2)) for text in batch)
            for (_, encoder), batch in zip(self._text_encoders(), texts, strict=False)
        )
        return PromptLayout(_longest(texts), positions, chunks)

    def _split(self, text: Tokens, slots: int) -> list[Chunk]:
        """The chunks that an encoder reads, of at most `slots` tokens."""
        return split_text(text, slots, self._long_prompt.overlap)

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
            parts = parse_weights(text) if self._long_prompt.weighting else [[(text, 1.0)]]
            if converts:
                parts = [[(self.maybe_convert_prompt(run, quiet), weight) for run, weight in part] for part in parts]
            tokens.append(_join_parts([_part_tokens(part, tokenizer) for part in parts]))
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
            return positions_for(n_tokens, [_context_length(encoder) for _, encoder in self._text_encoders()])
        if n_tokens + 2 > fixed:
            raise ValueError(
                f"a text of {n_tokens} tokens, BOS and EOS do not fit the {fixed} positions of the given embeddings:"
                " encode prompt and negative prompt together, so that they share a length."
            )
        return fixed

    def _check_strict(self, texts: list[list[Tokens]], positions: int) -> None:
        if self._long_prompt.strict and max((layout := self._layout(texts, positions)).chunks) > 1:
            lengths = [_context_length(encoder) for _, encoder in self._text_encoders()]
            raise ValueError(
                f"a text of {layout.tokens} tokens takes {' and '.join(map(str, layout.chunks))} chunks of the text"
                f" encoders, which have {' and '.join(map(str, lengths))} positions, and `strict` allows one: shorten"
                " it, use an encoder with more positions, or call set_long_prompt(strict=False)."
            )

    def _encode(
        self, texts: list[list[Tokens]], length: int, clip_skip: int | None, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Embeddings [batch, length, width of all encoders] and the last encoder's pooled [batch, pooled width]."""
        self._check_strict(texts, length)
        embeds, pooled = [], None
        for (tokenizer, encoder), batch in zip(self._text_encoders(), texts, strict=False):
            states, pooled = self._encode_with(tokenizer, encoder, batch, length, clip_skip, device)
            embeds.append(states)
        return torch.concat(embeds, dim=-1), pooled

    def _encode_with(
        self,
        tokenizer: PreTrainedTokenizerBase,
        encoder: PreTrainedModel,
        texts: list[Tokens],
        length: int,
        clip_skip: int | None,
        device: torch.device,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One encoder's hidden states [batch, length, width] and the pooled embeddings of each text's first chunk."""
        context = _context_length(encoder, length)
        split = [self._split(text, context - 2) for text in texts]  # [batch][chunks]
        chunks = [(text, chunk) for text, parts in zip(texts, split, strict=True) for chunk in parts]
        rows = [[text.ids[at] for at in chunk.read] for text, chunk in chunks]
        weights = [[text.weights[at] for at in chunk.read] for text, chunk in chunks]
        weighted = any(weight != 1 for row in weights for weight in row)
        # The pads of one empty chunk serve all texts whose last chunk has too few.
        lacking = any(lacks_pads(parts, context, length) for parts in split)
        ids = _chunk_ids(rows + [[]] * (lacking or weighted), context, tokenizer)
        inputs = device if get_module_execution_device is None else get_module_execution_device(encoder)
        states, pooled = self._states(encoder, ids.to(inputs), clip_skip)
        states, empty = states[: len(rows)].to(device), states[-1].to(device) if lacking or weighted else None
        if weighted:
            padded = [[1.0, *row] + [1.0] * (context - 1 - len(row)) for row in weights]
            states = weigh(states, torch.tensor(padded), empty)
        counts = [len(parts) for parts in split]
        joined = [
            join_chunks(text_states, parts, empty, length)
            for text_states, parts in zip(states.split(counts), split, strict=True)
        ]
        first_chunks = list(itertools.accumulate([0, *counts[:-1]]))
        return torch.stack(joined), None if pooled is None else pooled[first_chunks]

    @contextmanager
    def _scaled_lora(self, scale: float | None) -> Iterator[None]:
        """Scales the text encoders' LoRA layers within the context, and restores their scales exactly."""
        if scale is None or not isinstance(self, StableDiffusionXLLoraLoaderMixin | StableDiffusionLoraLoaderMixin):
            yield
            return
        self._lora_scale = scale  # what diffusers' `lora_scale` reports
        encoders = [self.text_encoder, getattr(self, "text_encoder_2", None)]
        layers = [
            module
            for encoder in encoders
            if encoder is not None
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


class SDXLLongPromptMixin(LongPromptMixin):
    """Lets any SDXL pipeline of diffusers read prompts of any length. Put it first: `class X(Mixin, Pipeline)`.

    A prompt that fits the shorter context length (77 tokens with BOS and EOS, for SDXL's encoders) is encoded as in
    diffusers, bit for bit. A longer one is encoded at the shortest of 152, 227 and 248 positions that holds it (without
    a 248-token encoder: 152, 227, 302, ...), beyond that at whole chunks more, see `positions_for`. Prompt, negative
    prompt and the other prompts of a batch share the longest length that any of them needs. An encoder of a shorter
    context length reads the text in several chunks (`split_chunks`, `join_chunks`). Nothing is ever truncated.
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
            device: device of the results; the pipeline's if None.
            num_images_per_prompt: repeats of each row.
            do_classifier_free_guidance: if False, the negative prompt is not used and does not count for the length.
            negative_prompt: None means zeros if the pipeline has `force_zeros_for_empty_prompt`, which do not count for
                the length; otherwise it means "".
            negative_prompt_2: negative prompt of the second text encoder, if it differs.
            prompt_embeds: [batch, positions, width] computed earlier, instead of `prompt`. Fixes the length.
            negative_prompt_embeds: likewise for the negative prompt.
            pooled_prompt_embeds: [batch, pooled width] computed earlier.
            negative_pooled_prompt_embeds: likewise for the negative prompt.
            lora_scale: LoRA layers of the text encoders are scaled by this during the call.
            clip_skip: number of layers to stop before the penultimate one.

        Returns:
            prompt_embeds [batch * num_images_per_prompt, positions, width], negative_prompt_embeds of that shape,
            pooled_prompt_embeds [batch * num_images_per_prompt, pooled width], negative_pooled_prompt_embeds of that
            shape. Pooled embeddings are of the first chunk. Without guidance the negatives are returned as passed.

        Raises:
            ValueError: batches of different sizes; a text that does not fit the length of embeddings passed in; under
                `strict`, a text of more than one chunk.
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
                negative_clip_skip = clip_skip if self._long_prompt.negative_clip_skip else None
                negative_prompt_embeds, pooled = self._encode(negatives, length, negative_clip_skip, device)
                if negative_pooled_prompt_embeds is None:
                    negative_pooled_prompt_embeds = pooled
        if guided and negative_prompt_embeds is None:
            negative_prompt_embeds = torch.zeros_like(prompt_embeds)
            negative_pooled_prompt_embeds = torch.zeros_like(pooled_prompt_embeds)

        dtype = _result_dtype(prompt_embeds, self.unet if self.text_encoder_2 is None else self.text_encoder_2)
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
        """How `encode_prompt` would encode these prompts, without running the text encoders."""
        prompts = self._tokenize(prompt, prompt_2)
        negatives = None
        if do_classifier_free_guidance:
            negatives = self._tokenize_negative(negative_prompt, negative_prompt_2, len(prompts[0]))
        return self._layout(prompts, self._shared_length(prompts, negatives))

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
        """Like `_tokenize`; None if the negative prompt is encoded as zeros."""
        if negative is None and self.config.force_zeros_for_empty_prompt:
            return None
        return self._tokenize(negative or "", negative_2, batch_size=batch_size)

    def _states(self, encoder, ids, clip_skip):
        output = encoder(ids, output_hidden_states=True)
        # "2": SDXL was trained on the penultimate layer.
        return output.hidden_states[-2 - (clip_skip or 0)], getattr(output, "text_embeds", None)


def encode_tokens(
    encoder: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: list[Tokens], length: int, **options
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What one of SDXL's encoders gives the UNet for texts of any length, with gradients.

    Args:
        tokens: of each text, from `chunks.tokenize_text`.
        length: positions of the result, at least those of the longest text, BOS and EOS.
        options: of `set_long_prompt`.

    Returns:
        hidden states [texts, length, width]; pooled embeddings [texts, pooled width] of the first chunks, None for an
        encoder without a projection.
    """
    reader = SDXLLongPromptMixin().set_long_prompt(**options)
    return reader._encode_with(tokenizer, encoder, tokens, length, None, encoder.device)


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
        """Encodes prompts for the UNet. Arguments and results are those of diffusers' method.

        Args:
            prompt: one text or a batch; None if `prompt_embeds` is given.
            device: device of the results; the pipeline's if None.
            num_images_per_prompt: repeats of each row.
            do_classifier_free_guidance: if False, the negative prompt is not used and does not count for the length.
            negative_prompt: "" if None.
            prompt_embeds: [batch, positions, width] computed earlier, instead of `prompt`. Fixes the length.
            negative_prompt_embeds: likewise for the negative prompt.
            lora_scale: LoRA layers of the text encoder are scaled by this during the call.
            clip_skip: number of layers to stop before the last one; the final norm is still applied.

        Returns:
            prompt_embeds [batch * num_images_per_prompt, positions, width] and negative_prompt_embeds of that shape.
            Without guidance the latter are returned as passed.

        Raises:
            ValueError: batches of different sizes; a text that does not fit the length of embeddings passed in; under
                `strict`, a text of more than one chunk.
        """
        device = device or self._execution_device
        guided = do_classifier_free_guidance
        prompts = None if prompt_embeds is not None else self._tokenize(prompt)
        batch_size = prompt_embeds.shape[0] if prompts is None else len(prompts[0])
        negatives = None
        if guided and negative_prompt_embeds is None:
            negatives = self._tokenize(negative_prompt or "", batch_size=batch_size)
        length = self._shared_length(prompts, negatives, prompt_embeds, negative_prompt_embeds if guided else None)

        with self._scaled_lora(lora_scale):
            if prompts is not None:
                prompt_embeds, _ = self._encode(prompts, length, clip_skip, device)
            if negatives is not None:
                negative_clip_skip = clip_skip if self._long_prompt.negative_clip_skip else None
                negative_prompt_embeds, _ = self._encode(negatives, length, negative_clip_skip, device)

        dtype = _result_dtype(prompt_embeds, self.unet if self.text_encoder is None else self.text_encoder)
        prompt_embeds = _repeat(prompt_embeds.to(dtype=dtype, device=device), num_images_per_prompt)
        if guided:
            negative_prompt_embeds = _repeat(
                negative_prompt_embeds.to(dtype=dtype, device=device), num_images_per_prompt
            )
        return prompt_embeds, negative_prompt_embeds

    def prompt_layout(
        self,
        prompt: str | list[str],
        negative_prompt: str | list[str] | None = None,
        do_classifier_free_guidance: bool = True,
    ) -> PromptLayout:
        """How `encode_prompt` would encode these prompts, without running the text encoder."""
        prompts = self._tokenize(prompt)
        negatives = None
        if do_classifier_free_guidance:
            negatives = self._tokenize(negative_prompt or "", batch_size=len(prompts[0]))
        return self._layout(prompts, self._shared_length(prompts, negatives))

    def _text_encoders(self):
        if self.text_encoder is None:
            raise ValueError(
                "`text_encoder` is None, so no prompt can be encoded: pass `prompt_embeds` (and"
                " `negative_prompt_embeds`, with guidance)."
            )
        return [(self.tokenizer, self.text_encoder)]

    def _states(self, encoder, ids, clip_skip):
        with _last_layer_is(encoder, clip_skip or 0):
            return encoder(ids)[0], None


@contextmanager
def _last_layer_is(encoder: PreTrainedModel, skipped: int) -> Iterator[None]:
    """Within the context, the encoder's final norm reads the hidden states `skipped` layers before the last one.

    Uses hooks, because offloaded encoders work through `forward` only.
    """
    if not skipped:
        yield
        return
    model = getattr(encoder, "text_model", encoder)  # transformers 5 has no such part
    layers, states = model.encoder.layers, []
    if not 0 < skipped < len(layers):
        raise ValueError(f"`clip_skip` must be from 0 to {len(layers) - 1} for this text encoder, got {skipped}")

    def keep(module, inputs, output):
        states.append(output[0] if isinstance(output, tuple) else output)

    hooks = [
        layers[-1 - skipped].register_forward_hook(keep),
        model.final_layer_norm.register_forward_pre_hook(lambda module, inputs: (states.pop(), *inputs[1:])),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _part_tokens(runs: list[tuple[str, float]], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """The tokens of weighted runs of text, tokenized as one text."""
    text = "".join(run for run, _ in runs)
    tokens, spans = tokenize_text(text, tokenizer)
    of_characters = [weight for run, weight in runs for _ in run]
    return tokens._replace(weights=[of_characters[start] for start, _ in spans])


def _join_parts(parts: list[Tokens]) -> Tokens:
    """Joins the parts between BREAKs into one text; parts without tokens are dropped."""
    parts = [part for part in parts if part.ids] or parts[:1]
    for part in parts[:-1]:
        part.cuts[-1] = Cut.BREAK
    return Tokens(*(list(itertools.chain(*column)) for column in zip(*parts, strict=True)))


def _context_length(encoder: PreTrainedModel, positions: int | None = None) -> int:
    """The encoder's context length, at most `positions`."""
    length = encoder.config.max_position_embeddings
    return length if positions is None else min(length, positions)


def _longest(texts: list[list[Tokens]]) -> int:
    return max(len(tokens.ids) for batch in texts for tokens in batch)


def _chunk_ids(rows: list[list[int]], length: int, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """[rows, length] ids `[BOS, row, EOS, pads]`, with the tokenizer's pad token."""
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    return torch.tensor([[bos, *row, eos] + [pad] * (length - 2 - len(row)) for row in rows])


def _warn_of_lost_lora(name: str, old: PreTrainedModel | None, new: PreTrainedModel | None) -> None:
    """A LoRA lives in the layers it was loaded into; diffusers does not say when it goes with a replaced encoder."""
    lost = sorted(set(getattr(old, "peft_config", ())) - set(getattr(new, "peft_config", ())))
    if lost and new is not None:
        warnings.warn(
            f"the new {name} is without the LoRA {', '.join(lost)}, which was loaded into the old one: set the encoder"
            " first, then load LoRAs (unload_lora_weights(), then load_lora_weights(...) again).",
            stacklevel=3,
        )


def _result_dtype(embeds: torch.Tensor, model: torch.nn.Module | None) -> torch.dtype:
    """The UNet's input dtype: the model's, as in diffusers, unless that only stores its weights (float8)."""
    return embeds.dtype if model is None or model.dtype.itemsize == 1 else model.dtype


def _repeat(embeds: torch.Tensor, times: int) -> torch.Tensor:
    """Each row `times` times in succession, [batch, ...] -> [batch * times, ...]."""
    return embeds.repeat_interleave(times, dim=0)
