"""Options of commands on data, trainings and models. Nothing large is imported here, so that help is fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from debias_diffusion.errors import UserError
from debias_diffusion.eval.options import check_output, check_source
from debias_diffusion.limits import (
    Checked,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Precision,
    Rule,
    Seed,
    Share,
    Side,
    Tower,
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
class AblateConfig(Checked):
    """Find the heads of a CLIP whose suppression makes it retrieve better (AAT), and suppress them.

    Give either `data` (with `images`), your own pairs, or a benchmark, `dataset` with `root`.

    Attributes:
        model: CLIP: a training run, folder, file, hub id, MODEL:PRETRAINED as open_clip names them, or toy/clip.
        output: Folder for ablation.json, which every `evaluate` takes as a model. A stopped search continues there.
        data: JSON file in ShareGPT4V's layout, JSONL file, folder of WebDataset shards, folder of images with captions
            beside them, or toy/validation, scenes of the toy world.
        images: Folder that the data file's image paths start from; only for JSON and JSONL.
        dataset: A retrieval benchmark in place of data, see `evaluate retrieval`.
        root: Folder that the benchmark lies in, as its authors publish it.
        limit: Search on the first so many images, each with its first caption. null uses all.
        search: probe measures each head alone and leaves no ablation; single takes the head that alone raises mean-R
            most, naive all that raise it; ga is the genetic algorithm; bp learns each head's beta by gradient descent;
            all tries every set of heads, of up to 16.
        recall: What mean-R is of, by which probe, single and naive judge a head: text_to_image, as in the paper, or
            both directions.
        tower: image, as in the paper, or text.
        way: suppress, as in the paper, moves attention to the first token; mean lets an ablated head always give what
            it gives on average over the pairs of the search, which ordinary weights can hold.
        beta: What the attention to all tokens but the first is multiplied by in a suppressed head, from 0 to 1.
        fitness: What ga and all maximise: margin, or robust, its mean over captions as they are, with sentences 1 and 4
            swapped, and without the first.
        generations: Of ga, at most.
        population: Individuals of a generation of ga, at least 2. null is 48, 96 or 128, by the number of heads.
        efficient: ga with fewer individuals, none of which ablates more than 60% of the heads.
        learning_rate: Of bp.
        epochs: Of bp.
        bp_batch: Pairs a step of bp.
        constant: Keep bp's learning rate instead of lowering it to 0.
        batch: Images, or captions, encoded at once.
        seed: Of all draws.
        max_bad: Largest share of images or records that may be unreadable, from 0 to 1.
        device: Device to run on. The default is cuda where there is one, else cpu.
    """

    model: str
    output: str
    data: str | None = None
    images: str | None = None
    dataset: str | None = None
    root: str | None = None
    limit: PositiveInt | None = 1000
    search: Literal["probe", "single", "naive", "all", "ga", "bp"] = "ga"
    recall: Literal["text_to_image", "both"] = "text_to_image"
    tower: Tower = "image"
    way: Literal["suppress", "mean"] = "suppress"
    beta: Share = 0.1
    fitness: Literal["margin", "robust"] = "margin"
    generations: PositiveInt = 100
    population: between(int, 2, 10_000) | None = None
    efficient: bool = False
    learning_rate: LearningRate = 2e-2
    epochs: PositiveInt = 32
    bp_batch: PositiveInt = 256
    constant: bool = False
    batch: PositiveInt = 64
    seed: Seed = 0
    max_bad: Share = 0.01
    device: str | None = None

    def __post_init__(self):
        super().__post_init__()
        check_output(self.output)
        check_source(self)
        if self.search == "bp" and (self.tower, self.way, self.fitness) != ("image", "suppress", "margin"):
            raise UserError(
                "bp suppresses the image tower's heads by the contrastive loss: leave out tower, way and fitness."
            )


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


@dataclass
class SynthesizeConfig(Checked):
    """Write captions for images with a multimodal model, clean them, and leave pairs that `train` reads.

    Give --data, --images, or both: --images alone for a folder of images without captions.

    Attributes:
        model: Image-text-to-text model of transformers with a chat template: a folder or hub id. Fix-CLIP's is
            llava-hf/llama3-llava-next-8b-hf. With --server, its name there.
        output: Folder to write: captions.jsonl (for shards: shards), removed.jsonl, report.html. A stopped run
            continues there with the same settings.
        data: Pairs whose images are captioned: any data that `train` reads but toy scenes. Their captions become short
            captions.
        images: Folder that image paths in the data file start from; without --data, the folder of the images.
        kind: long asks for a detailed description, with one of Fix-CLIP's 20 prompts. short asks for one sentence: the
            short caption beside the data's caption, or the caption where there is none.
        server: Address of an OpenAI-compatible server that has the model, such as http://localhost:8000 of vLLM.
        batch: Images that are asked about at once, in each process.
        max_new_tokens: Where an answer is cut. An unfinished last sentence is dropped.
        seed: Of the choice of prompts.
        precision: fp32, bf16 or fp16 of the model. auto is bf16 (fp16 where there is none) on a GPU and fp32 elsewhere.
        per_part: Images in a part. A stopped run repeats at most one part for each process.
        workers: Processes that read images, for each process that asks; 0 reads them there. auto fits the cores.
        max_bad: Largest share of unreadable images, from 0 to 1.
        device: Device to run on. The default is cuda where there is one, else cpu; under `accelerate launch` each
            process has its own.
    """

    model: str
    output: str
    data: str | None = None
    images: str | None = None
    kind: Literal["long", "short"] = "long"
    server: str | None = None
    batch: PositiveInt = 8
    max_new_tokens: PositiveInt = 300
    seed: Seed = 0
    precision: Precision = "auto"
    per_part: PositiveInt = 1000
    workers: NonNegativeInt | Literal["auto"] = "auto"
    max_bad: Share = 0.01
    device: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.data is None and self.images is None:
            raise UserError("Neither data nor images is given. Give --images, a folder of images, or --data, pairs.")
        from debias_diffusion.data.toy_scenes import is_toy_scenes  # takes seconds, which help need not wait for

        if self.data is not None and is_toy_scenes(self.data):
            raise UserError(
                f"The scenes of {self.data!r} are no files and have long captions. Give a folder of images, or pairs."
            )
