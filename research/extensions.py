"""What research/ adds to the package's registries. `python -m research COMMAND` runs it before any command."""

from functools import cache

from debias_diffusion.app.cli import EVALUATIONS, Command
from debias_diffusion.methods import METHODS

from .smart_clip.method import SMART_CLIP
from .smart_clip.options import MaskedRetrievalConfig


@cache
def register() -> None:
    """Adds research's methods, families of models, evaluations and benchmarks, once in a process."""
    METHODS.register("smart-clip", SMART_CLIP)
    example = "--encoders runs/smart-clip --data toy/test --output scores"
    masked = Command(MaskedRetrievalConfig, "smart_clip.retrieval:evaluate_masked_retrieval", example, "eval")
    EVALUATIONS.register("masked-retrieval", masked)
