"""Options of commands on data, trainings and models. Nothing large is imported here, so that help is fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from debias_diffusion.errors import UserError
from debias_diffusion.limits import (
    Checked,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Rule,
    Side,
    between,
)
from debias_diffusion.options import AllowsBad
from debias_diffusion.toyworld.shipped import shipped
from debias_diffusion.training.config import RunConfig, RunSeed

MOST_SCENES = 1000  # of a split of the toy world
_Split = Annotated[
    str,
    Rule(
        "development or test, or one of them with a suffix such as test-2: the models were trained on the others",
        lambda split: split.partition("-")[0] in ("development", "test"),
    ),
]


@dataclass
class QuickstartConfig(Checked):
    """Train, generate and compare in a toy world: minutes, no downloads.

    A run that was stopped continues with the same command.

    Attributes:
        output: Folder for everything: data, the training run, the exported encoder (debias-clip-sdxl/), results with
            generated images (evaluation/), and report.html.
        seed: Of the training, and of the noise that images start from.
        split: Scenes for retrieval and prompts: test, or development to choose settings by; test-2 and the like are
            more of them.
        scenes: Scenes that retrieval searches among, at most 1000. 400 give R@1 to within 5 points (95% interval).
        prompts: Long prompts rendered with each encoder, from 2 to 1000. 100 give a difference in objects right to
            within 3 to 5 points (95% interval).
        train: The recipe to train; the other encoders come with the package, trained in the same way. all trains all
            three, in three times the time.
    """

    output: str = "runs/quickstart"
    seed: RunSeed = 0
    split: _Split = "test"
    scenes: between(int, 1, MOST_SCENES) = 400
    prompts: between(int, 2, MOST_SCENES) = 100
    train: Literal["debias-clip-sdxl", "debias-clip", "long-clip", "all"] = "debias-clip-sdxl"


@dataclass(kw_only=True)
class AlignConfig(RunConfig):
    """Fit SDXL's text encoders to its frozen UNet, after training and before export.

    The loss is denoising * the UNet's own loss on the images + keep_states * state error + keep_features * distance of
    the pooled features, each a mean over the batch.

    Attributes:
        base: SDXL checkpoint, which is not changed: a folder in diffusers' layout, a single .safetensors file, a hub
            id, or toy/sdxl.
        encoder: Text encoder to fit in the place of SDXL's first one: a training run, a folder, a file, a hub id;
            original is the checkpoint's own, read in chunks. null leaves that one as it is.
        encoder_2: The same for the second one, with a projection; stretch is the checkpoint's own with 248 positions.
        denoising: Weight of the UNet's loss.
        keep_states: Weight of the term that keeps the hidden states of words near the checkpoint's own encoder's.
        keep_features: Weight of the term that keeps the pooled features: the first encoder's where training has put
            them, so that retrieval stays, the second's near the checkpoint's own, which the UNet reads.
        reading: Of long prompts by encoders of 77 positions: overlap, in overlapping chunks as the pipelines do, or
            separate.
        pixels: Images are scaled and cropped to squares of this side, a multiple of 8; null is the checkpoint's own.
        validation: How many of the first pairs are held out; at most 64 of them are measured. auto is 1000, and a tenth
            of fewer than 10,000 pairs.
        batch: Pairs per step, over all processes together. auto is 48; of fewer pairs, the largest power of two.
        warmup: Steps of linear warm-up. auto is 100, at most a tenth of all steps.
        precision: fp32, or bf16 or fp16 for a UNet and frozen encoders of that dtype, and mixed precision in the
            encoders that are fitted. auto is bf16 (fp16 where there is none) on a GPU and fp32 elsewhere.
        latent_cache: Folder of the images' latents, which runs can share; null is latents beside the output folder.
        seed: Of all random draws: order of samples, noise, times.
    """

    GROUPS = {
        "Data and models": ("base", "data", "images", "output", "encoder", "encoder_2", "reading", "pixels"),
        "Loss": ("denoising", "keep_states", "keep_features"),
    } | RunConfig.GROUPS

    base: str
    encoder: str | None = None
    encoder_2: str | None = None
    denoising: NonNegativeFloat = 10.0
    keep_states: NonNegativeFloat = 1.0
    keep_features: NonNegativeFloat = 10.0
    reading: Literal["overlap", "separate"] = "overlap"
    pixels: Side | None = None
    LARGEST_BATCH, LONGEST_WARMUP = 48, 100
    epochs: PositiveInt = 1
    latent_cache: str | None = None

    def __post_init__(self):
        super().__post_init__()
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


@dataclass
class ExportConfig(Checked):
    """Export a text encoder, or both towers, for other programs.

    Attributes:
        model: Folder of a training run (its model after the last step is exported) or of `ablate`, open_clip folder or
            model name. For transformers and comfyui also any other text encoder: a transformers folder, a weights file
            such as longclip-L.pt or clip_l.safetensors, or a hub id.
        output: Folder to write; for comfyui a file that ends in .safetensors. Files of other programs are never
            overwritten.
        to: transformers, or diffusers, writes a folder with text_encoder/, tokenizer/, README.md, and pipeline.py and
            block.py for diffusers; comfyui writes one file for ComfyUI; open_clip and clip write folders with both
            towers, for open_clip and for transformers' CLIPModel; modular writes block.py alone, which lets SDXL read
            long prompts in diffusers' modular pipelines, and takes no model. Suppressed text heads become ordinary
            weights; plain open_clip ignores suppressed image heads, and transformers runs them by code in the folder.
        pretrained: Tag or file of the weights, for a model given by name.
        positions: long reads up to 248 tokens; short writes the encoder of 77 tokens with the rows of positions that
            Fix-CLIP's short captions were trained with (train --recipe fix-clip).
        projection: Export a CLIPTextModelWithProjection, whose text_embeds are the trained features. SDXL's first
            encoder must not have it; its second, bigG, always has.
        scores: Folder with results of `evaluate` for this model, for the model card (README.md).
        push_to_hub: owner/name of the Hugging Face repository to upload the folder to. A new one is private.
    """

    output: str
    model: str | None = None
    to: Literal["transformers", "diffusers", "comfyui", "open_clip", "clip", "modular"] = "transformers"
    pretrained: str | None = None
    positions: Literal["long", "short"] = "long"
    projection: bool = False
    scores: str | None = None
    push_to_hub: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.to == "modular" and (self.model or self.pretrained or self.scores):
            raise UserError("--to modular writes code alone. Leave out --model, --pretrained and --scores.")
        if self.model is None and self.to != "modular":
            raise UserError("Give --model. Only --to modular, which writes code alone, does without.")
        if self.model is not None:
            shipped(self.model)  # raises UserError for a misspelt toy model
        if self.to == "diffusers":
            self.to = "transformers"


@dataclass
class ComfyUIConfig(Checked):
    """Write ComfyUI's node for long prompts, "CLIP Text Encode (long prompt)".

    Attributes:
        output: Folder to write, in ComfyUI's `custom_nodes`. An earlier copy of the node is replaced.
    """

    output: str


@dataclass
class ShardsConfig(AllowsBad):
    """Write image-caption pairs as WebDataset shards of small images, for `train --data`.

    Attributes:
        data: JSON file in ShareGPT4V's layout, or any other data that `train` reads.
        output: Folder to write. A stopped run continues there with the same settings.
        images: Folder that image paths in the data file start from.
        size: Pixels of each image's shorter side, resized as CLIP's own preprocessing does. Smaller images are not
            enlarged.
        per_shard: Pairs in a shard.
        quality: JPEG quality, from 1 to 100.
        lossless: Write PNG instead of JPEG. With the size that a CLIP reads (224), training on the shards reads the
            same pixels as on the original images; not with SigLIP, which squeezes images into squares.
        workers: Processes that read and shrink images; 0 uses the main process. auto fits the cores: 2 to 16.
    """

    data: str
    output: str
    images: str | None = None
    size: between(int, 1, 65500) = 256
    per_shard: PositiveInt = 5000
    quality: between(int, 1, 100) = 95
    lossless: bool = False
    workers: NonNegativeInt | Literal["auto"] = "auto"
