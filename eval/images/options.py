"""Settings of the evaluations of generated images."""

from dataclasses import dataclass, field
from typing import Any, Literal

from debias_diffusion.errors import UserError
from debias_diffusion.limits import Layer

from ..settings import check_settings, check_source

MOST_IMAGES = 1000  # of a prompt


@dataclass
class GenerationConfig:
    """Settings of an evaluation of generated images.

    Attributes:
        encoders: Text encoders to compare, each in the place of SDXL's first one: training runs, folders, files, hub
            ids, toy/clip, toy/long-clip, toy/debias-clip; original is the SDXL checkpoint's own. One of 77 positions
            cuts prompts at 77 tokens, as in stock SDXL; named overlap:NAME (overlap:original), it reads long prompts in
            overlapping chunks, as this package's pipelines do, and named chunks:NAME, in chunks that do not overlap.
            SDXL's second encoder beside a longer one reads overlapping chunks, and with chunks:NAME such.
        base: SDXL checkpoint: a folder in diffusers' layout, a single .safetensors file, a hub id, or toy/sdxl.
        output: Folder for the results, `generation.json`, `generation.png` and `examples.png`, and for the generated
            images, `pictures/ENCODER/000000.png` and so on. Finished images of the same settings are kept.
        data: JSON file in ShareGPT4V's layout, JSONL file, folder of WebDataset shards, folder of images with captions
            beside them, or toy/test, scenes of the toy world. Captions are the prompts, images the references.
        images: Folder that the data file's image paths start from; only for JSON and JSONL.
        limit: Use only the first so many pairs (1000 are ShareGPT4V's validation split). null uses all.
        held_out: Use only pairs of the data that a training run among the encoders held out.
        seed: Image i starts from noise seeded with this number + i, the same for every encoder and on every device.
        steps: Denoising steps. auto is 30, and 20 for toy/sdxl.
        guidance_scale: How strongly prompts are followed; 1 is no guidance. auto is 7, as in `generate`, and 3 for
            toy/sdxl.
        images_at_once: Images generated at once, from prompts of the same length; more need more memory. auto is 1, and
            20 for toy/sdxl.
        encoder_2: Text encoder in the place of SDXL's second one, for all encoders but alignments that fitted one;
            stretch is the checkpoint's own, stretched to 248 positions. null keeps it.
        layer: Layer of both text encoders that the UNet reads: penultimate, which SDXL was trained with, or last, the
            last one after the final norm, as in Long-CLIP's code.
        scheduler: diffusers' class in the place of the checkpoint's scheduler: EulerDiscreteScheduler,
            EulerAncestralDiscreteScheduler, DPMSolverMultistepScheduler, DDIMScheduler or UniPCMultistepScheduler. null
            keeps it.
        height: Pixels, a multiple of 8; null is the checkpoint's own (1024 for SDXL).
        width: Likewise.
        prefix: Text before each prompt; "photo, detailed, 8k. " in the paper's Figure S10.
        windows: The old way to name every encoder of 77 positions chunks:NAME; goes with the next release.
        inception_weights: File of torch-fidelity's Inception weights, for FID, KID, precision and recall, or cache for
            the one that torch-fidelity has downloaded. Without it these scores are skipped.
        dino: Folder or hub id of DINO ViT-S/16 in transformers' layout (facebook/dino-vits16), for the DINO score.
            Without it the DINO score is skipped.
        dinov2: Folder or hub id of a DINOv2 in transformers' layout (facebook/dinov2-small), for the DINOv2 score.
        own_features: Another network for FID, KID, precision and recall, on its CLS features: a folder of a
            transformers vision model, or toy/features. Its scores compare with nothing published.
        clip_score: CLIP model for CLIPScore, of the whole caption and sentence by sentence: a folder, file, hub id, or
            MODEL:PRETRAINED as open_clip names them.
        batch_size: Images scored at once.
        max_bad: Largest share of reference images that may be unreadable before the evaluation stops, from 0 to 1.
        device: Device to run on. The default is cuda where there is one, else cpu; under `accelerate launch` each
            process has its own.
    """

    encoders: list[str]
    base: str
    output: str
    data: str
    images: str | None = None
    limit: int | None = 1000
    held_out: bool = False
    seed: int = 0
    steps: int | Literal["auto"] = "auto"
    guidance_scale: float | Literal["auto"] = "auto"
    images_at_once: int | Literal["auto"] = "auto"
    prefix: str = ""
    windows: bool = False
    encoder_2: str | None = None
    layer: Layer = "penultimate"
    scheduler: str | None = None
    height: int | None = None
    width: int | None = None
    inception_weights: str | None = None
    dino: str | None = None
    dinov2: str | None = None
    own_features: str | None = None
    clip_score: str | None = None
    batch_size: int = 32
    max_bad: float = 0.01
    device: str | None = None

    def __post_init__(self):
        check_settings(self, of_images=True)
        _check_drawing(self)


