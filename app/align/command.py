"""Fits SDXL's text encoders to the frozen UNet that reads them: a resumable run, as training is."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from debias_diffusion.data.seen import read_seen, write_seen
from debias_diffusion.devices import DTYPES
from debias_diffusion.encoders.resolve import FIRST, SECOND
from debias_diffusion.encoders.spec import ORIGINAL, READINGS, EncoderSpec
from debias_diffusion.encoders.text_encoders import (
    import_text_encoder,
    make_encoder,
    prefixed_state,
    write_text_encoder,
)
from debias_diffusion.pipelines.rendering.checkpoints import STRETCH, Checkpoint
from debias_diffusion.pipelines.rendering.loading import load_pipeline
from debias_diffusion.training.checkpoints import LAST, TrainState, save_model
from debias_diffusion.training.feature_cache import cached_images
from debias_diffusion.training.loop import Run
from debias_diffusion.training.optimizer import AdamW
from debias_diffusion.training.progress import check_disk
from debias_diffusion.training.step import sum_over_processes

from ..options import AlignConfig
from .data import AlignBatch, AlignDataset, collate, frozen_vae, latent_shape
from .encoders import make_slots, recompute_activations
from .objective import TERMS, Objective

MEASURED = 64  # held-out pairs, at most


def align(config: AlignConfig) -> Path | None:
    """Runs, or resumes, the alignment that `config` describes.

    Writes to `config.output`: `encoder/`, `encoder_2/` or both, as `export` writes text encoders; of a first encoder
    that has an image tower also `last/`, an open_clip folder of both towers, which every command takes; `log.jsonl`,
    checkpoints, and the lists of bad records and skipped steps, as in training.

    Returns:
        The output folder; None for a run that was stopped.

    Raises:
        UserError: something in `config` or the data cannot be used; says what to do.
    """
    Checkpoint.parse(config.base).check_kind()
    return Alignment(config).run()


class Alignment(Run):
    """A run that fits text encoders."""

    command, title = "align", "aligning"

    def __init__(self, config: AlignConfig):
        super().__init__(config)
        checkpoint = Checkpoint.parse(config.base)
        self.pixels = config.pixels or min(checkpoint.size)
        self.settings["pixels"] = self.pixels
        self.inputs["SDXL checkpoint"] = checkpoint.digest
        for place, name in (("first", config.encoder), ("second", config.encoder_2)):
            spec = None if name in (None, ORIGINAL, STRETCH) else EncoderSpec.parse(name)
            self.inputs[f"{place} encoder"] = spec.digest if spec else name
            self.seen_before = [*self.seen_before, *map(read_seen, [spec] if spec else [])]
        device, dtype = self.accelerator.device, DTYPES[self.precision]
        pipe = load_pipeline(config.base, None, device, dtype)
        self.vae, self.latent_shape = pipe.vae, latent_shape(pipe.vae, self.pixels)
        names = (config.encoder, config.encoder_2)
        self.slots, self.two_tower = make_slots(names, pipe, checkpoint, dtype, config.reading == "overlap")
        slots = zip((FIRST, SECOND), self.slots, strict=True)
        fitted = {name: slot.fitted.model for name, slot in slots if slot.fitted}
        self.model = nn.ModuleDict(fitted).to(device).train()
        pipe.unet.requires_grad_(False)
        self.frozen = [*pipe.unet.parameters(), *(weight for slot in self.slots for weight in slot.frozen_parameters())]
        if config.checkpoint_activations:
            pipe.unet.enable_gradient_checkpointing()
            for encoder in fitted.values():
                recompute_activations(encoder)
        weights = dict(zip(TERMS, (config.denoising, config.keep_states, config.keep_features), strict=True))
        self.objective = Objective(self.slots, pipe.unet, pipe.scheduler, self.pixels, weights, self.precision)
        settings = config.weight_decay, config.betas, config.eps, self.precision
        self.optimizer = AdamW(dict(self.model.named_parameters()), *settings)
        self.collate = collate

    def prepare(self) -> None:
        """Computes the latents that the cache lacks; from then on images are latents, and the autoencoder rests."""
        # The indices of the pairs that steps read, often few of the data, by epoch and in order.
        keys = np.array([key for batch in self.batches.iterate() for key in batch])
        read = {epoch: keys[keys[:, 0] == epoch, 1] for epoch in np.unique(keys[:, 0]).tolist()}
        trained = np.unique(keys[:, 1])
        records = [*self.held_out[:MEASURED], *(self.records[index] for index in trained.tolist())]
        latents = f"The latents of {len(records):,} images"
        advice = "Give another --latent-cache, smaller --pixels, or fewer --max-steps."
        check_disk(self.config.latent_folder(), 4 * math.prod(self.latent_shape) * len(records), latents, advice)
        vae = frozen_vae(self.vae, self.pixels, self.accelerator)
        batch = max(1, min(32, 2**22 // self.pixels**2))
        settings = self.config.latent_folder(), batch, max(1, self.workers)
        self.images, bad = cached_images(vae, records, self.images, *settings)
        self.check_bad(bad, len(records))
        self.vae.to("cpu")
        self.dataset = AlignDataset(
            self.records,
            self.images,
            partial(torch.reshape, shape=self.latent_shape),
            self.config.seed,
            stand_ins=read.get if self.config.max_bad else None,
            tokenizers=[slot.reader.tokenizer for slot in self.slots],
        )
        unreadable = {record.where for record in bad}
        measured = [record for record in self.held_out[:MEASURED] if record.image not in unreadable]
        self.measured = replace(self.dataset, records=measured, stand_ins=None)

    def backward(self, batch: AlignBatch) -> dict[str, torch.Tensor]:
        """The gradient of the mean over the global batch, in chunks; then summed over the processes."""
        sums, device = dict.fromkeys(TERMS, 0.0), self.accelerator.device
        for part in batch.chunks(self.config.chunk or len(batch)):
            # On a CPU the fused kernels' gradient takes several times as long.
            with sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext():
                terms = {name: values.sum() for name, values in self.objective.losses(part.to(device)).items()}
                self.optimizer.scaler.scale(self._weighted(terms) / self.batch).backward()
            sums = {name: sums[name] + value.detach() for name, value in terms.items()}
        norm = sum_over_processes(self.model.parameters(), self.accelerator) / self.optimizer.scaler.get_scale()
        means = self.accelerator.reduce(torch.stack(list(sums.values())), reduction="sum") / self.batch
        terms = dict(zip(TERMS, means, strict=True))
        return {"loss": self._weighted(terms)} | terms | {"gradient_norm": norm}

    def _weighted(self, terms: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum(self.objective.weights[name] * value for name, value in terms.items())

    @torch.no_grad()
    def measure(self, state: TrainState) -> None:
        """The terms on held-out pairs, whose draws are always the same."""
        if len(self.measured):
            batch = collate([self.measured[(0, index, index)] for index in range(len(self.measured))])
            chunks = batch.to(self.accelerator.device).chunks(self.config.chunk or len(batch))
            parts = [self.objective.losses(chunk) for chunk in chunks]
            means = {name: torch.cat([part[name] for part in parts]).mean().item() for name in TERMS}
            self.log({"step": state.step, "pairs": len(batch)} | {f"held_out_{name}": means[name] for name in TERMS})
            named = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in means.items())
            self.say(f"step {state.step}: on {len(batch)} held-out pairs {named}")

    def describe(self) -> dict[str, str]:
        config = self.config
        names = zip((config.encoder, config.encoder_2), self.slots, strict=True)
        encoders = [
            f"{name} (in {'one piece' if slot.reads_on else READINGS[config.reading]}, {slot.reader.context_length} "
            "positions)"
            for name, slot in names
            if name
        ]
        return {
            "encoder": " and ".join(encoders),
            "unet": f"{config.base}, frozen; images of {self.pixels} x {self.pixels} pixels",
            "loss": f"denoising {config.denoising:g}, states {config.keep_states:g}, features {config.keep_features:g}",
        }

    def finish(self, state: TrainState) -> Path:
        path = self.folder
        if self.main:
            for name, slot in zip((FIRST, SECOND), self.slots, strict=True):
                if slot.fitted is not None:
                    encoder, tokenizer = slot.fitted
                    if name == FIRST:  # SDXL's has no projection
                        encoder = make_encoder(encoder.config, prefixed_state(encoder), projection=False)
                    with self.job.write(name) as temporary:
                        write_text_encoder(encoder, tokenizer, temporary)
                        write_seen(temporary, self.seen())
            if self.two_tower is not None:
                import_text_encoder(self.two_tower, self.slots[0].fitted.model)
                save_model(self.job, LAST, self.two_tower, {"step": state.step}, self.seen())
        self.say_done(state)
        option = f"--encoder {path}" if FIRST in self.model else f"--encoder-2 {path / SECOND}"
        self.say(f"Next: debias-diffusion generate 'a long prompt' --base {self.config.base} {option}")
        return path
