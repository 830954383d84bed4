"""The evaluations: all that the command line, `evaluate all`, the page, the model card and the docs ask about them.

Imports nothing large.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from debias_diffusion.registry import Command, Registry

from . import options
from .all_options import AllConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .report import Table

TOY = "--encoders toy/clip toy/debias-clip --data toy/test --output scores"


@dataclass(frozen=True, kw_only=True)
class Evaluation(Command):
    """One evaluation of several encoders, whose results are NAME.json.

    Its function writes that file and returns its content, the report. Beside it stand `tables(report)` and
    `figures(report)`.

    Attributes:
        title: of its section on the page.
        needs: of an encoder. Two towers stand in the report with `Backbone.digest`, text encoders with that of their
            files, `EncoderSpec.digest`.
        settings: its options in `evaluate all`, from that command's and the class of its own; None where it takes no
            part.
        saved: figures that cannot be drawn again from the report.
    """

    example: str = TOY
    extra: str = "eval"
    title: str
    needs: Literal["two towers", "text encoder"]
    settings: Callable[[AllConfig, type], Any] = AllConfig.settings
    saved: tuple[str, ...] = ()

    def run(self, config: Any) -> dict:
        """The report, which is written and printed."""
        return self.load()(config)

    def tables(self, report: dict) -> "list[Table]":
        """Those of a report, which may be of several runs."""
        return self.load("tables")(report)

    def figures(self, report: dict) -> "dict[str, Figure]":
        """Those that are drawn from a report, by file name."""
        return self.load("figures")(report)


# Those with reports in the order of the page, by the name of their results.
EVALUATIONS: Registry[Command] = Registry(
    "evaluation",
    {
        "robustness": Evaluation(
            title="How shortsighted?",
            options=options.RobustnessConfig,
            function="eval.robustness:evaluate_robustness",
            needs="two towers",
        ),
        "retrieval": Evaluation(
            title="Retrieval with whole captions",
            options=options.RetrievalConfig,
            function="eval.retrieval:evaluate_retrieval",
            needs="two towers",
        ),
        "attention": Evaluation(
            title="Where encoders look",
            options=options.AttentionConfig,
            function="eval.attention:evaluate_attention",
            needs="text encoder",
        ),
        "drift": Evaluation(
            title="What the UNet reads",
            options=options.DriftConfig,
            function="eval.images.drift:evaluate_drift",
            needs="text encoder",
            example="--encoders toy/debias-clip --base toy/sdxl --data toy/test --output scores",
            settings=AllConfig.drift,
        ),
        "generation": Evaluation(
            title="Images generated from captions",
            options=options.GenerationConfig,
            function="eval.images.generation:evaluate_generation",
            needs="text encoder",
            example="--encoders cut:toy/clip toy/debias-clip --data toy/test --base toy/sdxl --output scores",
            settings=AllConfig.generation,
            saved=("examples.png",),
        ),
        "following": Evaluation(
            title="Which sentences are in the image?",
            options=options.FollowingConfig,
            function="eval.images.following:evaluate_following",
            needs="text encoder",
            example="--prompts toy/test --judge toy/checker --base toy/sdxl --encoders cut:toy/clip toy/clip "
            "--output scores",
            settings=AllConfig.following,
        ),
    },
)


def with_reports() -> dict[str, Evaluation]:
    """The evaluations whose results stand on the page."""
    return {name: entry for name, entry in EVALUATIONS.items() if isinstance(entry, Evaluation)}