@dataclass
class DriftConfig:
    """Settings of a measurement of drift.

    Give `data`, or a benchmark (`dataset` with `root`).

    Attributes:
        encoders: Text encoders to compare: training runs, folders, files, hub ids, MODEL:PRETRAINED as open_clip names
            them, toy/long-clip, toy/debias-clip.
        base: The encoder that the UNet was trained with: an SDXL checkpoint (its first encoder is read), or any text
            encoder as in encoders; FOLDER/text_encoder_2 is SDXL's second one.
        output: Folder for the results, drift.json and drift.png. Finished results in it are reused.
        data: JSON file in ShareGPT4V's layout, JSONL file, folder of WebDataset shards, folder of images with captions
            beside them, or toy/test, scenes of the toy world. Only captions are read; images may be missing.
        dataset: A retrieval benchmark in place of data, all captions of each image, as `evaluate retrieval` names it.
        root: Folder that the benchmark lies in, as its authors publish it.
        limit: Use only the captions of the first so many images. null uses all; auto is 1000 of the data and all of a
            benchmark.
        batch_size: Captions encoded at once.
        max_bad: Largest share of captions that may be unusable before the evaluation stops, from 0 to 1.
        device: Device to run on. The default is cuda where there is one, else cpu.
    """

    encoders: list[str]
    base: str
    output: str
    data: str | None = None
    dataset: str | None = None
    root: str | None = None
    limit: int | Literal["auto"] | None = "auto"
    batch_size: int = 16
    max_bad: float = 0.01
    device: str | None = None

    def __post_init__(self):
        check_settings(self)
        check_source(self)


@dataclass
class DpgBenchConfig:
    """Settings of a DPG-Bench evaluation.

    Give either `images`, a folder of images, or `base` and `encoders` to generate them with.

    Attributes:
        data: Folder of the published `dpg_bench`: `dpg_bench.csv`, and `prompts` with a text file a prompt.
        vqa: VQA model that answers: folder or hub id of a ViLT or BLIP in transformers' layout.
        output: Folder for the results, `dpg_bench.json` and `dpg_bench.png`, for the answers, and for the generated
            images, `pictures/ENCODER/12/0.png` and so on for the prompt `12.txt`. Finished images and answers of the
            same settings are kept.
        images: Folder of existing images. For the prompt `12.txt` either the folder `12` with a file for each image, or
            the file `12.png` (or .jpg, .jpeg, .webp): a grid of 2 x 2 as the authors publish, or, with one image for
            each prompt, the image.
        base: SDXL checkpoint to generate with: a folder in diffusers' layout, a hub id, or toy/sdxl.
        encoders: Text encoders to compare, each in the place of SDXL's first one: training runs, folders, files, hub
            ids, toy/clip, toy/long-clip, toy/debias-clip; original is the SDXL checkpoint's own. One of 77 positions
            cuts prompts at 77 tokens, as in stock SDXL; named overlap:NAME (overlap:original), it reads long prompts in
            overlapping chunks, as this package's pipelines do, and named chunks:NAME, in chunks that do not overlap.
            SDXL's second encoder beside a longer one reads overlapping chunks, and with chunks:NAME such.
        images_per_prompt: Images for each prompt.
        seed: Image i of each prompt starts from noise seeded with this number + i.
        steps: Denoising steps. auto is 30, and 20 for toy/sdxl.
        guidance_scale: How strongly prompts are followed; 1 is no guidance. auto is 7, and 3 for toy/sdxl.
        images_at_once: Images generated at once, from prompts of the same length; more need more memory. auto is 1, and
            20 for toy/sdxl.
        encoder_2: Text encoder in the place of SDXL's second one, for all encoders but alignments that fitted one;
            stretch is the checkpoint's own, stretched to 248 positions. null keeps it.
        layer: Layer of both text encoders that the UNet reads: penultimate, which SDXL was trained with, or last, the
            last one after the final norm, as in Long-CLIP's code.
        scheduler: diffusers' class in the place of the checkpoint's scheduler: EulerDiscreteScheduler,
            EulerAncestralDiscreteScheduler, DPMSolverMultistepScheduler, DDIMScheduler or UniPCMultistepScheduler. null
            keeps it.
        height: Pixels, a multiple of 8; null is the checkpoint's own (1024 for SDXL).
        width: Likewise.
        prefix: Text before each prompt.
        windows: The old way to name every encoder of 77 positions chunks:NAME; goes with the next release.
        batch_size: Questions asked at once.
        device: Device to run on. The default is cuda where there is one, else cpu; under `accelerate launch` each
            process has its own.
    """

    data: str
    vqa: str
    output: str
    images: str | None = None
    base: str | None = None
    encoders: list[str] = field(default_factory=list)
    images_per_prompt: int = 4
    seed: int = 0
    steps: int | Literal["auto"] = "auto"
    guidance_scale: float | Literal["auto"] = "auto"
    images_at_once: int | Literal["auto"] = "auto"
    prefix: str = ""
    windows: bool = False
    encoder_2: str | None = None
    layer: Layer = "penultimate"
    scheduler: str | None = None
    height: int | None = None
    width: int | None = None
    batch_size: int = 16
    device: str | None = None

    def __post_init__(self):
        if (self.images is None) == (self.base is None) or (self.base is None) != (not self.encoders):
            raise UserError(
                "Images are there, or are generated, not both. Give either --images, such as --images pictures, "
                "or --base and --encoders, such as --base sdxl --encoders original runs/a."
            )
        check_settings(self, with_encoders=self.base is not None, of_images=True)
        if not 1 <= self.images_per_prompt <= MOST_IMAGES:
            raise UserError(
                f"images_per_prompt={self.images_per_prompt} is not allowed. Give a whole number from 1 to "
                f"{MOST_IMAGES}."
            )
        if self.base is not None:
            _check_drawing(self)


def _check_drawing(config: Any) -> None:
    """Raises UserError for settings that no image can be generated with."""
    from .drawing import DrawingSettings  # takes seconds, which help need not wait for

    DrawingSettings.of(config)
