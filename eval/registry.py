"""The evaluations: all that the command line, the page, the model card and the docs ask about them.

Imports nothing large.
"""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Literal

from debias_diffusion.registry import Registry

from . import options

TOY = "--encoders toy/clip toy/debias-clip --data toy/test --output scores"


@dataclass(frozen=True)
class Evaluation:
    """One evaluation.

    Attributes:
        title: of its section on the page.
        options: its dataclass of options, whose docstring begins with what it measures.
        module: in this package, with `evaluate_NAME(config)`, which writes NAME.json and returns its content, the
            report; `tables(report)` and `figures(report)`; and, where not those of the same names, its settings in
            `evaluate all`, `settings_for(everything)`: None where it takes no part.
        needs: of an encoder. Two towers stand in the report with `Backbone.digest`, text encoders with that of their
            files, `EncoderSpec.digest`.
        example: arguments to start from.
        saved: figures that cannot be drawn again from the report.
    """

    title: str
    options: type
    module: str
    needs: Literal["two towers", "text encoder"]
    example: str = TOY
    saved: tuple[str, ...] = ()

    def load(self) -> ModuleType:
        """Its module, which imports large libraries."""
        return import_module(f".{self.module}", __package__)


# In the order of the page, by the name of the results, NAME.json; commands have - for _.
EVALUATIONS: Registry[Evaluation] = Registry(
    "evaluation",
    {
        "robustness": Evaluation("How shortsighted?", options.RobustnessConfig, "robustness", "two towers"),
        "retrieval": Evaluation("Retrieval with whole captions", options.RetrievalConfig, "retrieval", "two towers"),
        "attention": Evaluation(
            *("Where encoders look", options.AttentionConfig, "attention", "text encoder"),
            saved=("attention_image.png",),
        ),
        "drift": Evaluation(
            "What the UNet reads",
            options.DriftConfig,
            "images.drift",
            "text encoder",
            "--encoders toy/debias-clip --base toy/sdxl --data toy/test --output scores",
        ),
        "generation": Evaluation(
            "Images generated from captions",
            options.GenerationConfig,
            "images.generation",
            "text encoder",
            "--encoders cut:toy/clip toy/debias-clip --data toy/test --base toy/sdxl --output scores",
            saved=("examples.png",),
        ),
        "following": Evaluation(
            "Which sentences are in the image?",
            options.FollowingConfig,
            "images.following",
            "text encoder",
            "--prompts toy/test --judge toy/checker --base toy/sdxl --encoders cut:toy/clip toy/clip --output scores",
        ),
        "classification": Evaluation(
            "Zero-shot classification",
            options.ClassificationConfig,
            "classification",
            "two towers",
            "--encoders ViT-B-16-quickgelu:openai --dataset cifar-10 --data cifar-10-batches-bin --output scores",
        ),
    },
)
