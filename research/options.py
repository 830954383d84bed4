"""Options of the commands of `python -m research`. Nothing large is imported here, so that help is fast."""

from dataclasses import dataclass, field

from debias_diffusion.errors import UserError
from debias_diffusion.eval.options import Data, GenerationConfig, Judging, check_output
from debias_diffusion.limits import Checked, NonNegativeInt, PositiveInt, Share, between
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
        output: Folder for trainings, results and tables (table-S4.md, table-S4.json, claims.md, claims.json).
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
class ColaConfig(Data):
    """Do objects keep their own attributes? Score encoders on Cola.

    Attributes:
        data: A file of Cola's data/, COLA_multiobjects_matching_benchmark.json or
            COLA_singleobjects_benchmark_GQA.json, _CLEVR or _PACO.
        images: Folder with the images that it names, all in one.
    """

    data: str
    images: str


@dataclass(kw_only=True)
class ReferringConfig(GenerationConfig):
    """Score images of toy captions that refer back, also by how these mention each object.

    The options are those of `evaluate generation`.
    """
