"""What the demo draws and reads with: one base, and up to four text encoders that take turns in it."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import diffusers
import torch
from diffusers import SchedulerMixin
from transformers import CLIPTokenizer

from debias_diffusion.errors import UserError, reason
from debias_diffusion.eval.common.encoders import check_encoders, labels
from debias_diffusion.eval.pictures.drawing import ORIGINAL
from debias_diffusion.eval.text_image.attention import Reader
from debias_diffusion.interchange import load_text_encoder
from debias_diffusion.interchange.text_encoders import TextEncoder
from debias_diffusion.models.shipped import GUIDANCE_SCALE, STEPS
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.loading import (
    check_base,
    check_same_width,
    default_dtype,
    default_size,
    find_checkpoint,
    load_sdxl,
)
from debias_diffusion.tokens import CaptionTokenizer

from ..generate.png_settings import SAMPLERS
from .requests import Request

TOY = "toy/sdxl"
MOST_ENCODERS = 4
# diffusers' schedulers of one UNet evaluation a step, and what is set besides the base's own configuration: DDIM would
# clip latents as if they were pixels.
_SETTINGS = {
    "EulerDiscreteScheduler": {},
    "EulerAncestralDiscreteScheduler": {},
    "DPMSolverMultistepScheduler": {},
    "DDIMScheduler": {"clip_sample": False},
    "UniPCMultistepScheduler": {},
}
_SCHEDULERS = {SAMPLERS[cls]: cls for cls in _SETTINGS}  # by the names that a request has for them


@dataclass(frozen=True)
class Encoder:
    """One of the first text encoders.

    Attributes:
        label: as the page shows it.
        model: in evaluation mode, on the models' device.
        tokenizer: its own.
    """

    label: str
    model: TextEncoder
    tokenizer: CLIPTokenizer

    @property
    def window(self) -> int:
        """Positions that it reads at once, BOS and EOS included."""
        return self.model.config.max_position_embeddings

    def reader(self) -> Reader:
        """The same model for what looks at its attention and features. Raises UserError for an odd tokenizer."""
        try:
            captions = CaptionTokenizer(self.tokenizer, self.window)
        except ValueError as error:
            raise UserError(f"The tokenizer of {self.label!r} cannot be used: {reason(error)}.") from error
        return Reader(self.model, captions, self.model.device, digest="")


class Models:
    """One SDXL on one device, whose UNet, autoencoder and second text encoder serve up to four first text encoders.

    It holds no state of a request. Drawing, attention and movement use the device, and one at a time may; counting
    tokens may go on meanwhile.

    Args:
        base: SDXL folder in diffusers' layout, hub id, or toy/sdxl.
        encoders: what takes the place of its first text encoder, each anything `load_text_encoder` takes, or
            "original", the base's own.
        device: where everything runs.
        dtype: of all models; `default_dtype(device)` if None.

    Attributes:
        base: short name of the base.
        device, dtype: as they are.
        encoders: by label, in the order given.
        is_toy: whether scenes of the toy world can be drawn and checked; the size is then fixed.
        size: (height, width) in pixels that the base draws at by itself.
        schedulers: names that a request may choose, the base's own first.
        counter: the first encoder's tokenizer, to count with while another thread draws: a copy that nothing changes.

    Raises:
        UserError: there is no such base or encoder, an encoder does not fit, or there are none or too many.
    """

    def __init__(self, base: str, encoders: Sequence[str], device: torch.device, dtype: torch.dtype | None = None):
        _check_names(encoders)
        check_base(base)
        self.device, self.dtype = device, dtype or default_dtype(device)
        self.is_toy, self.size, (self.base,) = base == TOY, default_size(base), labels([find_checkpoint(base).weights])
        found = {name: load_text_encoder(name) for name in encoders if name != ORIGINAL}
        pipe = load_sdxl(base, None, device, self.dtype)
        width = pipe.text_encoder.config.hidden_size
        for name, (model, _) in found.items():
            check_same_width(name, model.config.hidden_size, base, width)
        found[ORIGINAL] = pipe.text_encoder, pipe.tokenizer
        self.encoders: dict[str, Encoder] = {}
        for name, label in zip(encoders, labels(encoders), strict=True):
            model, tokenizer = found[name]
            self.encoders[label] = Encoder(label, model.to(device, self.dtype).eval(), tokenizer)
        self._zeros = pipe.config.force_zeros_for_empty_prompt
        self._shared = {name: getattr(pipe, name) for name in ("unet", "vae", "text_encoder_2", "tokenizer_2")}
        self._scheduler = pipe.scheduler
        own = _name_of(pipe.scheduler)
        self.schedulers = [own, *(name for name in _SCHEDULERS if name != own)]
        self.counter = deepcopy(next(iter(self.encoders.values())).tokenizer).backend_tokenizer
        self.counter.no_truncation()
        self.counter.no_padding()

    @property
    def labels(self) -> list[str]:
        """The encoders, as the page shows them."""
        return list(self.encoders)

    @property
    def short_window(self) -> int:
        """Positions of the base's second encoder: what stock SDXL reads of a prompt, BOS and EOS included."""
        return self._shared["text_encoder_2"].config.max_position_embeddings

    @property
    def long_window(self) -> int:
        """Positions of the longest of the encoders."""
        return max(self.short_window, *(encoder.window for encoder in self.encoders.values()))

    @property
    def defaults(self) -> Request:
        """A request with sensible settings for this base, and no prompt yet."""
        return Request(
            prompt="",
            encoders=tuple(self.labels),
            steps=STEPS if self.is_toy else 30,
            guidance_scale=GUIDANCE_SCALE if self.is_toy else 7.0,
            height=self.size[0],
            width=self.size[1],
            scheduler=self.schedulers[0],
        )

    def cuts(self, label: str, long_prompts: str) -> bool:
        """Whether this encoder reads the beginning of a long prompt only, as it does in stock SDXL."""
        if long_prompts == "auto":
            return self.encoders[label].window <= self.short_window
        return long_prompts == "cut"

    def pipeline(self, label: str, request: Request) -> StableDiffusionXLLongPromptPipeline:
        """A pipeline for this request alone: the shared models with this encoder, and a scheduler of its own."""
        encoder = self.encoders[label]
        cls = _CutPipeline if self.cuts(label, request.long_prompts) else StableDiffusionXLLongPromptPipeline
        pipe = cls(
            **self._shared,
            text_encoder=encoder.model,
            tokenizer=encoder.tokenizer,
            scheduler=self.make_scheduler(request.scheduler),
            force_zeros_for_empty_prompt=self._zeros,
            add_watermarker=False,
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe.set_long_prompt(weighting=request.weighting)

    def restore(self) -> None:
        """Undoes what a drawing that failed can leave behind: diffusers decodes some pictures in single precision."""
        vae = self._shared["vae"]
        if vae.dtype != self.dtype:
            vae.to(self.dtype)

    def make_scheduler(self, name: str) -> SchedulerMixin:
        """A new one by one of the names in `schedulers`, with the base's own configuration."""
        config = self._scheduler.config
        if name == self.schedulers[0]:
            return type(self._scheduler).from_config(config)
        cls = _SCHEDULERS[name]
        return getattr(diffusers, cls).from_config(config, **_SETTINGS[cls])


class _CutPipeline(StableDiffusionXLLongPromptPipeline):
    """Both encoders read as many tokens as the shorter window holds, whatever window they have.

    What stock SDXL does, with weights in prompts, and for encoders of longer windows too.
    """

    def _tokens(self, texts, tokenizer):
        room = min(encoder.config.max_position_embeddings for encoder in (self.text_encoder, self.text_encoder_2)) - 2
        return [type(its)(*(column[:room] for column in its)) for its in super()._tokens(texts, tokenizer)]


def _check_names(names: Sequence[str]) -> None:
    check_encoders(names)
    if len(names) > MOST_ENCODERS:
        raise UserError(f"encoders={list(names)} are {len(names)}. Name at most {MOST_ENCODERS}.")


def _name_of(scheduler: SchedulerMixin) -> str:
    """Its name among `_SCHEDULERS`, or that of its class."""
    cls = type(scheduler).__name__
    return SAMPLERS[cls] if cls in _SETTINGS else cls.removesuffix("Scheduler")
