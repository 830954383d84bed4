"""Settings of `quickstart` and `shards`."""

from dataclasses import dataclass
from math import inf

from debias_diffusion.errors import UserError
from debias_diffusion.limits import check_max_bad


@dataclass
class QuickstartConfig:
    """Train DeBias-CLIP, as it is and for SDXL, and Long-CLIP in a toy world; compare images with the original CLIP's.

    Attributes:
        output: Folder for everything: data, training runs, exported encoders (long-clip/, debias-clip/ and
            debias-clip-sdxl/), results with generated images (evaluation/), report.json and report.html. A run that was
            stopped continues there; only what a changed setting affects is made anew.
        seed: Of the training, and of the noise that images start from.
        split: Scenes for retrieval and prompts: test, or development to choose settings by; test-2 and the like are
            more of them.
        scenes: Scenes that retrieval searches among, at most 1000.
        prompts: Long prompts drawn with each encoder, from 2 to 1000.
        trained_on: Pairs of image and long caption in the training.
        steps: Training steps.
        learning_rate: Peak learning rate of the training.
        batch: Pairs a step, at least 4.
        short_weight: w of the loss w * short + (1 - w) * long, from 0 to 1, for both recipes. null leaves each its own.
        drawing_steps: Denoising steps of an image.
    """

    output: str = "runs/quickstart"
    seed: int = 0
    split: str = "test"
    scenes: int = 1000
    prompts: int = 200
    trained_on: int = 4000
    steps: int = 150
    learning_rate: float = 5e-4
    batch: int = 128
    short_weight: float | None = None
    drawing_steps: int = 20


@dataclass
class ShardsConfig:
    """Write image-caption pairs as WebDataset shards of small JPEGs, for `train --data`.

    Attributes:
        data: JSON file in ShareGPT4V's layout, or any other data that `train` reads.
        output: Folder to write. A stopped run continues there with the same settings.
        images: Folder that image paths in the data file start from.
        size: Pixels of each image's shorter side. Smaller images are not enlarged.
        per_shard: Pairs in a shard.
        quality: JPEG quality, from 1 to 100.
        workers: Processes that read and shrink images; 0 uses the main process.
        max_bad: Largest share of bad records, from 0 to 1.
    """

    data: str
    output: str
    images: str | None = None
    size: int = 256
    per_shard: int = 5000
    quality: int = 95
    workers: int = 2
    max_bad: float = 0.01

    def __post_init__(self):
        for name, least, most in (("size", 1, 65500), ("per_shard", 1, inf), ("quality", 1, 100), ("workers", 0, inf)):
            value = getattr(self, name)
            if not least <= value <= most:
                limit = f"at least {least}" if most == inf else f"from {least} to {most}"
                raise UserError(f"{name} is {value}, but must be {limit}.")
        check_max_bad(self.max_bad)


@dataclass
class ComfyUIConfig:
    """Write the node "CLIP Text Encode (long prompt)" for ComfyUI.

    Attributes:
        output: Folder to write, in ComfyUI's `custom_nodes`. An earlier copy of the node is replaced.
    """

    output: str
