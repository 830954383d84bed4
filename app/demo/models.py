"""The demo's models: one SDXL checkpoint, and up to five text encoders that take turns in it."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import get_args

import torch

from debias_diffusion.devices import explain_memory
from debias_diffusion.encoders.spec import ORIGINAL, READINGS, EncoderSpec, Kind, labels, parse_encoders
from debias_diffusion.errors import UserError
from debias_diffusion.eval.options import TOY_BASE, TOY_CLIP
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.rendering.options import Sampling, Scheduler
from debias_diffusion.pipelines.rendering.png import SAMPLERS, sampler
from debias_diffusion.pipelines.rendering.renderer import Renderer
from debias_diffusion.text.chunks import Reading

MOST_ENCODERS = 5
# What the page calls the checkpoint's own encoder, by how it reads, and those of the toy world.
_OWN = {"cut": "SDXL as it is (cut at 77)", "overlap": "SDXL, whole prompt (with_long_prompts)"}
_TOYS = {
    "toy/long-clip": "Long-CLIP",
    "toy/debias-clip": "DeBias-CLIP",
    "toy/debias-clip-sdxl": "DeBias-CLIP for SDXL",
}


class DemoModels:
    """One SDXL checkpoint on one device: its UNet and autoencoder serve up to five text encoders.

    Holds no state of a request. Generation, attention and movement use the device within `alone`; tokens may be counted
    meanwhile.

    Args:
        base, encoders: see `AppConfig`.
        dtype: of all models; `default_dtype(device)` if None.

    Attributes:
        renderer: of the checkpoint, with its own settings.
        base: the checkpoint's short name.
        labels: names of the encoders in requests and images, in the order given.
        encoders: by label, a pipeline of the shared models with this encoder.
        is_toy: whether scenes of the toy world can be generated and checked.
        size: the checkpoint's native (height, width) in pixels.
        schedulers: names that a request may choose, the checkpoint's own first, and diffusers' classes; None for that.
        counter: an unchanging copy of the first encoder's tokenizer, to count tokens while another thread generates.

    Raises:
        UserError: the checkpoint or an encoder does not exist, an encoder does not fit, or there are none or too many.
    """

    def __init__(self, base: str, encoders: Sequence[str], device: torch.device, dtype: torch.dtype | None = None):
        if len(encoders) > MOST_ENCODERS:
            raise UserError(f"encoders={list(encoders)} are {len(encoders)} encoders. Name at most {MOST_ENCODERS}.")
        specs = parse_encoders(encoders)
        self.renderer = Renderer(base, Sampling(), device, dtype)
        checkpoint = self.renderer.checkpoint
        checkpoint.check_kind()
        self.is_toy, self.size, self.base = base == TOY_BASE, checkpoint.size, str(checkpoint.file or base)
        if os.path.exists(self.base):
            self.base = os.path.basename(self.base)
        # The first one comes with the checkpoint; the others replace its encoders.
        models = {spec.name: spec for spec in specs}.values()
        models = sorted(models, key=lambda spec: (spec.kind is not Kind.ORIGINAL, bool(spec.fitted_second)))
        pipes = {spec.name: self.renderer.pipeline(spec) for spec in models}
        short = {spec.name: label for spec, label in zip(models, labels(models, readings=False), strict=True)}
        short[ORIGINAL] = ORIGINAL  # as requests and images name it
        self.encoders: dict[str, StableDiffusionXLLongPromptPipeline] = {}
        self._specs: dict[str, tuple[EncoderSpec, bool]] = {}  # and whether its name says how it reads
        for name, spec in zip(encoders, specs, strict=True):
            label, has_reading = short[spec.name], name != spec.name
            label = f"{label}, {READINGS[spec.reading]}" if has_reading else label
            self.encoders[label], self._specs[label] = pipes[spec.name], (spec, has_reading)
        self.labels = list(self.encoders)
        self._free, native = threading.Lock(), sampler(type(pipes[models[0].name].scheduler).__name__)
        self.schedulers = {native: None} | {
            SAMPLERS[cls]: cls for cls in get_args(Scheduler) if SAMPLERS[cls] != native
        }
        self.counter = deepcopy(self.encoders[self.labels[0]].tokenizer)
        self.counter.backend_tokenizer.no_truncation()
        self.counter.backend_tokenizer.no_padding()

    @contextmanager
    def held(self) -> Iterator[None]:
        """The models for the caller alone; running out of memory becomes a UserError. The page's queue lets one request
        through at a time, but a stopped request leaves it before its last step has ended."""
        vae, renderer = self.encoders[self.labels[0]].vae, self.renderer
        with self._free, explain_memory(renderer.device, "Choose smaller images or a shorter prompt."):
            try:
                yield
            finally:
                if vae.dtype != renderer.dtype:  # diffusers decodes some images in single precision
                    vae.to(renderer.dtype)

    def spec(self, label: str, chosen: Reading) -> EncoderSpec:
        """The encoder, as it reads a request with this reading."""
        spec, has_reading = self._specs[label]
        return spec if has_reading else replace(spec, reading=chosen)

    def title(self, label: str, chosen: Reading = "overlap") -> str:
        """What the page calls the encoder, as it reads a request with this reading."""
        spec = self.spec(label, chosen)
        if spec.kind is Kind.ORIGINAL or (self.is_toy and spec.name == TOY_CLIP):
            return _OWN.get(spec.reading, f"SDXL, {READINGS[spec.reading]}")
        return label.replace(spec.name, _TOYS.get(spec.name, spec.name))

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        parts = [part for pipe in self.encoders.values() for part in pipe.components.values()]
        models = {part for part in parts if isinstance(part, torch.nn.Module)}
        return sum(weight.nbytes for model in models for weight in model.parameters())
