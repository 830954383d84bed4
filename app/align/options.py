"""Settings of `align`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from debias_diffusion.errors import UserError
from debias_diffusion.training.config import RunConfig

# Options in the order of `align --help`.
_GROUPS = {
    "Data and models": ("base", "data", "images", "output", "encoder", "encoder_2", "overlap", "pixels"),
    "Loss": ("denoising", "keep_states", "keep_features"),
    "Optimization": (
        *("batch", "epochs", "max_steps", "learning_rate", "warmup", "weight_decay", "betas", "eps", "seed"),
    ),
    "Speed and memory": ("precision", "chunk", "checkpoint_activations", "workers", "latent_cache"),
    "Validation, checkpoints and logs": (
        *("validation", "eval_every", "checkpoint_every", "keep", "log_every", "trackers"),
    ),
    "Bad records": ("max_bad",),
}


@dataclass
class AlignConfig(RunConfig):
    """Fit SDXL's text encoders to its frozen UNet, after training and before export.

    The loss is denoising * the UNet's own loss on the images + keep_states * state error + keep_features * distance of
    the pooled features, each a mean over the batch.

    Attributes:
        base: SDXL checkpoint, which is not changed: a folder in diffusers' layout, a single .safetensors file, a hub
            id, or toy/sdxl.
        data: Image-caption pairs: a JSON file in ShareGPT4V's layout, a .jsonl file, a folder of WebDataset shards, a
            folder of images with captions beside them, or scenes of the toy world (toy/train-2).
        output: Folder of the run. A stopped run resumes there when it is started again with the same settings.
        images: Folder that the image paths of a JSON or JSONL file start from; null for all other data.
        encoder: Text encoder to fit in the place of SDXL's first one: a training run, a folder, a file, a hub id;
            original is the checkpoint's own, read in chunks. null leaves that one as it is.
        encoder_2: The same for SDXL's second one, with a projection; stretch is the checkpoint's own with 248
            positions.
        denoising: Weight of the UNet's loss.
        keep_states: Weight of the term that keeps the hidden states of words near the checkpoint's own encoder's.
        keep_features: Weight of the term that keeps the pooled features: the first encoder's where training has put
            them, so that retrieval stays, the second's near the checkpoint's own, which the UNet reads.
        overlap: Encoders of 77 positions read long prompts in chunks that overlap, as the pipelines do; false, each by
            itself, as with `generate --no-overlap`.
        pixels: Images are scaled and cropped to squares of this side, a multiple of 8; null is the checkpoint's own.
        validation: How many of the first pairs are held out, and measured on, at most 64 of them. auto is 1000, and a
            tenth of fewer than 10,000 pairs.
        batch: Pairs per step, over all processes together.
        chunk: Pairs whose activations a process holds at once; the gradient is the same. null holds all.
        epochs: Passes over the data.
        max_steps: Stop after this many steps, if the epochs take more.
        learning_rate: Peak learning rate of AdamW, reached after the warm-up; then a cosine to 0.
        warmup: Steps of linear warm-up.
        weight_decay: On matrices only.
        betas: AdamW's averages.
        eps: AdamW's epsilon.
        precision: fp32, or bf16 or fp16 for a UNet and frozen encoders of that dtype, and mixed precision in the
            encoders that are fitted. auto is bf16 (fp16 where there is none) on a GPU and fp32 elsewhere.
        checkpoint_activations: Recompute activations in the backward pass instead of keeping them.
        latent_cache: Folder of the images' latents, which runs can share; null is latents beside the output folder.
        seed: Of all random draws: order of samples, noise, times.
        workers: Processes that read images and captions, for each training process. 0 reads them in the training
            process.
        eval_every: Steps between measurements on the held-out pairs.
        checkpoint_every: Steps between checkpoints.
        keep: How many of the newest checkpoints are kept.
        log_every: Steps between lines in log.jsonl.
        trackers: tensorboard, wandb, or both with a comma between; null for log.jsonl alone, which is always written.
        max_bad: Largest share of bad records before the run stops, from 0 to 1. An unreadable image is replaced by
            another pair that the epoch reads, always the same; with 0 by none. A stopped run may resume with another
            value.
    """

    GROUPS = _GROUPS  # without an annotation, so no option

    base: str
    data: str
    output: str
    images: str | None = None
    encoder: str | None = None
    encoder_2: str | None = None
    denoising: float = 10.0
    keep_states: float = 1.0
    keep_features: float = 10.0
    overlap: bool = True
    pixels: int | None = None
    validation: int | Literal["auto"] = "auto"
    batch: int = 48
    chunk: int | None = None
    epochs: int = 1
    max_steps: int | None = None
    learning_rate: float = 1e-6
    warmup: int = 100
    weight_decay: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    checkpoint_activations: bool = False
    latent_cache: str | None = None
    seed: int = 0
    workers: int = 2
    eval_every: int = 500
    checkpoint_every: int = 500
    keep: int = 2
    log_every: int = 10
    trackers: str | None = None
    max_bad: float = 0.01

    def __post_init__(self):
        self.check_run()
        for name in ("denoising", "keep_states", "keep_features"):
            weight = getattr(self, name)
            self.require(name, weight >= 0 and math.isfinite(weight), "at least 0")
        self.require("pixels", self.pixels is None or (self.pixels >= 8 and self.pixels % 8 == 0), "a multiple of 8")
        if self.encoder is None and self.encoder_2 is None:
            raise UserError(
                "Nothing is to be fitted. Give --encoder for SDXL's first text encoder, --encoder-2 for its second, or "
                "both; original is the checkpoint's own."
            )
        if not (self.denoising or self.keep_states):
            raise UserError("denoising and keep_states are 0, so nothing would be learned. Give at least one of them.")

    def latent_folder(self) -> Path:
        """The folder of cached latents."""
        return Path(self.latent_cache) if self.latent_cache else Path(self.output).parent / "latents"
