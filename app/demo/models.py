"""The demo's models: one SDXL checkpoint, and up to five text encoders that take turns in it."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict

import torch
from diffusers import SchedulerMixin

from debias_diffusion.chunks import Reading
from debias_diffusion.encoders import ORIGINAL, READINGS, Kind, labels, parse_encoders
from debias_diffusion.errors import UserError
from debias_diffusion.pipelines import LongPromptOptions, StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.checkpoints import Checkpoint, default_dtype, load_pipeline
from debias_diffusion.pipelines.png import SAMPLERS, sampler
from debias_diffusion.pipelines.rendering import SCHEDULERS, explain_memory, make_scheduler, replace_encoder

TOY = "toy/sdxl"
MOST_ENCODERS = 5
_SCHEDULERS = {SAMPLERS[cls]: cls for cls in SCHEDULERS}  # by their names in a request


class DemoModels:
    """One SDXL checkpoint on one device: its UNet, autoencoder and second text encoder serve up to five first encoders.

    Holds no state of a request. Generation, attention and movement use the device within `alone`; tokens may be counted
    meanwhile.

    Args:
        base: SDXL checkpoint, see `Checkpoint.parse`.
        encoders: replacements of the first text encoder, each anything `load_text_encoder` takes, or "original" for
            the checkpoint's own; "cut:" or another of READINGS before a name says how it reads.
        device: device of all models.
        dtype: dtype of all models; `default_dtype(device)` if None.

    Attributes:
        checkpoint: the SDXL checkpoint, which says what sizes it renders.
        base: its short name.
        device, dtype: of all models.
        labels: names of the encoders on the page, in the order given.
        encoders: by label, a pipeline of the shared models with this encoder.
        is_toy: whether scenes of the toy world can be generated and checked.
        size: the checkpoint's native (height, width) in pixels.
        stock_context: context length of the second encoder: positions that stock SDXL reads, BOS and EOS included.
        longest_context: of all encoders.
        schedulers: names that a request may choose, the checkpoint's own first.
        counter: an unchanging copy of the first encoder's tokenizer, to count tokens while another thread generates.

    Raises:
        UserError: the checkpoint or an encoder does not exist, an encoder does not fit, or there are none or too many.
    """

    def __init__(self, base: str, encoders: Sequence[str], device: torch.device, dtype: torch.dtype | None = None):
        if len(encoders) > MOST_ENCODERS:
            raise UserError(f"encoders={list(encoders)} are {len(encoders)} encoders. Name at most {MOST_ENCODERS}.")
        specs = parse_encoders(encoders)
        self.checkpoint = checkpoint = Checkpoint.parse(base)
        checkpoint.check_kind()
        self.device, self.dtype = device, dtype or default_dtype(device)
        self.is_toy, self.size, self.base = base == TOY, checkpoint.size, str(checkpoint.file or base)
        if os.path.exists(self.base):
            self.base = os.path.basename(self.base)
        by_model = {spec.name: spec for spec in specs}
        loaded = {name: spec.load_text_encoder() for name, spec in by_model.items() if spec.kind is not Kind.ORIGINAL}
        for name, (model, _) in loaded.items():
            checkpoint.check_fits("text_encoder", model, name)
        self._shared = pipe = load_pipeline(base, None, device, self.dtype)
        loaded[ORIGINAL] = pipe.text_encoder, pipe.tokenizer
        short = dict(zip(by_model, labels(list(by_model.values()), readings=False), strict=True))
        short[ORIGINAL] = ORIGINAL  # as requests and images name it
        self.encoders: dict[str, StableDiffusionXLLongPromptPipeline] = {}
        self._readings: dict[str, Reading] = {}  # by label, where its name says how it reads
        for name, spec in zip(encoders, specs, strict=True):
            model, tokenizer = loaded[spec.name]
            label = short[spec.name]
            if name != spec.name:
                label = f"{label}, {READINGS[spec.reading]}"
                self._readings[label] = spec.reading
            self.encoders[label] = replace_encoder(pipe, model.to(device, self.dtype).eval(), tokenizer)
        self.labels = list(self.encoders)
        self.stock_context = pipe.text_encoder_2.config.max_position_embeddings
        self.longest_context = max(self.stock_context, *map(self.context_length, self.labels))
        pipe.register_modules(text_encoder=None, tokenizer=None)  # an encoder that nobody asked for takes no memory
        self._free, native = threading.Lock(), sampler(type(pipe.scheduler).__name__)
        self.schedulers = list(dict.fromkeys([native, *_SCHEDULERS]))
        self.counter = deepcopy(self.encoders[self.labels[0]].tokenizer)
        self.counter.backend_tokenizer.no_truncation()
        self.counter.backend_tokenizer.no_padding()

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

    def context_length(self, label: str) -> int:
        """Positions that an encoder reads at once, BOS and EOS included."""
        return self.encoders[label].text_encoder.config.max_position_embeddings

    def reading(self, label: str, chosen: Reading) -> Reading:
        """How this encoder reads a long prompt of a request with this reading."""
        return self._readings.get(label, chosen)

    def pipeline(self, label: str, options: LongPromptOptions) -> StableDiffusionXLLongPromptPipeline:
        """The pipeline of an encoder that reads so; for the caller alone, like the scheduler in it."""
        return self.encoders[label].set_long_prompt(**asdict(options))

    def make_scheduler(self, name: str) -> SchedulerMixin:
        """A new scheduler by a name in `schedulers`, with the checkpoint's configuration."""
        if name == self.schedulers[0]:
            return type(self._shared.scheduler).from_config(self._shared.scheduler.config)
        return make_scheduler(self._shared, _SCHEDULERS[name])
