"""Settings of the evaluations: a dataclass each, whose docstring is the help of its command.

Imports no large library, so that help is fast and mistyped settings are refused at once.
"""

import os
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from debias_diffusion.encoders.spec import ORIGINAL, EncoderSpec, Kind, labels, parse_encoders
from debias_diffusion.errors import UserError
from debias_diffusion.limits import Checked, Layer, NonNegativeInt, PositiveInt, Precision, Seed, Share, between
from debias_diffusion.pipelines.rendering.options import ImageOptions, Scheduler
from debias_diffusion.toyworld.shipped import TWO_TOWERS

Classification = Literal["imagenet-1k", "imagenet-v2", "imagenet-a", "imagenet-o", "cifar-10", "cifar-100"]
MOST_IMAGES = 1000  # of a prompt
TOYS = (f"cut:{TWO_TOWERS[0]}", *TWO_TOWERS)
TOY_BASE, TOY_FEATURES = "toy/sdxl", "toy/features"
TOY_CLIP = "toy/clip"  # the text encoder of toy/sdxl
GENERATED, GENERATED_TOY = 1000, 200  # images of each encoder


def check_output(output: str) -> None:
    """Raises UserError for an empty name, which would mean the current folder, and where no folder can be made."""
    if not output:
        raise UserError("There is no output. Give --output, a folder for the results.")
    path = Path(output).absolute()
    existing = next(place for place in (path, *path.parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        fault = "may not be written to" if existing.is_dir() else "is a file"
        raise UserError(f"The output {output!r} cannot be made: {str(existing)!r} {fault}. Give another folder.")


def check_source(config: Any) -> None:
    """Raises UserError unless the settings name data, or a benchmark (`dataset`) and its folder (`root`)."""
    dataset = bool(config.dataset)
    if bool(config.data) == dataset or bool(config.root) != dataset or (dataset and config.images):
        sources = ("data", "images", "dataset", "root")
        given = ", ".join(f"{name} {getattr(config, name)!r}" for name in sources if getattr(config, name))
        raise UserError(
            f"Given is {given or 'no data and no benchmark'}. Give either --data, such as --data toy/test, or a "
            "benchmark and its folder, such as --dataset docci --root docci."
        )


# ---- parts that several evaluations share


@dataclass
class Encoders(Checked):
    """Encoders to compare, where they run, and where the results go: a part of every evaluation.

    Attributes:
        encoders: Encoders to compare: training runs, folders, files, hub ids, MODEL:PRETRAINED as open_clip names them
            (ViT-B-16-quickgelu:openai), toy/clip, toy/long-clip, toy/debias-clip. How prompts are read for images
            (cut:NAME) changes nothing here. short:RUN reads with a Fix-CLIP run's positions for short captions.
        output: Folder for the results: JSON, figures, the page of `evaluate all`, generated images in images/ENCODER/.
            What is finished there is not done again.
        batch_size: Images, or texts, encoded at once.
        device: Device to run on. The default is cuda where there is one, else cpu; generating under `accelerate
            launch`, each process has its own.
    """

    encoders: list[str]
    output: str
    batch_size: PositiveInt = field(default=64, kw_only=True)
    device: str | None = field(default=None, kw_only=True)

    WITH_READINGS = False  # whether results depend on how long prompts are read; no annotation, so no option

    def __post_init__(self):
        super().__post_init__()
        check_output(self.output)
        _ = self.specs  # raises UserError before anything is read

    @cached_property
    def specs(self) -> list[EncoderSpec]:
        """The encoders, in their order."""
        return parse_encoders(self.encoders, self.WITH_READINGS)

    @cached_property
    def labelled(self) -> dict[str, EncoderSpec]:
        """The encoders by their labels in the report."""
        return dict(zip(labels(self.specs, self.WITH_READINGS), self.specs, strict=True))


@dataclass
class Data(Encoders):
    """Pairs of one's own, or labelled images.

    Attributes:
        data: JSON file in ShareGPT4V's layout, JSONL file, folder of WebDataset shards, folder of images with captions
            beside them, or toy/test, scenes of the toy world. Where only captions are read, images may be missing.
        max_bad: Largest share of records or images that may be unusable before the evaluation stops, from 0 to 1.
    """

    data: str | None = None
    max_bad: Share = field(default=0.01, kw_only=True)


@dataclass
class Captions(Data):
    """Captions of one's own pairs, or of a benchmark.

    Attributes:
        held_out: Use only pairs that none of the encoders has seen: they, and the models they were made from, were
            neither trained on them nor chosen by them.
        dataset: Retrieval benchmark in place of data: urban1k, dci, dci-as-released, long-dci, docci, iiw,
            sharegpt4v-1k, coco, coco-five, coco-train, coco-all, flickr30k, flickr30k-test, flickr30k-karpathy,
            coco-cn-val, coco-cn-test, coco-cn-all, flickr30k-cna-val, flickr30k-cna-test, flickr30k-cna-all, recos-v1.
        root: Folder that the benchmark lies in, as its authors publish it.
        limit: Use only the first so many images, with all their captions. null uses all; auto is 1000 of the data, as
            ShareGPT4V's validation split has, and all of a benchmark.
    """

    held_out: bool = field(default=False, kw_only=True)
    dataset: str | None = field(default=None, kw_only=True)
    root: str | None = field(default=None, kw_only=True)
    limit: PositiveInt | Literal["auto"] | None = field(default="auto", kw_only=True)

    images = None  # of captions alone, see `check_source`; no annotation, so no option

    def __post_init__(self):
        super().__post_init__()
        check_source(self)


@dataclass(kw_only=True)
class Drawing(ImageOptions, Encoders):
    """How each encoder's images are generated, in one SDXL checkpoint.

    Attributes:
        encoders: Text encoders to compare, each in the place of SDXL's first one: training runs, folders, files, hub
            ids, toy/clip, toy/long-clip, toy/debias-clip; original is the SDXL checkpoint's own. Prompts longer than
            the context length are read in overlapping chunks, as by this package's pipelines; named separate:NAME, in
            chunks that do not overlap; named cut:NAME (cut:original), prompts are cut at 77 tokens, as by stock SDXL.
            SDXL's second encoder reads as the first does.
        base: SDXL checkpoint: a folder in diffusers' layout, a single .safetensors file, a hub id, or toy/sdxl.
        seed: Image i starts from noise seeded with this number + i, the same for every encoder and on every device.
        images_at_once: Images generated at once, from prompts of the same length; more need more memory. auto is 1, and
            20 for toy/sdxl.
        prefix: Text before each prompt; "photo, detailed, 8k. " in the paper's Figure S10.
        encoder_2: Text encoder in the place of SDXL's second one, for all encoders but alignments that fitted one;
            stretch is the checkpoint's own, stretched to 248 positions. null keeps it.
        refiner: SDXL's refiner, a folder or hub id, for the last fifth of the denoising; it reads with its own encoder.
        layer: Layer of both text encoders that the UNet reads: penultimate, which SDXL was trained with, or last, the
            last one after the final norm, as in Long-CLIP's code.
        scheduler: diffusers' class in the place of the checkpoint's scheduler. null keeps it.
        zero_empty_negative: The empty negative prompt is zeros (true) or the encoded empty text (false). null: as in
            the program that a reading imitates, else as in diffusers.
    """

    base: str
    seed: Seed = 0
    images_at_once: PositiveInt | Literal["auto"] = "auto"
    prefix: str = ""
    encoder_2: str | None = None
    refiner: str | None = None
    layer: Layer = "penultimate"
    scheduler: Scheduler | None = None
    zero_empty_negative: bool | None = None

    WITH_READINGS = True

    def __post_init__(self):
        super().__post_init__()
        if self.base is not None:
            from .images.rendered import rendering_settings  # takes seconds, which help need not wait for

            rendering_settings(self)

    @property
    def second_encoders(self) -> list[EncoderSpec]:
        """What `encoder_2` names besides the checkpoint's own."""
        from debias_diffusion.pipelines.rendering.checkpoints import STRETCH

        return [] if self.encoder_2 in (None, STRETCH) else [EncoderSpec.parse(self.encoder_2)]


@dataclass(kw_only=True)
class Scoring:
    """Reference images, and the networks that compare generated ones with them.

    Attributes:
        held_out: Use only pairs that none of the encoders has seen: they, and the models they were made from, were
            neither trained on them nor chosen by them.
        images: Folder that the data file's image paths start from; only for JSON and JSONL.
        limit: Use only the first so many pairs (1000 are ShareGPT4V's validation split). null uses all.
        inception_weights: File of torch-fidelity's Inception weights, for FID, KID, precision and recall, or cache for
            the one that torch-fidelity has downloaded. Without it these scores are skipped.
        dino: Folder or hub id of DINO ViT-S/16 in transformers' layout (facebook/dino-vits16), for the DINO score.
            Without it the DINO score is skipped.
        own_features: Another network for FID, KID, precision and recall, on its CLS features: a folder of a
            transformers vision model, or toy/features. Its scores compare with nothing published.
        clip_score: CLIP model for CLIPScore, of the whole caption and sentence by sentence: a folder, file, hub id, or
            MODEL:PRETRAINED as open_clip names them.
    """

    held_out: bool = False
    images: str | None = None
    limit: PositiveInt | None = 1000
    inception_weights: str | None = None
    dino: str | None = None
    own_features: str | None = None
    clip_score: str | None = None

    dataset = None  # no benchmarks; no annotation, so no option


# ---- the evaluations


@dataclass
class RobustnessConfig(Captions):
    """How shortsighted? Recall when sentences are moved, removed or come late.

    Give either `data` (with `images`), your own pairs, or a benchmark, `dataset` with `root`.

    Attributes:
        images: Folder that the data file's image paths start from; only for JSON and JSONL.
    """

    images: str | None = None


@dataclass
class RetrievalConfig(RobustnessConfig):
    """Retrieval recall with whole captions.

    Each of several benchmarks lies in a folder of its name, or of its data set's, in `root`, and is evaluated into a
    folder of its name in `output`.

    Attributes:
        examples: Also write a page with so many captions for every two encoders whose image one of them finds first
            and the other does not.
    """

    dataset: list[str] = field(default_factory=list, kw_only=True)
    examples: NonNegativeInt = field(default=0, kw_only=True)


@dataclass
class AttentionConfig(Captions):
    """How much EOT attends to each position of a text.

    Give `data`, or a benchmark (`dataset` with `root`), or a prompt, or captions and a prompt.

    Attributes:
        prompt: A prompt to show word by word.
        image: Image file, to show how similar its parts are to the prompt, and what regional prompts look at.
    """

    prompt: str | None = field(default=None, kw_only=True)
    image: str | None = field(default=None, kw_only=True)

    def __post_init__(self):
        Data.__post_init__(self)
        if self.image is not None and self.prompt is None:
            raise UserError("The image is compared with a text. Give --prompt, too.")
        if self.has_captions or self.prompt is None:
            check_source(self)

    @property
    def has_captions(self) -> bool:
        """Whether captions are to be read."""
        return any(given is not None for given in (self.data, self.dataset, self.root))


@dataclass(kw_only=True)
class DriftConfig(Captions):
    """How far hidden states have moved from those that SDXL's UNet was trained on.

    Give `data`, or a benchmark (`dataset` with `root`).

    Attributes:
        base: The encoder that the UNet was trained with: an SDXL checkpoint (its first encoder is read), or any text
            encoder as in encoders; FOLDER/text_encoder_2 is SDXL's second one.
    """

    base: str
    batch_size: PositiveInt = 16


@dataclass(kw_only=True)
class GenerationConfig(Scoring, Drawing, Data):
    """FID, DINO score and others of images generated from captions.

    Captions of the data are the prompts, images the references.

    Attributes:
        dinov2: Folder or hub id of a DINOv2 in transformers' layout (facebook/dinov2-small), for the DINOv2 score.
        batch_size: Images scored at once.
    """

    data: str
    dinov2: str | None = None
    batch_size: PositiveInt = 32


@dataclass(kw_only=True)
class Judging(Checked):
    """What answers questions about images.

    Attributes:
        judge: Folder or hub id of an image-text-to-text model of transformers with a chat template, or, with --server,
            its name there; toy/checker for toy scenes, toy/checker:0.1:0.2 if it is to err on 0.1 of the questions
            whose answer is no, and on 0.2 of the others.
        server: Address of an OpenAI-compatible server with top_logprobs (vLLM, SGLang), such as http://localhost:8000.
        batch_size: Questions asked at once.
        precision: fp32, bf16 or fp16 of the judge. auto is bf16 (fp16 where there is none) on a GPU and fp32 elsewhere.
    """

    judge: str
    server: str | None = None
    batch_size: PositiveInt = 16
    precision: Precision = "auto"


@dataclass(kw_only=True)
class FollowingConfig(Judging, Drawing):
    """Which sentences of a prompt are in its image, as a multimodal model judges.

    Attributes:
        prompts: Prompts: a file, .txt with one a line or .jsonl with "prompt" and, where they are not its sentences,
            "questions"; a published set in the place of its authors' files, dpg:PATH (DPG-Bench), corebench:PATH
            (T2I-CoReBench), geneval2:PATH, longbench:PATH (LongBench-T2I); or scenes of the toy world, toy/test.
        images_per_prompt: Images for each prompt.
        limit: Use only the first so many prompts. null uses all.
    """

    prompts: str
    images_per_prompt: between(int, 1, MOST_IMAGES) = 1
    limit: PositiveInt | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.judge.startswith("toy/") and not self.prompts.startswith("toy/"):
            raise UserError(f"{self.judge!r} judges toy scenes. Give --prompts toy/test, or a model as --judge.")


@dataclass(kw_only=True)
class ClassificationConfig(Data):
    """Zero-shot top-1 on ImageNet, its variants and CIFAR.

    Attributes:
        dataset: The benchmark.
        data: Its folder, as its authors publish it: 1000 (A and O: 200) folders of images named by WordNet id, V2's
            named 0 to 999; of CIFAR the folder of the binary version.
    """

    dataset: Classification
    data: str


# ---- all of them, and their page


@dataclass
class AllConfig(Scoring, Data):
    """Every evaluation that the options allow, and one page of all; by default in the toy world.

    Attributes:
        encoders: CLIP models to compare: training runs, folders, files, hub ids, MODEL:PRETRAINED as open_clip names
            them (ViT-B-16-quickgelu:openai), toy/clip, toy/long-clip, toy/debias-clip. For images, their text encoders
            take the place of SDXL's first, and read prompts as `evaluate generation` says of cut:NAME and
            separate:NAME; original, the SDXL checkpoint's own, is for images only.
        images_per_encoder: Generate images of only the first so many pairs. auto is 1000, as in Table S7 of the
            DeBias-CLIP paper, and 200 with toy/sdxl.
        base: SDXL folder in diffusers' layout, or a hub id, to generate with. Without it no images are generated and no
            drift is measured; auto is toy/sdxl for scenes of the toy world, whose images toy/features scores, and none
            for other data.
        classification: A benchmark of `evaluate classification`.
        classification_data: Its folder, as its authors publish it.
        prompts: Prompts of `evaluate following`, whose images are generated with the base.
        judge: Judge of these images, in process.
        batch_size: Images, texts or questions taken at once; null is each evaluation's own number.
    """

    encoders: list[str] = field(default_factory=lambda: list(TOYS))
    output: str = "runs/evaluation"
    data: str = "toy/test"
    images_per_encoder: PositiveInt | Literal["auto"] = "auto"
    base: str | None = "auto"
    classification: Classification | None = None
    classification_data: str | None = None
    prompts: str | None = None
    judge: str | None = None
    batch_size: PositiveInt | None = field(default=None, kw_only=True)

    WITH_READINGS = True

    def __post_init__(self):
        super().__post_init__()
        for pair in (("classification", "classification_data"), ("prompts", "judge")):
            given = [getattr(self, name) for name in pair]
            if given.count(None) == 1:
                raise UserError(f"{pair[0]} is {given[0]!r} and {pair[1]} {given[1]!r}. Give both, or neither.")
        if self.prompts is not None and self.sdxl is None:
            raise UserError("prompts need --base, the SDXL checkpoint that generates their images.")
        if not self.for_texts:
            raise UserError(
                f"encoders={self.encoders} has none for texts: {ORIGINAL!r} is for images only. Name another one, or "
                "run `evaluate generation` alone."
            )

    @property
    def for_texts(self) -> list[str]:
        """The encoders that read texts without SDXL, each once, however it reads prompts."""
        return list(dict.fromkeys(spec.name for spec in self.specs if spec.kind is not Kind.ORIGINAL))

    @property
    def for_images(self) -> list[str]:
        """The encoders for SDXL, each once; toy/clip in toy/sdxl is the checkpoint's own."""
        renames = {TOY_CLIP: ORIGINAL} if self.sdxl == TOY_BASE else {}
        pairs = zip(self.encoders, self.specs, strict=True)
        names = (name.removesuffix(spec.name) + renames.get(spec.name, spec.name) for name, spec in pairs)
        return list(dict.fromkeys(names))

    @property
    def is_toy(self) -> bool:
        """Whether the data are scenes of the toy world."""
        from debias_diffusion.data.toy_scenes import is_toy_scenes

        return is_toy_scenes(self.data)

    @property
    def sdxl(self) -> str | None:
        """The SDXL checkpoint to generate with."""
        return (TOY_BASE if self.is_toy else None) if self.base == "auto" else self.base

    @property
    def generated(self) -> int:
        """How many images of each encoder are generated, at most."""
        count = self.images_per_encoder
        if count == "auto":
            count = GENERATED_TOY if self.sdxl == TOY_BASE else GENERATED
        return count if self.limit is None else min(count, self.limit)

    def settings(self, options: type, **changes) -> Any:
        """The settings of one evaluation: what is given here by the same name, and `changes`."""
        given = vars(self)
        shared = {item.name: given[item.name] for item in fields(options) if item.name in given}
        if self.batch_size is None:
            del shared["batch_size"]
        return options(**(shared | {"encoders": self.for_texts} | changes))


@dataclass(kw_only=True)
class JudgeConfig(Judging):
    """How well a judge agrees with people who labelled images.

    Attributes:
        labels: Folder with labels.csv of the columns image, prompt, element (a text or a question) and label (1 if the
            image shows it, else 0), and the images; or the folder data of LongT2IBench, with split/test.json.
        output: Folder for the results. What is answered is not asked again.
        clip_score: CLIP model for CLIPScore of the same prompts: a folder, file, hub id, or MODEL:PRETRAINED as
            open_clip names them. A judge that orders images no better is not fit for claims.
        limit: Use only the first so many images. null uses all.
        max_bad: Largest share of unusable labels and images, from 0 to 1.
        device: Device to run on. The default is cuda where there is one, else cpu.
    """

    labels: str
    output: str
    clip_score: str | None = None
    limit: PositiveInt | None = None
    max_bad: Share = 0.01
    device: str | None = None

    def __post_init__(self):
        super().__post_init__()
        check_output(self.output)


@dataclass
class ReportConfig(Checked):
    """One page of any number of results.

    Attributes:
        folder: Folder with results of `evaluate`, at any depth.
        output: Folder for the pages, `report.md` and `report.html`. The default is the folder itself.
    """

    folder: str
    output: str | None = None
