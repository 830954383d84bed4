"""The demo's models: one SDXL checkpoint, and up to five text encoders that take turns in it."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass

import torch
from diffusers import SchedulerMixin
from transformers import CLIPTokenizer

from debias_diffusion.encoders import ORIGINAL, Kind, Reading, labels, parse_encoders
from debias_diffusion.errors import UserError, reason
from debias_diffusion.eval.attention import Reader
from debias_diffusion.interchange.text_encoders import TextEncoder
from debias_diffusion.models.shipped import GUIDANCE_SCALE, STEPS
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.checkpoints import (
    Checkpoint,
    default_dtype,
    load_pipeline,
)
from debias_diffusion.pipelines.png import SAMPLERS
from debias_diffusion.pipelines.rendering import SCHEDULERS, explain_memory, make_scheduler, replace_encoder
from debias_diffusion.tokens import CaptionTokenizer

from .request import Request

TOY = "toy/sdxl"
MOST_ENCODERS = 5
_SCHEDULERS = {SAMPLERS[cls]: cls for cls in SCHEDULERS}  # by their names in a request


@dataclass(frozen=True)
class Encoder:
    """One of the demo's first text encoders.

    Attributes:
        label: its name on the page.
        model: in evaluation mode, on the device of all models.
        tokenizer: the encoder's tokenizer.
        reading: how it reads long prompts, if its name says so; else the request decides.
    """

    label: str
    model: TextEncoder
    tokenizer: CLIPTokenizer
    reading: Reading | None = None

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

    Holds no state of a request. Generation, attention and movement use the device within `alone`; tokens may be counted
    meanwhile.

    Args:
        base: SDXL checkpoint, see `Checkpoint.parse`.
        encoders: replacements of the first text encoder, each anything `load_text_encoder` takes, or "original" for
            the checkpoint's own; "cut:", "separate:" or "overlap:" before a name says how it reads.
        device: device of all models.
        dtype: dtype of all models; `default_dtype(device)` if None.

    Attributes:
        base: short name of the SDXL checkpoint.
        device, dtype: of all models.
        encoders: by label, in the order given.
        is_toy: whether scenes of the toy world can be generated and checked; the size is then fixed.
        size: the checkpoint's native (height, width) in pixels.
        schedulers: names that a request may choose, the checkpoint's own first.
        counter: an unchanging copy of the first encoder's tokenizer, to count tokens while another thread generates.

    Raises:
        UserError: the checkpoint or an encoder does not exist, an encoder does not fit, or there are none or too many.
    """

    def __init__(self, base: str, encoders: Sequence[str], device: torch.device, dtype: torch.dtype | None = None):
        if len(encoders) > MOST_ENCODERS:
            raise UserError(f"encoders={list(encoders)} are {len(encoders)} encoders. Name at most {MOST_ENCODERS}.")
        specs = dict(zip(encoders, parse_encoders(encoders), strict=True))
        checkpoint = Checkpoint.parse(base)
        checkpoint.check_kind()
        self.device, self.dtype = device, dtype or default_dtype(device)
        self.is_toy, self.size, self.base = base == TOY, checkpoint.size, _short(str(checkpoint.file or base))
        by_model = {spec.name: spec for spec in specs.values()}
        loaded = {name: spec.load_text_encoder() for name, spec in by_model.items() if spec.kind is not Kind.ORIGINAL}
        pipe = load_pipeline(base, None, device, self.dtype)
        for name, (model, _) in loaded.items():
            checkpoint.check_fits("text_encoder", model, name)
        loaded[ORIGINAL] = pipe.text_encoder, pipe.tokenizer
        short = dict(zip(by_model, labels(list(by_model.values()), readings=False), strict=True))
        short[ORIGINAL] = ORIGINAL  # as requests and images name it
        named = {name: spec for name, spec in specs.items() if name != spec.name}
        named = dict(zip(named, labels(list(named.values())), strict=True))
        self.encoders: dict[str, Encoder] = {}
        for name, spec in specs.items():
            label, reading = (short[name], None) if name == spec.name else (named[name], spec.reading)
            model, tokenizer = loaded[spec.name]
            self.encoders[label] = Encoder(label, model.to(device, self.dtype).eval(), tokenizer, reading)
        pipe.register_modules(text_encoder=None, tokenizer=None)  # an encoder that nobody asked for takes no memory
        self._shared, self._free = pipe, threading.Lock()
        cls = type(pipe.scheduler).__name__
        native = SAMPLERS[cls] if cls in SCHEDULERS else cls.removesuffix("Scheduler")
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

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The models for the caller alone. The page's queue lets one request through at a time, but a stopped request
        leaves it before its last step has ended.

        Raises:
            UserError: the device runs out of memory within the context.
        """
        vae = self._shared.vae
        with self._free, explain_memory(self.device, "Choose smaller images or a shorter prompt."):
            try:
                yield
            finally:
                if vae.dtype != self.dtype:  # diffusers decodes some images in single precision
                    vae.to(self.dtype)

    def reading(self, label: str, request: Request) -> Reading:
        """How this encoder reads a long prompt of this request."""
        encoder = self.encoders[label]
        return encoder.reading or request.reading

    def pipeline(self, label: str, request: Request) -> StableDiffusionXLLongPromptPipeline:
        """A pipeline for one request: the shared models with this encoder, and a new scheduler."""
        encoder = self.encoders[label]
        scheduler = self.make_scheduler(request.scheduler)
        pipe = replace_encoder(self._shared, encoder.model, encoder.tokenizer, scheduler=scheduler)
        return pipe.set_long_prompt(weighting=request.weighting, reading=self.reading(label, request))

    def make_scheduler(self, name: str) -> SchedulerMixin:
        """A new scheduler by a name in `schedulers`, with the checkpoint's configuration."""
        if name == self.schedulers[0]:
            return type(self._shared.scheduler).from_config(self._shared.scheduler.config)
        return make_scheduler(self._shared, _SCHEDULERS[name])


def _short(checkpoint: str) -> str:
    """A path's last part; other names as they are."""
    return os.path.basename(checkpoint) if os.path.exists(checkpoint) else checkpoint
