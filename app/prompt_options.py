"""Options of the commands that read prompts with an SDXL checkpoint. Nothing large is imported here: help is fast."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from debias_diffusion.encoders.spec import ORIGINAL, EncoderSpec, parse_encoders
from debias_diffusion.errors import UserError
from debias_diffusion.eval.options import MOST_IMAGES, TOYS, check_output
from debias_diffusion.limits import PositiveInt, Seed, between
from debias_diffusion.options import AllowsBad, InPrecision, OnDevice
from debias_diffusion.pipelines.rendering.options import (
    ClipSkip,
    ImageOptions,
    OfCheckpoint,
    Sharpening,
    split_base,
)
from debias_diffusion.text.chunks import Breaks, Emphasis, Reading
from debias_diffusion.toyworld.shipped import shipped


@dataclass(kw_only=True)
class WithEncoder(OfCheckpoint):
    """An SDXL checkpoint that reads prompts, by its own text encoders or with another first one.

    Attributes:
        encoder: Text encoder that replaces the checkpoint's first one: a folder written by `export`, or any
            transformers CLIPTextModel folder. An alignment's folder brings its second encoder, too, if it has one.
            original, and none, is the checkpoint's own. separate:NAME and cut:NAME are `reading`.
    """

    encoder: str | None = None
    reading: Reading | None = None

    USUAL = "overlap"  # where neither says it; no annotation, so no option

    def __post_init__(self):
        super().__post_init__()
        self.spec = EncoderSpec.parse(self.encoder or ORIGINAL, self.reading or self.USUAL)
        if self.reading not in (None, self.spec.reading):
            raise UserError(
                f"encoder is {self.encoder!r} and reading {self.reading!r}, but both say how prompts are read. Leave "
                "out one of them."
            )


@dataclass(kw_only=True)
class Rendering(ImageOptions, InPrecision):
    """How many images are rendered at once, and where.

    Attributes:
        batch: Images rendered at once, of prompts of equal length; more are faster and need more memory.
        low_memory: Keep each model on an NVIDIA GPU only while it runs. Elsewhere encode all prompts before UNet and
            autoencoder are loaded, unless LoRAs are used. The images are the same.
    """

    batch: PositiveInt = 1
    low_memory: bool = False


@dataclass(kw_only=True)
class GenerateConfig(WithEncoder, Rendering):
    """Generate images from prompts of any length.

    Attributes:
        prompt: What to render, in up to 20,000 characters; nothing of it is cut off.
        encoder_2: Text encoder that replaces SDXL's second one, with a projection. "stretch" is the checkpoint's own
            with 248 positions, untrained, as in Long-CLIP.
        refiner: SDXL's refiner, a folder or hub id, for the last fifth of the denoising. It reads long prompts, too.
        output: PNG to write, picture.png by default; for several images the folder, pictures by default. Each PNG
            holds the settings that made it.
        overwrite: Replace an image at `output` that has other settings, such as another prompt.
        prompts: File of prompts, instead of `prompt`: .txt, one a line; .jsonl or .csv with prompt and, optionally,
            negative_prompt, seed and prompt_2 (for SDXL's second encoder). Run the command again to continue an
            interrupted run: finished images are kept.
        negative_prompt: What to avoid. Only used with a guidance scale above 1.
        like: PNG or JPEG of this package, A1111, Forge or ComfyUI, whose settings are used where none is given here.
        loras: Folder of the LoRAs, .safetensors files, that prompts name as <lora:name:0.8>.
        seed: Equal seeds start from equal noise, on every device. Entry i of a file of prompts, from 0, has this seed
            + i unless it names one. The default is 0.
        images_per_prompt: Images of each prompt, with its seed, the next seed, and so on; at most 1000.
    """

    GROUPS = {  # noqa: RUF012 - without an annotation, so no option
        "Prompts": ("prompt", "prompts", "like", "negative_prompt", "reading", "emphasis", "breaks", "clip_skip"),
        "Models": ("base", "encoder", "encoder_2", "refiner", "loras"),
        "Images": (
            *("output", "overwrite", "images_per_prompt", "seed"),
            *("steps", "scheduler", "karras", "guidance_scale", "sharpen", "height", "width"),
        ),
        "Speed and memory": ("batch", "low_memory", "device", "precision"),
    }

    prompt: str | None = field(kw_only=False)
    output: str | None = None
    overwrite: bool = False
    negative_prompt: str | None = None
    seed: Seed | None = None
    encoder_2: str | None = None
    refiner: str | None = None
    prompts: str | None = None
    like: str | None = None
    loras: str | None = None
    images_per_prompt: between(int, 1, MOST_IMAGES) = 1
    emphasis: Emphasis | None = None
    breaks: Breaks | None = None
    sharpen: Sharpening | None = None
    karras: bool | None = None
    clip_skip: ClipSkip | None = None

    def __post_init__(self):
        if self.like is None:  # or the image may say them, see `take_settings`
            usually = {"seed": 0, "breaks": "concatenate", "sharpen": 1.0}
            for name, usual in usually.items():
                setattr(self, name, usual if getattr(self, name) is None else getattr(self, name))
        super().__post_init__()
        if self.refiner:
            split_base(self.refiner)
        shipped(self.encoder_2 or "")  # raises UserError for a misspelt toy model
        if self.prompts is not None and not Path(self.prompts).exists():
            raise UserError(f"There is no file {self.prompts!r}. Give a file of prompts: .txt, .jsonl or .csv.")
        if (self.prompt is None) == (self.prompts is None) and (self.prompts or not self.like):
            given = "neither" if self.prompt is None else "both"
            raise UserError(
                f'Give either a prompt or a file of prompts, not {given}: `generate "a red cat"`, or `generate '
                "--prompts prompts.txt`."
            )

    @property
    def several(self) -> bool:
        """Whether a folder of images is written, not a single file."""
        return self.prompts is not None or self.images_per_prompt > 1


@dataclass(kw_only=True)
class CheckConfig(OfCheckpoint, Rendering):
    """Try an SDXL checkpoint on this machine: what must hold, time and memory, and prompts drawn in four ways.

    A failure does not stop the other checks. On a CPU, images have at most 256 pixels and 2 steps unless you say more.

    Attributes:
        output: Folder to write. What a stopped run has drawn is kept.
        limit: How many of the eight prompts are drawn.
        seed: Prompt i, from 0, starts from noise of this seed + i, in all ways.
        sharpen: The power of the fourth way, whole and sharpened; above 0, at most 4.
    """

    output: str = "runs/real"
    limit: between(int, 1, 8) = 8
    seed: Seed = 0
    sharpen: Sharpening = 2.0

    def __post_init__(self):
        super().__post_init__()
        check_output(self.output)


@dataclass
class TokensConfig(WithEncoder):
    """Show where a prompt is cut, as each program reads it.

    Needs tokenizers and context lengths; no model is loaded. Weights of a checkpoint's folder may be missing. Of an
    encoder only the context length counts: the tokenizer is the checkpoint's.

    Attributes:
        prompt: What to read, in up to 20,000 characters.
        reading: Of a prompt longer than a text encoder's context length; all of them by default.
        json: Print one JSON object for programs: by reading, the fields of `PromptLayout`.
    """

    prompt: str
    emphasis: Emphasis | None = None
    json: bool = False

    USUAL = None


@dataclass(kw_only=True)
class EncodeConfig(WithEncoder, AllowsBad, OnDevice):
    """Encode the captions of a training set, read whole, in the form that a trainer of SDXL takes.

    All files have one length: `positions`, or what the longest caption takes, at most 302. Run the command again to
    continue a stopped run; files of other captions, encoders or options are made again.

    Attributes:
        captions: Folder of images with captions beside them (.txt or .caption), or with a metadata.jsonl.
        to: kohya writes NAME_te_outputs.npz, which sd-scripts takes as its own with
            --cache_text_encoder_outputs_to_disk; diffusers writes a safetensors file for each caption, and index.jsonl.
        output: Folder to write; for kohya by default beside the images, where sd-scripts looks.
        positions: Length of all embeddings, from 77. A longer caption is an error, except under cut and kohya.
        dtype: fp32 or fp16 of the files. They are computed in fp32.
        overwrite: Replace files that this command did not make.
    """

    captions: str
    to: Literal["kohya", "diffusers"]
    output: str | None = None
    positions: PositiveInt | None = None
    dtype: Literal["fp32", "fp16"] = "fp32"
    overwrite: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.to == "diffusers" and self.output is None:
            raise UserError("--to diffusers needs --output, a folder for the embeddings.")


@dataclass(kw_only=True)
class AppConfig(OfCheckpoint, InPrecision):
    """A page for trying encoders: how each reads a prompt, and the images it gives.

    Attributes:
        encoders: Text encoders to compare, up to five: folders written by `export`, any transformers CLIPTextModel
            folder, toy/clip, toy/long-clip, toy/debias-clip, or original, the checkpoint's own. Each reads long prompts
            in overlapping chunks, separate:NAME in separate ones; cut:NAME cuts them at 77 tokens.
        host: Address to listen on. The default is this machine only; 0.0.0.0 or :: lets others in.
        port: Port to listen on. The default is the first free one from 7860.
        user: For the login, with the password in the environment variable DEBIAS_DIFFUSION_PASSWORD.
        budget: Denoising steps of one request, over all its images and encoders.
        judge: Multimodal model on --server that says which sentences are in the images, as in `evaluate following`.
        server: Address of the server that it runs on.
    """

    base: str = "toy/sdxl"
    encoders: list[str] = field(default_factory=lambda: list(TOYS))
    host: str = "127.0.0.1"
    port: between(int, 1, 65535) | None = None
    user: str | None = None
    budget: PositiveInt = 1000  # 6 images by 5 encoders in 30 steps
    judge: str | None = None
    server: str | None = None

    def __post_init__(self):
        super().__post_init__()
        parse_encoders(self.encoders)
