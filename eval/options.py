"""Settings of the evaluations: a dataclass each, whose docstring is the help of its command.

Imports no large library, so that help is fast and mistyped settings are refused at once.
"""

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from debias_diffusion.encoders.resolve import may_be_hub_id
from debias_diffusion.encoders.spec import EncoderSpec, labels, parse_encoders
from debias_diffusion.errors import UserError
from debias_diffusion.limits import Checked, Layer, PositiveInt, Seed, between
from debias_diffusion.options import AllowsBad, OnDevice
from debias_diffusion.pipelines.rendering.options import ImageOptions, OfCheckpoint
from debias_diffusion.toyworld.shipped import TWO_TOWERS, shipped

MOST_IMAGES = 1000  # of a prompt
TOYS = (f"cut:{TWO_TOWERS[0]}", *TWO_TOWERS)
TOY_BASE, TOY_FEATURES = "toy/sdxl", "toy/features"
TOY_CLIP = "toy/clip"  # the text encoder of toy/sdxl


def check_output(output: str) -> None:
    """Raises UserError for an empty name, which would mean the current folder, and where no folder can be made."""
    if not output:
        raise UserError("There is no output. Give a folder for the results.")
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
            f"Given is {given or 'no data and no benchmark'}. Give either data, such as toy/test, or a benchmark "
            "(dataset) and its folder (root)."
        )


# ---- parts that several evaluations share


@dataclass
class Encoders(OnDevice):
    """Encoders to compare, where they run, and where the results go: a part of every evaluation.

    Attributes:
        encoders: Encoders to compare: training runs, folders, files, hub ids, MODEL:PRETRAINED as open_clip names them
            (ViT-B-16-quickgelu:openai), toy/clip, toy/long-clip, toy/debias-clip. How prompts are read for images
            (cut:NAME) changes nothing here. short:RUN reads with a Fix-CLIP run's positions for short captions.
        output: Folder for the results: JSON, figures, the page of `evaluate all`, generated images in images/ENCODER/.
            What is finished there is not done again.
        batch_size: Images, or texts, encoded at once.
    """

    encoders: list[str]
    output: str
    batch_size: PositiveInt = field(default=64, kw_only=True)

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
class Data(AllowsBad, Encoders):
    """Pairs of one's own, or labelled images.

    Attributes:
        data: JSON file in ShareGPT4V's layout, JSONL file, folder of WebDataset shards, folder of images with captions
            beside them, or toy/test, scenes of the toy world. Where only captions are read, images may be missing.
    """

    data: str | None = None


@dataclass(kw_only=True)
class HeldOut:
    """Pairs that encoders have not seen.

    Attributes:
        held_out: Use only pairs that none of the encoders has seen: they, and the models they were made from, were
            neither trained on them nor chosen by them.
    """

    held_out: bool = False


@dataclass
class Captions(HeldOut, Data):
    """Captions of one's own pairs, or of a benchmark.

    Attributes:
        dataset: Retrieval benchmark in place of data: urban1k, dci, dci-as-released, long-dci, docci, iiw,
            sharegpt4v-1k, coco, coco-five, coco-train, coco-all, flickr30k, flickr30k-test, flickr30k-karpathy.
        root: Folder that the benchmark lies in, as its authors publish it.
        limit: Use only the first so many images, with all their captions. null uses all; auto is 1000 of the data, as
            ShareGPT4V's validation split has, and all of a benchmark.
    """

    dataset: str | None = field(default=None, kw_only=True)
    root: str | None = field(default=None, kw_only=True)
    limit: PositiveInt | Literal["auto"] | None = field(default="auto", kw_only=True)

    images = None  # of captions alone, see `check_source`; no annotation, so no option

    def __post_init__(self):
        super().__post_init__()
        check_source(self)


@dataclass(kw_only=True)
class Drawing(OfCheckpoint, ImageOptions, Encoders):
    """How each encoder's images are generated, in one SDXL checkpoint.

    Attributes:
        encoders: Text encoders to compare, each in the place of SDXL's first one: training runs, folders, files, hub
            ids, toy/clip, toy/long-clip, toy/debias-clip; original is the SDXL checkpoint's own. Prompts longer than
            the context length are read in overlapping chunks, as by this package's pipelines; named separate:NAME, in
            chunks that do not overlap; named cut:NAME (cut:original), prompts are cut at 77 tokens, as by stock SDXL.
            SDXL's second encoder reads as the first does.
        seed: Image i starts from noise seeded with this number + i, the same for every encoder and on every device.
        images_at_once: Images generated at once, from prompts of the same length; more need more memory. auto is 1, and
            20 for toy/sdxl.
        prefix: Text before each prompt; "photo, detailed, 8k. " in the paper's Figure S10.
        encoder_2: Text encoder in the place of SDXL's second one, for all encoders but alignments that fitted one;
            stretch is the checkpoint's own, stretched to 248 positions. null keeps it.
        refiner: SDXL's refiner, a folder or hub id, for the last fifth of the denoising; it reads with its own encoder.
    """

    seed: Seed = 0
    images_at_once: PositiveInt | Literal["auto"] = "auto"
    prefix: str = ""
    encoder_2: str | None = None
    refiner: str | None = None
    layer: Layer = "penultimate"
    zero_empty_negative: bool | None = None

    WITH_READINGS = True

    @property
    def second_encoders(self) -> list[EncoderSpec]:
        """What `encoder_2` names besides the checkpoint's own."""
        from debias_diffusion.pipelines.rendering.checkpoints import STRETCH

        return [] if self.encoder_2 in (None, STRETCH) else [EncoderSpec.parse(self.encoder_2)]


