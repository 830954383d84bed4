"""The evaluations: all that the command line, the page, the model card and the docs ask about them.

Imports nothing large.
"""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Literal

TOY = "--encoders toy/clip toy/debias-clip --data toy/test --output scores"


@dataclass(frozen=True)
class Evaluation:
    """One evaluation.

    Attributes:
        title: of its section on the page.
        summary: of its command.
        module: in this package, with `evaluate_NAME(config)`, which writes NAME.json and returns its content, the
            report; `tables(report)` and `figures(report)`; and, where not those of the same names, its settings in
            `evaluate all`, `settings_for(everything)`: None where it takes no part.
        options: name of its dataclass in `options`.
        needs: of an encoder. Two towers stand in the report with `Backbone.digest`, text encoders with that of their
            files, `EncoderSpec.digest`.
        example: arguments to start from.
        saved: figures that cannot be drawn again from the report.
    """

    title: str
    summary: str
    module: str
    options: str
    needs: Literal["two towers", "text encoder"]
    example: str = TOY
    saved: tuple[str, ...] = ()

    def load(self) -> ModuleType:
        """Its module, which imports large libraries."""
        return import_module(f".{self.module}", __package__)

    def settings(self) -> type:
        """Its dataclass of options."""
        return getattr(import_module(".options", __package__), self.options)


# In the order of the page, by the name of the results, NAME.json; commands have - for _.
EVALUATIONS = {
    "robustness": Evaluation(
        "How shortsighted?",
        "how shortsighted? Recall when sentences are moved, removed or come late",
        "robustness",
        "RobustnessConfig",
        "two towers",
    ),
    "retrieval": Evaluation(
        "Retrieval with whole captions",
        "retrieval recall with whole captions",
        "retrieval",
        "RetrievalConfig",
        "two towers",
    ),
    "attention": Evaluation(
        "Where encoders look",
        "how much EOT attends to each position of a text",
        "attention",
        "AttentionConfig",
        "text encoder",
    ),
    "drift": Evaluation(
        "What the UNet reads",
        "how far hidden states have moved from those that SDXL's UNet was trained on",
        "images.drift",
        "DriftConfig",
        "text encoder",
        "--encoders toy/debias-clip --base toy/sdxl --data toy/test --output scores",
    ),
    "generation": Evaluation(
        "Images generated from captions",
        "FID, DINO score and others of images generated from captions",
        "images.generation",
        "GenerationConfig",
        "text encoder",
        "--encoders cut:toy/clip toy/debias-clip --data toy/test --base toy/sdxl --output scores",
        saved=("examples.png",),
    ),
    "dpg_bench": Evaluation(
        "DPG-Bench: dense prompts",
        "how much of DPG-Bench's dense prompts the generated images show",
        "images.dpg_bench",
        "DpgBenchConfig",
        "text encoder",
        "--data dpg_bench --vqa blip-vqa-base --base sdxl --encoders cut:original runs/a --output scores",
    ),
    "classification": Evaluation(
        "Zero-shot classification",
        "zero-shot top-1 on ImageNet, its variants and CIFAR",
        "classification",
        "ClassificationConfig",
        "two towers",
        "--encoders ViT-B-16-quickgelu:openai --dataset cifar-10 --data cifar-10-batches-bin --output scores",
    ),
}
