"""Settings of `quickstart` and `shards`."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from debias_diffusion.errors import UserError
from debias_diffusion.limits import check_max_bad


@dataclass
class QuickstartConfig:
    """Train DeBias-CLIP for SDXL in a toy world, and compare images with it, with SDXL's own encoder and with others.

    A run that was stopped continues with the same command.

    Attributes:
        output: Folder for everything: data, the training run, the exported encoder (debias-clip-sdxl/), results with
            generated images (evaluation/), and report.html.
        seed: Of the training, and of the noise that images start from.
        split: Scenes for retrieval and prompts: test, or development to choose settings by; test-2 and the like are
            more of them.
        scenes: Scenes that retrieval searches among, at most 1000. With 400, the 95% interval of R@1 reaches at most 5
            points to either side.
        prompts: Long prompts drawn with each encoder, from 2 to 1000. With 100, the 95% interval of a difference in
            objects right reaches 3 to 5 points to either side.
        train: The recipe to train. The other encoders are then those that come with the package, trained in the same
            way. all trains all three, in three times the time.
    """

    output: str = "runs/quickstart"
    seed: int = 0
    split: str = "test"
    scenes: int = 400
    prompts: int = 100
    train: Literal["debias-clip-sdxl", "debias-clip", "long-clip", "all"] = "debias-clip-sdxl"


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
