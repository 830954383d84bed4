"""Settings of `ablate`."""

from dataclasses import dataclass
from typing import Literal

from debias_diffusion.errors import UserError
from debias_diffusion.eval.options import check_output, check_source
from debias_diffusion.limits import Tower

Search = Literal["probe", "single", "naive", "all", "ga", "bp"]


@dataclass
class AblateConfig:
    """Find the heads of a CLIP whose suppression makes it retrieve better (AAT), and suppress them.

    Give either `data` (with `images`), your own pairs, or a benchmark, `dataset` with `root`.

    Attributes:
        model: CLIP: a training run, folder, file, hub id, MODEL:PRETRAINED as open_clip names them, or toy/clip.
        output: Folder for ablation.json, which every `evaluate` takes as a model, and the log. A search that was
            stopped continues there.
        data: JSON file in ShareGPT4V's layout, JSONL file, folder of WebDataset shards, folder of images with captions
            beside them, or toy/validation, scenes of the toy world.
        images: Folder that the data file's image paths start from; only for JSON and JSONL.
        dataset: A retrieval benchmark in place of data, see `evaluate retrieval`.
        root: Folder that the benchmark lies in, as its authors publish it.
        limit: Search on the first so many images, each with its first caption. null uses all.
        search: probe measures each head alone and leaves no ablation; single takes the head that alone raises mean-R
            most; naive takes all heads that alone raise it; ga is the genetic algorithm; bp learns a beta for each head
            by gradient descent; all tries every set of heads, of up to 16.
        tower: image, as in the paper, or text.
        way: suppress, as in the paper, moves attention to the first token; mean lets an ablated head always give what
            it gives on average over the pairs of the search, which ordinary weights can hold.
        beta: What the attention to all tokens but the first is multiplied by in a suppressed head, from 0 to 1.
        fitness: What ga and all maximise: margin, or robust, its mean over captions as they are, with sentences 1 and 4
            swapped, and without the first.
        generations: Of ga, at most.
        efficient: ga with fewer individuals, none of which ablates more than 60% of the heads.
        learning_rate: Of bp.
        epochs: Of bp.
        batch: Pairs a step of bp.
        constant: Keep bp's learning rate instead of lowering it to 0.
        batch_size: Images, or captions, encoded at once.
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
    limit: int | None = 1000
    search: Search = "ga"
    tower: Tower = "image"
    way: Literal["suppress", "mean"] = "suppress"
    beta: float = 0.1
    fitness: Literal["margin", "robust"] = "margin"
    generations: int = 100
    efficient: bool = False
    learning_rate: float = 2e-2
    epochs: int = 32
    batch: int = 256
    constant: bool = False
    batch_size: int = 64
    seed: int = 0
    max_bad: float = 0.01
    device: str | None = None

    def __post_init__(self):
        check_output(self.output)
        check_source(self)
        for name in ("generations", "epochs", "batch", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        for name in ("beta", "max_bad"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is {getattr(self, name)}, but must be from 0 to 1.")
        if not self.learning_rate > 0:
            raise UserError(f"learning_rate is {self.learning_rate}, but must be above 0.")
        if self.search == "bp" and (self.tower, self.way, self.fitness) != ("image", "suppress", "margin"):
            raise UserError(
                "bp suppresses the image tower's heads by the contrastive loss: leave out tower, way and fitness."
            )
