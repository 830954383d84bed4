"""Options of the commands of `python -m research`. Nothing large is imported here, so that help is fast."""

from dataclasses import dataclass, field
from typing import Literal

from debias_diffusion.app.prompt_options import CheckConfig
from debias_diffusion.errors import UserError
from debias_diffusion.eval.options import GenerationConfig, Judging, RobustnessConfig, check_output, check_source
from debias_diffusion.limits import Checked, LearningRate, NonNegativeInt, PositiveInt, Seed, Share, Tower, between
from debias_diffusion.options import AllowsBad, OnDevice
from debias_diffusion.toyworld.shipped import WEIGHTS
from debias_diffusion.training.config import RunSeed


@dataclass
class ReproduceConfig(Checked):
    """Regenerate a table or figure of the papers beside the published numbers, or test their claims.

    Everything finished is kept: the same command continues. Several processes started with the same command on one
    output folder share the work. Without a GPU, or for the toy world, --device cpu.

    Attributes:
        target: table-S4 and the like as --list names them, claims, or all; one or several.
        world: real, the papers' data and weights; or toy, the same comparisons in the toy world.
        root: Folder of the real data, see research/reproduce.md.
        output: Folder for trainings, results and tables (table-S4.md, table-S4.json, evidence.md, claims.json).
        seeds: The seeds, each with trainings and scenes of its own.
        papers: Folder of the tables' settings and published numbers.
        device: Device to run on: cpu, or null for cuda where there is one.
        results: Also write the claims' results into this JSON file.
        mixed: Take tables made of results of several commits of this package, too; without it the exit code is 1.
        list: Name every table and figure, what it needs and whether it is here.
        plan: Print what would run and what it costs, and do nothing.
    """

    target: list[str]
    world: str = "real"
    root: str = "data"
    output: str = "runs/papers"
    seeds: list[RunSeed] = field(default_factory=lambda: [0])
    papers: str = "research/papers"
    device: str | None = None
    results: str | None = None
    mixed: bool = False
    list: bool = False
    plan: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.seeds = sorted(set(self.seeds))
        check_output(self.output)
        if not self.seeds:
            raise UserError("There are no seeds. Give one or several: --seeds 0 1 2.")
        if not self.target and not self.list:
            raise UserError(
                "Nothing is named. Give a table, such as `reproduce table-S4`, or `reproduce claims`; "
                "`reproduce --list` names all."
            )


@dataclass
class ToyModelsConfig(Checked):
    """Build the toy world's models from nothing, in hours on two cores. A stopped build continues.

    Attributes:
        output: Folder for checkpoints and logs.
        weights: Folder for the finished fp16 models; by default the package's.
    """

    output: str = "runs/toyworld"
    weights: str = str(WEIGHTS)


@dataclass(kw_only=True)
class JudgeConfig(Judging, AllowsBad, OnDevice):
    """How well a judge agrees with people who labelled images.

    Attributes:
        labels: Folder with labels.csv of the columns image, prompt, element (a text or a question) and label (1 if the
            image shows it, else 0), and the images; or the folder data of LongT2IBench, with split/test.json.
        output: Folder for the results. What is answered is not asked again.
        clip_score: CLIP model for CLIPScore of the same prompts: a folder, file, hub id, or MODEL:PRETRAINED as
            open_clip names them. A judge that orders images no better is not fit for claims.
        limit: Use only the first so many images. null uses all.
    """

    labels: str
    output: str
    clip_score: str | None = None
    limit: PositiveInt | None = None

    def __post_init__(self):
        super().__post_init__()
        check_output(self.output)


@dataclass
class PairsConfig(Checked):
    """Write pairs of COCO's and ImageNet's training sets as JSONL, for `ablate` and `train`.

    Attributes:
        root: Folder with coco/ (annotations and train2017) and imagenet/train.
        output: File to write, ending in .jsonl.
        coco: First so many images of COCO's train2017, each with its first caption.
        imagenet: So many classes of ImageNet-1k, at most 1000, each with one image and "a photo of a tench." and so on.
    """

    root: str
    output: str
    coco: NonNegativeInt = 1000
    imagenet: between(int, 0, 1000) = 0


