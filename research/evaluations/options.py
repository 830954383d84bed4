"""Options of research's evaluations. Nothing large is imported here, so that help is fast."""

from dataclasses import dataclass, field
from typing import Literal

from debias_diffusion.eval.options import Data, Encoders, RobustnessConfig
from debias_diffusion.limits import PositiveInt

Classification = Literal["imagenet-1k", "imagenet-v2", "imagenet-a", "imagenet-o", "cifar-10", "cifar-100"]


@dataclass
class GrowthConfig(RobustnessConfig):
    """Does a caption resemble its image more, the more of it is read?

    Give either `data` (with `images`), your own pairs, or a benchmark, `dataset` with `root`.
    """


@dataclass
class ExamplesConfig(RobustnessConfig):
    """Captions whose image one encoder finds first and another does not.

    Give either `data` (with `images`), your own pairs, or a benchmark, `dataset` with `root`.

    Attributes:
        examples: So many captions for every two encoders, drawn at random and always the same.
    """

    examples: PositiveInt = field(default=20, kw_only=True)


@dataclass(kw_only=True)
class MapsConfig(Encoders):
    """Where an image fits a text, and what regional prompts look at.

    Attributes:
        image: Image file.
        text: The text that its parts are compared with.
    """

    image: str
    text: str


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