@dataclass(kw_only=True)
class Scoring(HeldOut):
    """Reference images, and the networks that compare generated ones with them.

    Attributes:
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

    images: str | None = None
    limit: PositiveInt | None = 1000
    inception_weights: str | None = None
    dino: str | None = None
    own_features: str | None = None
    clip_score: str | None = None

    dataset = None  # no benchmarks; no annotation, so no option

    def __post_init__(self):
        super().__post_init__()
        for name in ("inception_weights", "dino", "own_features"):  # which are loaded when others have run for long
            network = getattr(self, name)
            if network not in (None, "cache") and not (os.path.exists(shipped(network)) or may_be_hub_id(network)):
                raise UserError(
                    f"{name} is {network!r}, which is not there. Give another one, or null to skip its scores."
                )


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
    """

    dataset: list[str] = field(default_factory=list, kw_only=True)


@dataclass
class AttentionConfig(Captions):
    """How much EOT attends to each position of a text.

    Give `data`, or a benchmark (`dataset` with `root`), or a prompt, or captions and a prompt.

    Attributes:
        prompt: A prompt to show word by word.
    """

    prompt: str | None = field(default=None, kw_only=True)

    def __post_init__(self):
        Data.__post_init__(self)
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
        judge: Multimodal model that judges, by its name on --server; or toy/checker for toy scenes, toy/checker:0.1:0.2
            if it is to err on 0.1 of the questions whose answer is no, and on 0.2 of the others.
        server: Address of an OpenAI-compatible server that gives top_logprobs, such as http://localhost:8000.
        batch_size: Questions sent to the server at once.
    """

    judge: str
    server: str | None = None
    batch_size: PositiveInt = 16

    def __post_init__(self):
        super().__post_init__()
        if self.server is None and not self.judge.startswith("toy/"):
            raise UserError(f"The judge {self.judge!r} needs a server. Give --server, such as http://localhost:8000.")


@dataclass(kw_only=True)
class FollowingConfig(Judging, Drawing):
    """Which sentences of a prompt are in its image, as a multimodal model judges.

    Give --image and --prompt for one image that is there, or --prompts, --base, --encoders and --output to generate.

    Attributes:
        prompts: Prompts: a file, .txt with one a line or .jsonl with "prompt" and, where they are not its sentences,
            "questions"; a published set in the place of its authors' files, dpg:PATH (DPG-Bench), corebench:PATH
            (T2I-CoReBench), geneval2:PATH, longbench:PATH (LongBench-T2I), unigenbench:PATH (UniGenBench++'s long and
            short prompts); or scenes of the toy world, toy/test, or toy/long-test with toy/short-test's as short ones.
        image: One image that is there. The judge is asked about each sentence of `prompt`, and nothing is written.
        prompt: The prompt of `image`.
        images_per_prompt: Images for each prompt.
        limit: Use only the first so many prompts. null uses all.
    """

    prompts: str | None = None
    image: str | None = None
    prompt: str | None = None
    base: str | None = None
    encoders: list[str] = field(default_factory=list)
    output: str | None = None
    images_per_prompt: between(int, 1, MOST_IMAGES) = 1
    limit: PositiveInt | None = None

    def __post_init__(self):
        ways = ("image", "prompt"), ("prompts", "base", "encoders", "output")
        given = tuple(name for way in ways for name in way if getattr(self, name))
        if given not in ways:
            raise UserError(
                f"Given: {', '.join(given) or 'no prompts and no image'}. Give image and prompt for one image that "
                "is there, or prompts, base, encoders and output to generate images."
            )
        if self.image:
            Judging(judge=self.judge, server=self.server, batch_size=self.batch_size)  # checks them
            return
        super().__post_init__()
        if self.judge.startswith("toy/") and not self.prompts.startswith("toy/"):
            raise UserError(f"{self.judge!r} judges toy scenes. Give --prompts toy/test, or a model on a --server.")