@dataclass(kw_only=True)
class ReferringConfig(GenerationConfig):
    """Score images of toy captions that refer back, also by how these mention each object.

    The options are those of `evaluate generation`.
    """


@dataclass
class AblateConfig(AllowsBad, OnDevice):
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

    def __post_init__(self):
        super().__post_init__()
        check_output(self.output)
        check_source(self)
        if self.search == "bp" and (self.tower, self.way, self.fitness) != ("image", "suppress", "margin"):
            raise UserError(
                "bp suppresses the image tower's heads by the contrastive loss: leave out tower, way and fitness."
            )


@dataclass(kw_only=True)
class ShowcaseConfig(CheckConfig):
    """Draw 100 long prompts in four ways, on a page where a person marks what is right in them.

    Attributes:
        output: Folder to write: images, index.html, mark.html, contact-sheet.png, showcase.json.
        limit: How many of the 100 prompts are drawn.
        marks: File that mark.html has saved: then showcase.json counts facts right by way and sentence.
        judge: Multimodal model on --server that marks all facts, too, as in `evaluate following`. With marks, how often
            it agrees with them is printed.
        server: Address of an OpenAI-compatible server that gives top_logprobs, such as http://localhost:8000.
    """

    output: str = "runs/showcase"
    limit: between(int, 1, 100) = 100
    marks: str | None = None
    judge: str | None = None
    server: str | None = None


@dataclass
class SynthesizeConfig(AllowsBad):
    """Write captions for images with a multimodal model, clean them, and leave pairs that `train` reads.

    Give --data, --images, or both: --images alone for a folder of images without captions.

    Attributes:
        model: Multimodal model, by its name on the server. Fix-CLIP's is llava-hf/llama3-llava-next-8b-hf.
        server: Address of an OpenAI-compatible server that has the model, such as http://localhost:8000 of vLLM.
        output: Folder to write: captions.jsonl (for shards: shards), removed.jsonl, report.html. A stopped run
            continues there with the same settings.
        data: Pairs whose images are captioned: any data that `train` reads but toy scenes. Their captions become short
            captions.
        images: Folder that image paths in the data file start from; without --data, the folder of the images.
        kind: long asks for a detailed description, with one of Fix-CLIP's 20 prompts. short asks for one sentence: the
            short caption beside the data's caption, or the caption where there is none.
        batch: Images that are asked about at once.
        max_new_tokens: Where an answer is cut. An unfinished last sentence is dropped.
        seed: Of the choice of prompts.
        per_part: Images in a part. A stopped run repeats at most one part.
        workers: Processes that read images; 0 reads them in the one that asks. auto fits the cores.
    """

    model: str
    server: str
    output: str
    data: str | None = None
    images: str | None = None
    kind: Literal["long", "short"] = "long"
    batch: PositiveInt = 8
    max_new_tokens: PositiveInt = 300
    seed: Seed = 0
    per_part: PositiveInt = 1000
    workers: NonNegativeInt | Literal["auto"] = "auto"

    def __post_init__(self):
        super().__post_init__()
        if self.data is None and self.images is None:
            raise UserError("Neither data nor images is given. Give --images, a folder of images, or --data, pairs.")
        from debias_diffusion.data.sources import is_toy_scenes  # takes seconds, which help need not wait for

        if self.data is not None and is_toy_scenes(self.data):
            raise UserError(
                f"The scenes of {self.data!r} are no files and have long captions. Give a folder of images, or pairs."
            )


@dataclass
class MaskedRetrievalConfig(RobustnessConfig):
    """Retrieval recall where captions are compared with images under the captions' masks (SmartCLIP).

    Encoders without a mask network, which runs of smart-clip have, are compared as by `evaluate retrieval`. SmartCLIP's
    published scores are without masks. Give either `data` (with `images`), your own pairs, or a benchmark, `dataset`
    with `root`.
    """
