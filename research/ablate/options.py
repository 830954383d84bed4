"""Options of `python -m research ablate`. Nothing large is imported here, so that help is fast."""

from dataclasses import dataclass
from typing import Literal

from debias_diffusion.errors import UserError
from debias_diffusion.eval.options import check_output, check_source
from debias_diffusion.limits import Checked, LearningRate, PositiveInt, Seed, Share, Tower, between


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
