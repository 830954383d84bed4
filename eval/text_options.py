"""Settings of the evaluations of encoders on images and captions."""

from dataclasses import dataclass
from typing import Literal

from debias_diffusion.errors import UserError, near_matches

from .settings import BenchmarkConfig, check_settings, check_source

CLASSIFICATIONS = ("imagenet-1k", "imagenet-v2", "imagenet-a", "imagenet-o", "cifar-10", "cifar-100")


@dataclass
class PairsConfig:
    """Settings of an evaluation of two-towers on image-caption pairs.

    Give either `data` (with `images`), your own pairs, or a benchmark, `dataset` with `root`.

    Attributes:
        encoders: CLIP models to compare: training runs, folders, files, hub ids, MODEL:PRETRAINED as open_clip names
            them (ViT-B-16-quickgelu:openai), toy/clip, toy/long-clip, toy/debias-clip.
        output: Folder for the results, a JSON file and a figure. Finished results in it are reused.
        data: JSON file in ShareGPT4V's layout, JSONL file, folder of WebDataset shards, folder of images with captions
            beside them, or toy/test, scenes of the toy world.
        images: Folder that the data file's image paths start from; only for JSON and JSONL.
        dataset: A retrieval benchmark in place of data. One of urban1k, dci, long-dci, docci, iiw, sharegpt4v-1k, coco,
            coco-five, coco-train, coco-all, flickr30k, flickr30k-test, flickr30k-karpathy, coco-cn-val, coco-cn-test,
            coco-cn-all, flickr30k-cna-val, flickr30k-cna-test, flickr30k-cna-all, recos-v1.
        root: Folder that the benchmark lies in, as its authors publish it.
        limit: Use only the first so many images. null uses all; auto is 1000 of the data, as ShareGPT4V's validation
            split has, and all of a benchmark.
        held_out: Use only pairs of the data that a training run among the encoders held out.
        batch_size: Images, or captions, encoded at once.
        max_bad: Largest share of images or records that may be unreadable before the evaluation stops, from 0 to 1.
        device: Device to run on. The default is cuda where there is one, else cpu.
    """

    encoders: list[str]
    output: str
    data: str | None = None
    images: str | None = None
    dataset: str | None = None
    root: str | None = None
    limit: int | Literal["auto"] | None = "auto"
    held_out: bool = False
    batch_size: int = 64
    max_bad: float = 0.01
    device: str | None = None

    def __post_init__(self):
        check_settings(self)
        check_source(self)


@dataclass
class RetrievalConfig(PairsConfig):
    """Settings of a retrieval evaluation.

    `dataset` may name several benchmarks, with commas between them: each is then evaluated into a folder of its name
    in `output`, and lies in a folder of its name, or of its data set's, in `root`.

    Attributes:
        examples: Also write a page with so many captions for every two encoders whose image one of them finds first
            and the other does not.
    """

    examples: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.examples < 0 or (self.examples and len(self.encoders) < 2):
            raise UserError(
                f"examples is {self.examples} with {len(self.encoders)} encoders. Give a number from 0, and at least "
                "two encoders: examples are captions that one of them gets right and another wrong."
            )


@dataclass
class RobustnessConfig(PairsConfig):
    """Settings of a robustness evaluation."""


@dataclass
class AttentionConfig:
    """Settings of an evaluation of the attention from EOT.

    Give `data`, or a benchmark (`dataset` with `root`), or a prompt, or captions and a prompt.

    Attributes:
        encoders: Text encoders to compare: training runs, folders, files, hub ids, MODEL:PRETRAINED as open_clip names
            them (ViT-B-16-quickgelu:openai), toy/clip, toy/long-clip, toy/debias-clip.
        output: Folder for the results, a JSON file and figures. Finished results in it are reused.
        data: JSON file in ShareGPT4V's layout, JSONL file, folder of WebDataset shards, folder of images with captions
            beside them, or toy/test, scenes of the toy world. Only captions are read; images may be missing.
        dataset: A retrieval benchmark in place of data, all captions of each image, as `evaluate retrieval` names it.
        root: Folder that the benchmark lies in, as its authors publish it.
        prompt: A prompt to show word by word.
        scale: Of the attention before the softmax: head, the mean over heads of q k / sqrt(head width), as the softmax
            sees it; or hidden, q k / sqrt(hidden dimension) over all heads, as in the paper's equations 1 and 2, which
            is sqrt(heads) times that.
        limit: Use only the captions of the first so many images. null uses all; auto is 1000 of the data and all of a
            benchmark.
        batch_size: Captions encoded at once.
        max_bad: Largest share of captions that may be unusable before the evaluation stops, from 0 to 1.
        device: Device to run on. The default is cuda where there is one, else cpu.
    """

    encoders: list[str]
    output: str
    data: str | None = None
    dataset: str | None = None
    root: str | None = None
    prompt: str | None = None
    scale: Literal["head", "hidden"] = "head"
    limit: int | Literal["auto"] | None = "auto"
    batch_size: int = 64
    max_bad: float = 0.01
    device: str | None = None

    def __post_init__(self):
        check_settings(self)
        if self.has_captions:
            check_source(self)
        elif self.prompt is None:
            raise UserError(
                "There is nothing to read: no data, no dataset and no prompt is given. Give --data, --dataset with "
                "--root, or --prompt."
            )

    @property
    def has_captions(self) -> bool:
        """Whether captions are to be read."""
        return any(given is not None for given in (self.data, self.dataset, self.root))


@dataclass
class ClassificationConfig(BenchmarkConfig):
    """Settings of a zero-shot classification.

    Attributes:
        dataset: imagenet-1k, imagenet-v2, imagenet-a, imagenet-o, cifar-10 or cifar-100.
        data: Its folder, as its authors publish it: 1000 (A and O: 200) folders of images named by WordNet id, V2's
            named 0 to 999; of CIFAR the folder of the binary version.
    """

    dataset: str
    data: str

    def __post_init__(self):
        super().__post_init__()
        if self.dataset not in CLASSIFICATIONS:
            raise UserError(
                f"Unknown dataset {self.dataset!r}.{near_matches(self.dataset, CLASSIFICATIONS)} Give one of "
                f"{', '.join(CLASSIFICATIONS)}."
            )


@dataclass
class ColaConfig(BenchmarkConfig):
    """Settings of an evaluation on Cola.

    Attributes:
        data: A file of Cola's data/, COLA_multiobjects_matching_benchmark.json or
            COLA_singleobjects_benchmark_GQA.json, _CLEVR or _PACO.
        images: Folder with the images that it names, all in one.
    """

    data: str
    images: str
