"""Options of the commands that are not evaluations. Nothing large is imported here, so that help is fast."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from debias_diffusion.encoders.spec import ORIGINAL, EncoderSpec, Kind, parse_encoders
from debias_diffusion.errors import UserError
from debias_diffusion.eval.options import MOST_IMAGES, TOYS, check_output
from debias_diffusion.files import open_regular
from debias_diffusion.limits import (
    Checked,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Precision,
    Rule,
    Seed,
    Share,
    Side,
    between,
)
from debias_diffusion.pipelines.rendering.options import (
    KARRAS,
    ClipSkip,
    ImageOptions,
    Scheduler,
    SentenceSharpening,
    Sharpening,
    split_base,
)
from debias_diffusion.text.chunks import Breaks, Emphasis, Reading
from debias_diffusion.toyworld.shipped import shipped
from debias_diffusion.training.config import RunConfig, RunSeed

MOST_SCENES = 1000  # of a split of the toy world
# The options of `generate` that may come from an image.
TAKEN = (
    *("prompt", "negative_prompt", "reading", "emphasis", "breaks", "clip_skip", "seed", "steps", "scheduler"),
    *("karras", "guidance_scale", "sharpen", "sharpen_sentences", "width", "height"),
)
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
        model: Folder of a training run (its model after the last step is exported) or with suppressed heads, open_clip
            folder or model name. For transformers and comfyui also any other text encoder: a transformers folder, a
            weights file such as longclip-L.pt or clip_l.safetensors, or a hub id.
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
class GenerateConfig(ImageOptions):
    """Generate images from prompts of any length.

    Attributes:
        prompt: What to render, in up to 20,000 characters; nothing of it is cut off.
        base: An SDXL or Stable Diffusion 1.5 checkpoint: a folder in diffusers' layout, a hub id, a single
            .safetensors file, or CONFIG:FILE.safetensors with the folder or hub id of its configuration and tokenizers.
        encoder: Text encoder that replaces the checkpoint's first one: a folder written by `export`, or any
            transformers CLIPTextModel folder. An alignment's folder brings its second encoder, too, if it has one.
            original, and none, is the checkpoint's own. separate:NAME and cut:NAME are `reading`.
        encoder_2: The same for SDXL's second one, with a projection. "stretch" is the checkpoint's own with 248
            positions, untrained, as in Long-CLIP.
        refiner: SDXL's refiner, a folder or hub id, for the last fifth of the denoising. It reads long prompts, too.
        output: PNG to write, picture.png by default; for several images the folder, pictures by default. Each PNG
            holds the settings that made it.
        overwrite: Replace an image at `output` that has other settings, such as another prompt.
        prompts: File of prompts, instead of `prompt`: .txt, one a line; .jsonl or .csv with prompt and, optionally,
            negative_prompt, seed and prompt_2 (for SDXL's second encoder), and no other column. Run the command again
            to continue an interrupted run: finished images are kept.
        negative_prompt: What to avoid. Only used with a guidance scale above 1.
        like: PNG or JPEG of this package, A1111, Forge or ComfyUI, whose settings are used where none is given here.
        loras: Folder of the LoRAs, .safetensors files, that prompts name as <lora:name:0.8>.
        seed: Equal seeds start from equal noise, on every device. Entry i of a file of prompts, from 0, has this seed
            + i unless it names one. The default is 0.
        scheduler: diffusers' class for the steps; the checkpoint's own by default.
        karras: Noise levels as in Karras et al. (2022); the checkpoint's own by default.
        clip_skip: Counts as A1111, Forge and ComfyUI do, not as diffusers: the text encoders' layer that is read, from
            the last, 1. SDXL reads 2 or more, as in A1111 and Forge.
        images_per_prompt: Images of each prompt, with its seed, the next seed, and so on; at most 1000.
        batch: Images rendered at once, of prompts of equal length; more are faster and need more memory.
        low_memory: Encode all prompts before UNet and autoencoder are loaded. The images are the same.
        reading: Of a prompt longer than a text encoder's context length. overlap, the default, reads chunks, each but
            the first with the end of the text before it, so that pronouns keep their antecedents; at most twice the
            chunks. separate reads each chunk by itself. cut cuts the prompt at 77 tokens, as diffusers does. a1111
            (Forge too), kohya and comfyui read as these programs do.
        emphasis: What weights such as (word:1.3), ((word)), [word], word++ and BREAK do; by default what the reading's
            program does, of overlap, separate and cut none. none: they are text. ignore: they are read and dropped.
            comfyui: they move words away from the empty prompt. original (or a1111) and no_norm: as A1111's settings of
            these names.
        breaks: What BREAK does where weights are read: concatenate begins a new chunk; average reads each part as a
            prompt of its own and takes their mean, weighted by BREAK:0.7. The default is concatenate.
        device: cpu, cuda, cuda:1, mps; the fastest available by default.
        precision: fp32, bf16 or fp16 of the models. auto is fp16 on an accelerator and fp32 on the CPU.
    """

    GROUPS = {  # noqa: RUF012 - without an annotation, so no option
        "Prompts": ("prompt", "prompts", "like", "negative_prompt", "reading", "emphasis", "breaks", "clip_skip"),
        "Models": ("base", "encoder", "encoder_2", "refiner", "loras"),
        "Images": (
            *("output", "overwrite", "images_per_prompt", "seed"),
            *("steps", "scheduler", "karras", "guidance_scale", "sharpen", "sharpen_sentences", "height", "width"),
        ),
        "Speed and memory": ("batch", "low_memory", "device", "precision"),
    }

    prompt: str | None
    base: str
    encoder: str | None = None
    output: str | None = None
    overwrite: bool = False
    negative_prompt: str | None = None
    seed: Seed | None = None
    device: str | None = None
    precision: Precision = "auto"
    encoder_2: str | None = None
    refiner: str | None = None
    prompts: str | None = None
    like: str | None = None
    loras: str | None = None
    images_per_prompt: between(int, 1, MOST_IMAGES) = 1
    batch: PositiveInt = 1
    low_memory: bool = False
    emphasis: Emphasis | None = None
    breaks: Breaks | None = None
    reading: Reading | None = None
    sharpen: Sharpening | None = field(default=None, kw_only=True)
    sharpen_sentences: SentenceSharpening | None = field(default=None, kw_only=True)
    scheduler: Scheduler | None = None
    karras: bool | None = None
    clip_skip: ClipSkip | None = None

    def __post_init__(self):
        self.taken: dict = {}  # from the image, by option
        self.left: list[str] = []  # what was not, in sentences
        if self.like is not None:
            self._take_settings(self.like)
        usually = {"seed": 0, "breaks": "concatenate", "sharpen": 1.0, "sharpen_sentences": 1.0}
        for name, usual in usually.items():
            setattr(self, name, usual if getattr(self, name) is None else getattr(self, name))
        super().__post_init__()
        for name in filter(None, (self.base, self.refiner)):
            split_base(name)  # raises UserError for what is not there
        shipped(self.encoder_2 or "")  # raises UserError for a misspelt toy model
        if self.prompts is not None:
            open_regular(self.prompts).close()
        spec = _parse_encoder(self.encoder, self.reading, "overlap")
        self.encoder, self.reading = None if spec.kind is Kind.ORIGINAL else spec.name, spec.reading
        if (self.prompt is None) == (self.prompts is None):
            given = "neither" if self.prompt is None else "both"
            raise UserError(
                f'Give either a prompt or a file of prompts, not {given}: `generate "a red cat"`, or `generate '
                "--prompts prompts.txt`."
            )

    def _take_settings(self, path: str) -> None:
        """Fills in the options that are not given with an image's settings."""
        from debias_diffusion.pipelines.rendering.infotext import OURS, read_image  # help does not wait for Pillow
        from debias_diffusion.pipelines.rendering.png import SAMPLERS

        program, values, self.left = read_image(path, loras=self.loras is not None)
        classes, sampler = {SAMPLERS[cls]: cls for cls in get_args(Scheduler)}, str(values.get("scheduler", ""))
        values["scheduler"] = self.scheduler or classes.get(sampler)
        if sampler and values["scheduler"] is None:
            self.left.append(
                f"The sampler {sampler[:60]!r}: none of {', '.join(classes)}. The checkpoint's own is used."
            )
        if values.get("karras") and values["scheduler"] not in KARRAS:
            self.left.append("Noise levels of Karras: this sampler has others.")
            values["karras"] = None
        for name in ("base", "encoder", "encoder_2", "prompt_2"):
            if (value := values.get(name)) is not None and value != getattr(self, name, None):
                self.left.append(f"The {name} {str(value)[:80]!r}: files are never taken from an image.")
        says_reading = (self.encoder or "").partition(":")[0] in get_args(Reading)
        given = {"prompt"} if self.prompts is not None else {"reading"} if says_reading else set()
        for name in TAKEN:
            if getattr(self, name) is None and values.get(name) is not None and name not in given:
                self.taken[name] = values[name]
                setattr(self, name, values[name])
        if program != OURS:
            self.left.append("Noise and its levels: they are diffusers', so the image will be like it, not equal.")
        if self.prompt is None and self.prompts is None:
            raise UserError(f"The image {path!r} has no prompt that is read. {' '.join(self.left)} Give a prompt.")
        self.taken = {"program": program, **self.taken}

    @property
    def several(self) -> bool:
        """Whether a folder of images is written, not a single file."""
        return self.prompts is not None or self.images_per_prompt > 1


def _parse_encoder(name: str | None, reading: Reading | None, default: Reading | None) -> EncoderSpec:
    """A text encoder, SDXL's own if None. Raises UserError where the name and `reading` say different readings."""
    spec = EncoderSpec.parse(name or ORIGINAL, reading or default)
    if reading not in (None, spec.reading):
        raise UserError(
            f"encoder is {name!r} and reading {reading!r}, but both say how prompts are read. Leave out one of them."
        )
    return spec


@dataclass
class CheckConfig(ImageOptions):
    """Try an SDXL checkpoint on this machine: what must hold, time and memory, and prompts drawn in four ways.

    A failure does not stop the other checks. On a CPU, images have at most 256 pixels and 2 steps unless you say more.

    Attributes:
        base: SDXL checkpoint: a folder in diffusers' layout, a hub id, a single .safetensors file, or toy/sdxl.
        output: Folder to write. What a stopped run has drawn is kept.
        limit: How many of the project's 100 prompts are drawn.
        seed: Prompt i, from 0, starts from noise of this seed + i, in all ways.
        sharpen: The factor of the fourth way, whole and sharpened; above 0, at most 4.
        batch: Images drawn at once, of prompts of equal length.
        low_memory: Where images are drawn, encode all prompts before UNet and autoencoder are loaded.
        device: cpu, cuda, cuda:1, mps; the fastest available by default.
        precision: fp32, bf16 or fp16 of the models. auto is fp16 on an accelerator and fp32 on the CPU.
    """

    base: str
    output: str = "runs/real"
    limit: between(int, 1, 100) = 8
    seed: Seed = 0
    sharpen: Sharpening = field(default=1.5, kw_only=True)
    batch: PositiveInt = 1
    low_memory: bool = False
    device: str | None = None
    precision: Precision = "auto"

    def __post_init__(self):
        super().__post_init__()
        check_output(self.output)
        split_base(self.base)  # raises UserError for what is not there


@dataclass
class ShowcaseConfig(CheckConfig):
    """Draw 100 long prompts in four ways, on a page where a person marks what is right in them.

    Attributes:
        output: Folder to write: images, index.html, mark.html, contact-sheet.png, showcase.json.
        marks: File that mark.html has saved: then showcase.json counts facts right by way and sentence.
        judge: Multimodal model that marks all facts, too, as in `evaluate following`: a folder or hub id or, with
            --server, its name there. With marks, how often it agrees with them is printed.
        server: Address of an OpenAI-compatible server with top_logprobs, such as http://localhost:8000.
    """

    output: str = "runs/showcase"
    limit: between(int, 1, 100) = 100
    marks: str | None = None
    judge: str | None = None
    server: str | None = None


@dataclass
class TokensConfig(Checked):
    """Show where a prompt is cut, as each program reads it.

    Needs tokenizers and context lengths; no model is loaded.

    Attributes:
        prompt: What to read, in up to 20,000 characters.
        base: An SDXL or Stable Diffusion 1.5 checkpoint, as `generate` takes it; weights of a folder may be missing.
        encoder: Text encoder that replaces the checkpoint's first one, as `generate` takes it. Only its context length
            counts: the tokenizer is the checkpoint's.
        reading: Of a prompt longer than a text encoder's context length; all of them by default.
        emphasis: What weights such as (word:1.3) and BREAK do, as in `generate`; by default what the reading's program
            does.
        json: Print one JSON object for programs: by reading, the fields of `PromptLayout`.
    """

    prompt: str
    base: str
    encoder: str | None = None
    reading: Reading | None = None
    emphasis: Emphasis | None = None
    json: bool = False

    def __post_init__(self):
        super().__post_init__()
        split_base(self.base)  # raises UserError for what is not there
        self.spec = _parse_encoder(self.encoder, self.reading, None)


@dataclass
class EncodeConfig(Checked):
    """Encode the captions of a training set, read whole, in the form that a trainer of SDXL takes.

    All files have one length: `positions`, or what the longest caption takes, at most 302. Run the command again to
    continue a stopped run; files of other captions, encoders or options are made again.

    Attributes:
        captions: Folder of images with captions beside them (.txt or .caption), or with a metadata.jsonl.
        base: SDXL checkpoint that is trained, as `generate` takes it.
        to: kohya writes NAME_te_outputs.npz, which sd-scripts takes as its own with
            --cache_text_encoder_outputs_to_disk; diffusers writes a safetensors file for each caption, and index.jsonl.
        output: Folder to write; for kohya by default beside the images, where sd-scripts looks.
        encoder: Text encoder that replaces the checkpoint's first one, as `generate` takes it.
        reading: Of captions longer than a text encoder's context length, as in `generate`; overlap by default.
        positions: Length of all embeddings, from 77. A longer caption is an error, except under cut and kohya.
        dtype: fp32 or fp16 of the files. They are computed in fp32.
        overwrite: Replace files that this command did not make.
        max_bad: Largest share of bad captions, from 0 to 1.
        device: cpu, cuda, cuda:1, mps; the fastest available by default.
    """

    captions: str
    base: str
    to: Literal["kohya", "diffusers"]
    output: str | None = None
    encoder: str | None = None
    reading: Reading | None = None
    positions: PositiveInt | None = None
    dtype: Literal["fp32", "fp16"] = "fp32"
    overwrite: bool = False
    max_bad: Share = 0.01
    device: str | None = None

    def __post_init__(self):
        super().__post_init__()
        split_base(self.base)  # raises UserError for what is not there
        self.spec = _parse_encoder(self.encoder, self.reading, "overlap")
        if self.to == "diffusers" and self.output is None:
            raise UserError("--to diffusers needs --output, a folder for the embeddings.")


@dataclass
class ShardsConfig(Checked):
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
        max_bad: Largest share of bad records, from 0 to 1.
    """

    data: str
    output: str
    images: str | None = None
    size: between(int, 1, 65500) = 256
    per_shard: PositiveInt = 5000
    quality: between(int, 1, 100) = 95
    lossless: bool = False
    workers: NonNegativeInt | Literal["auto"] = "auto"
    max_bad: Share = 0.01


@dataclass
class AppConfig(Checked):
    """A page for trying encoders: how each reads a prompt, and the images it gives.

    Attributes:
        base: SDXL checkpoint: a folder in diffusers' layout, a single .safetensors file, a hub id, or toy/sdxl.
        encoders: Text encoders to compare, up to five: folders written by `export`, any transformers CLIPTextModel
            folder, toy/clip, toy/long-clip, toy/debias-clip, or original, the checkpoint's own. Each reads long prompts
            in overlapping chunks, separate:NAME in separate ones; cut:NAME cuts them at 77 tokens.
        host: Address to listen on. The default is this machine only; 0.0.0.0 or :: lets others in.
        port: Port to listen on. The default is the first free one from 7860.
        user: For the login, with a password in password_file or the environment variable DEBIAS_DIFFUSION_PASSWORD.
        password_file: File whose first line is the password.
        budget: Denoising steps of one request, over all its images and encoders.
        device: cpu, cuda, cuda:1, mps; by default the fastest available.
        precision: fp32, bf16 or fp16 of the models. auto is fp16 on an accelerator and fp32 on the CPU.
    """

    base: str = "toy/sdxl"
    encoders: list[str] = field(default_factory=lambda: list(TOYS))
    host: str = "127.0.0.1"
    port: between(int, 1, 65535) | None = None
    user: str | None = None
    password_file: str | None = None
    budget: PositiveInt = 1000  # 6 images by 5 encoders in 30 steps
    device: str | None = None
    precision: Precision = "auto"

    def __post_init__(self):
        super().__post_init__()
        split_base(self.base)  # raises UserError for what is not there
        self.specs = parse_encoders(self.encoders)
