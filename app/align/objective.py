"""What `align` minimises: the UNet's loss, and how far encoders have moved from where they must stay."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, SchedulerMixin, UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTokenizer

from debias_diffusion.devices import autocast
from debias_diffusion.encoders.text_encoders import TextEncoder
from debias_diffusion.methods.keep_states import relative_error
from debias_diffusion.text.chunks import Tokens, positions_for
from debias_diffusion.text.encoding import encode
from debias_diffusion.text.options import LongPromptOptions
from debias_diffusion.text.prompt import plan_tokens

from .data import AlignBatch, Text

TERMS = ("denoising_loss", "state_error", "feature_distance")


class Encoder(NamedTuple):
    """A text encoder. A frozen one only says how texts are to be read."""

    model: TextEncoder
    tokenizer: CLIPTokenizer

    def read(self, texts: list[Tokens], length: int, overlap: bool = True) -> tuple[Tensor, Tensor | None]:
        """Hidden states [texts, length, width] and pooled [texts, pooled width]."""
        options = LongPromptOptions(reading="overlap" if overlap else "separate")
        [plan], _ = plan_tokens([texts], [(self.tokenizer, self.context_length)], options, length)
        return encode(plan, self.model)

    @property
    def context_length(self) -> int:
        return self.model.config.max_position_embeddings


@dataclass(frozen=True)
class Slot:
    """One of SDXL's two text encoders.

    Attributes:
        base: the checkpoint's own encoder, frozen.
        fitted: the one in its place; None leaves the checkpoint's own as it is.
        features: whose pooled features are kept, frozen; None where there are none to keep.
        overlap: whether chunks overlap.
    """

    base: Encoder
    fitted: Encoder | None = None
    features: Encoder | None = None
    overlap: bool = False

    @property
    def reader(self) -> Encoder:
        """The encoder that the UNet gets its states from."""
        return self.fitted or self.base

    @property
    def reads_on(self) -> bool:
        """Whether the fitted encoder reads in one piece what the checkpoint's own reads in chunks."""
        return self.reader.context_length > self.base.context_length

    def frozen_parameters(self) -> Iterator[Tensor]:
        """The weights of the encoders that only say how to read; none twice."""
        models = dict.fromkeys(part.model for part in (self.base, self.features) if part is not None)
        return itertools.chain.from_iterable(model.parameters() for model in models)

    def state_errors(self, states: Tensor, texts: list[Tokens], length: int) -> Tensor:
        """[texts] how far the states of words and SOT are from the checkpoint's own, as in `keep_states`.

        The checkpoint's encoder reads as the fitted one does, or, if that reads in one piece, in chunks that overlap.
        """
        expected, _ = self.base.read(texts, length, self.overlap or self.reads_on)
        ends = [1 + len(text.ids) for text in texts]
        errors = [
            # The states of a single token have no variance.
            relative_error(row[:end], wanted[:end]) if end > 2 else torch.zeros((), device=row.device)
            for row, wanted, end in zip(states, expected, ends, strict=True)
        ]
        return torch.stack(errors)

    def feature_distances(self, pooled: Tensor, texts: list[Tokens], length: int) -> Tensor:
        """[texts] 1 - cosine of the pooled features and those that are kept."""
        _, kept = self.features.read(texts, length)
        return 1 - F.cosine_similarity(pooled.float(), kept.float(), dim=-1)


@dataclass
class Objective:
    """The loss of a batch.

    Args:
        slots: of SDXL's first and second encoder, at least one of them fitted.
        unet: frozen.
        scheduler: the checkpoint's, for its noise schedule and what the UNet predicts.
        pixels: side of the images, which the UNet is told as size, target and no crop, as the pipelines do.
        weights: by name of `TERMS`; the UNet is not run where that of "denoising_loss" is 0.
        precision: of the fitted encoders.
    """

    slots: Sequence[Slot]
    unet: UNet2DConditionModel
    scheduler: SchedulerMixin
    pixels: int
    weights: dict[str, float]
    precision: str

    def __post_init__(self):
        self.scheduler = DDPMScheduler.from_config(self.scheduler.config)

    def losses(self, batch: AlignBatch) -> dict[str, Tensor]:
        """By name of `TERMS`, not weighted, each [samples]: a sample's terms depend on that sample alone."""
        device = self.unet.device
        terms = {name: torch.zeros(len(batch), device=device) for name in TERMS}
        whole = [(row, text) for row, text in enumerate(batch.texts)]
        parts = [(row, part) for row, part in enumerate(batch.parts) if part is not None]
        share = torch.tensor([1 / (1 + (part is not None)) for part in batch.parts], device=device)
        for texts, denoised in ((whole, True), (parts, False)):
            for length, numbered in self._by_length(texts).items():
                rows = torch.tensor([row for row, _ in numbered], device=device)
                added = self._of_one_length(batch, rows, [text for _, text in numbered], length, denoised)
                for name, values in added.items():
                    values = values if name == "denoising_loss" else values * share[rows]
                    terms[name] = terms[name].index_add(0, rows, values)
        return terms

    def _by_length(self, texts: Sequence[tuple[int, Text]]) -> dict[int, list[tuple[int, Text]]]:
        """Texts by the length of their embeddings, so that none has other pads than a pipeline gives it alone."""
        contexts, groups = [slot.reader.context_length for slot in self.slots], defaultdict(list)
        for row, text in texts:
            groups[positions_for(max(len(tokens.ids) for tokens in text), contexts)].append((row, text))
        return groups

    def _of_one_length(
        self, batch: AlignBatch, rows: Tensor, texts: Sequence[Text], length: int, denoised: bool
    ) -> dict[str, Tensor]:
        """The terms of texts that stand for the samples `rows`."""
        states, errors, distances = [], [], []
        for slot, slot_texts in zip(self.slots, map(list, zip(*texts, strict=True)), strict=True):
            with autocast(self.precision, self.unet.device):
                encoded, pooled = slot.reader.read(slot_texts, length, slot.overlap)
                if slot.fitted is not None:
                    errors.append(slot.state_errors(encoded, slot_texts, length))
                if slot.features is not None:
                    distances.append(slot.feature_distances(pooled, slot_texts, length))
            states.append(encoded)
        terms = {"state_error": sum(errors)}
        if distances:
            terms["feature_distance"] = sum(distances)
        if denoised and self.weights["denoising_loss"]:
            terms["denoising_loss"] = self._denoising(batch, rows, torch.cat(states, dim=-1), pooled)
        return terms

    def _denoising(self, batch: AlignBatch, rows: Tensor, states: Tensor, pooled: Tensor) -> Tensor:
        """[rows] the UNet's own loss: the mean squared error of what it predicts."""
        latents, noise, shares = batch.latents[rows], batch.noise[rows], batch.shares[rows]
        times = ((self.scheduler.config.num_train_timesteps - 1) * shares).round().long()
        dtype, sizes = self.unet.dtype, torch.tensor([[self.pixels, self.pixels, 0, 0, self.pixels, self.pixels]])
        predicted = self.unet(
            self.scheduler.add_noise(latents, noise, times).to(dtype),
            times,
            encoder_hidden_states=states.to(dtype),
            added_cond_kwargs={
                "text_embeds": pooled.to(dtype),
                "time_ids": sizes.to(states.device, dtype).expand(len(rows), -1),
            },
        ).sample
        return (predicted.float() - self._target(latents, noise, times)).square().mean(dim=(1, 2, 3))

    def _target(self, latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        kind = self.scheduler.config.prediction_type
        if kind == "epsilon":
            return noise
        return self.scheduler.get_velocity(latents, noise, times) if kind == "v_prediction" else latents
