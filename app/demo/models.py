"""The demo's models: one SDXL checkpoint, and up to five text encoders that take turns in it."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import torch
from diffusers import SchedulerMixin
from transformers import CLIPTokenizer

from debias_diffusion.chunks import Tokens
from debias_diffusion.encoders import load_text_encoder
from debias_diffusion.errors import UserError, reason
from debias_diffusion.eval.attention import Reader
from debias_diffusion.eval.encoder_names import CHUNKS, ORIGINAL, OVERLAP, check_encoders, labels, split_reading
from debias_diffusion.interchange.text_encoders import TextEncoder
from debias_diffusion.models.shipped import GUIDANCE_SCALE, STEPS
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.checkpoints import (
    Checkpoint,
    default_dtype,
    load_pipeline,
)
from debias_diffusion.pipelines.png import SAMPLERS
from debias_diffusion.pipelines.rendering import SCHEDULERS, make_scheduler, replace_encoder
from debias_diffusion.tokens import CaptionTokenizer

from .request import LongPrompts, Request

TOY = "toy/sdxl"
MOST_ENCODERS = 5
HowRead = Literal["cut", "overlap", "separate"]
_NAMED: dict[str, HowRead] = {OVERLAP: "overlap", CHUNKS: "separate"}  # by the prefix of an encoder's name
_SCHEDULERS = {SAMPLERS[cls]: cls for cls in SCHEDULERS}  # by their names in a request


@dataclass(frozen=True)
class Encoder:
    """One of the demo's first text encoders.

    Attributes:
        label: its name on the page.
        model: in evaluation mode, on the device of all models.
        tokenizer: the encoder's tokenizer.
        how_read: how it reads long prompts, if its name says so; else the request decides.
    """

    label: str
    model: TextEncoder
    tokenizer: CLIPTokenizer
    how_read: HowRead | None = None

    @property
    def context_length(self) -> int:
        """Positions read at once, BOS and EOS included."""
        return self.model.config.max_position_embeddings

    def reader(self) -> Reader:
        """The encoder with a caption tokenizer, for attention and features.

        Raises:
            UserError: the tokenizer does not fit captions.
        """
        try:
            captions = CaptionTokenizer(self.tokenizer, self.context_length)
        except ValueError as error:
            raise UserError(f"The tokenizer of {self.label!r} cannot be used: {reason(error)}.") from error
        return Reader(self.model, captions, self.model.device, digest="")


class DemoModels:
    """One SDXL checkpoint on one device: its UNet, autoencoder and second text encoder serve up to five first encoders.

    Holds no state of a request. Drawing, attention and movement use the device, one at a time; tokens may be counted
    meanwhile.

    Args:
        base: SDXL checkpoint, see `Checkpoint.parse`.
        encoders: replacements of the first text encoder, each anything `load_text_encoder` takes, or "original" for
            the checkpoint's own; "overlap:" or "chunks:" before a name is how it reads long prompts, as in
            `evaluate generation`.
        device: device of all models.
        dtype: dtype of all models; `default_dtype(device)` if None.

    Attributes:
        base: short name of the SDXL checkpoint.
        device, dtype: of all models.
        encoders: by label, in the order given.
        is_toy: whether scenes of the toy world can be drawn and checked; the size is then fixed.
        size: the checkpoint's native (height, width) in pixels.
        schedulers: names that a request may choose, the checkpoint's own first.
        counter: an unchanging copy of the first encoder's tokenizer, to count tokens while another thread draws.

    Raises:
        UserError: the checkpoint or an encoder does not exist, an encoder does not fit, or there are none or too many.
    """

    def __init__(self, base: str, encoders: Sequence[str], device: torch.device, dtype: torch.dtype | None = None):
        _check_names(encoders)
        checkpoint = Checkpoint.parse(base)
        checkpoint.check_kind()
        self.device, self.dtype = device, dtype or default_dtype(device)
        self.is_toy, self.size, (self.base,) = base == TOY, checkpoint.size, labels([checkpoint.weights])
        names = dict.fromkeys(split_reading(name)[1] for name in encoders)
        loaded = {name: load_text_encoder(name) for name in names if name != ORIGINAL}
        pipe = load_pipeline(base, None, device, self.dtype)
        for name, (model, _) in loaded.items():
            checkpoint.check_fits("text_encoder", model, name)
        loaded[ORIGINAL] = pipe.text_encoder, pipe.tokenizer
        self.encoders: dict[str, Encoder] = {}
        for name, label in zip(encoders, labels(encoders), strict=True):
            label = ORIGINAL if name == ORIGINAL else label  # as requests and images name it
            prefix, name = split_reading(name)
            model, tokenizer = loaded[name]
            self.encoders[label] = Encoder(label, model.to(device, self.dtype).eval(), tokenizer, _NAMED.get(prefix))
        pipe.register_modules(text_encoder=None, tokenizer=None)  # an encoder that nobody asked for takes no memory
        self._shared = pipe
        native = _scheduler_name(pipe.scheduler)
        self.schedulers = [native, *(name for name in _SCHEDULERS if name != native)]
        self.counter = deepcopy(next(iter(self.encoders.values())).tokenizer)
        self.counter.backend_tokenizer.no_truncation()
        self.counter.backend_tokenizer.no_padding()

    @property
    def labels(self) -> list[str]:
        """The encoders' names on the page."""
        return list(self.encoders)

    @property
    def stock_context(self) -> int:
        """Context length of the second encoder: the positions that stock SDXL reads, BOS and EOS included."""
        return self._shared.text_encoder_2.config.max_position_embeddings

    @property
    def longest_context(self) -> int:
        """The longest context length of the encoders."""
        return max(self.stock_context, *(encoder.context_length for encoder in self.encoders.values()))

    @property
    def defaults(self) -> Request:
        """A request with default settings for this checkpoint, without a prompt."""
        return Request(
            prompt="",
            encoders=tuple(self.labels),
            steps=STEPS if self.is_toy else 30,
            guidance_scale=GUIDANCE_SCALE if self.is_toy else 7.0,
            height=self.size[0],
            width=self.size[1],
            scheduler=self.schedulers[0],
        )

    def how_read(self, label: str, long_prompts: LongPrompts) -> HowRead:
        """How this encoder reads a long prompt: cut as in stock SDXL, or in chunks that do or do not overlap."""
        encoder = self.encoders[label]
        if encoder.how_read is not None:
            return encoder.how_read
        if long_prompts == "auto":
            return "cut" if encoder.context_length <= self.stock_context else "overlap"
        return "overlap" if long_prompts == "chunks" else long_prompts

    def pipeline(self, label: str, request: Request) -> StableDiffusionXLLongPromptPipeline:
        """A pipeline for one request: the shared models with this encoder, and a new scheduler."""
        encoder, how_read = self.encoders[label], self.how_read(label, request.long_prompts)
        cls = _CutPipeline if how_read == "cut" else StableDiffusionXLLongPromptPipeline
        scheduler = self.make_scheduler(request.scheduler)
        pipe = replace_encoder(self._shared, encoder.model, encoder.tokenizer, cls, scheduler=scheduler)
        return pipe.set_long_prompt(weighting=request.weighting, overlap=how_read != "separate")

    def restore(self) -> None:
        """Restores the autoencoder's dtype after a failure: diffusers decodes some images in single precision."""
        vae = self._shared.vae
        if vae.dtype != self.dtype:
            vae.to(self.dtype)

    def make_scheduler(self, name: str) -> SchedulerMixin:
        """A new scheduler by a name in `schedulers`, with the checkpoint's configuration."""
        if name == self.schedulers[0]:
            return type(self._shared.scheduler).from_config(self._shared.scheduler.config)
        return make_scheduler(self._shared, _SCHEDULERS[name])


class _CutPipeline(StableDiffusionXLLongPromptPipeline):
    """Cuts prompts to the shorter context length of the two encoders, as stock SDXL does; weights are read too."""

    def _tokens(self, texts, tokenizer):
        length = min(encoder.config.max_position_embeddings for encoder in (self.text_encoder, self.text_encoder_2))
        return [first_tokens(text, length) for text in super()._tokens(texts, tokenizer)]


def first_tokens(tokens: Tokens, context_length: int) -> Tokens:
    """The tokens of a text that fit a context length together with BOS and EOS."""
    return Tokens(*(column[: context_length - 2] for column in tokens))


def _check_names(names: Sequence[str]) -> None:
    check_encoders(names, of_images=True)
    if len(names) > MOST_ENCODERS:
        raise UserError(f"encoders={list(names)} are {len(names)} encoders. Name at most {MOST_ENCODERS}.")


def _scheduler_name(scheduler: SchedulerMixin) -> str:
    """The scheduler's name in `_SCHEDULERS`, or that of its class."""
    cls = type(scheduler).__name__
    return SAMPLERS[cls] if cls in SCHEDULERS else cls.removesuffix("Scheduler")
