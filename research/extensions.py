"""What research/ adds to the package's registries. `python -m research COMMAND` runs it before any command."""

from functools import cache

from debias_diffusion.data import toy_scenes
from debias_diffusion.eval.registry import EVALUATIONS
from debias_diffusion.eval.retrieval_sets import BENCHMARKS
from debias_diffusion.methods import METHODS

from . import chinese_clip
from .evaluations import benchmarks
from .evaluations import registry as evaluations
from .referring import grammar as referring
from .smart_clip.method import SMART_CLIP


@cache
def register() -> None:
    """Adds research's methods, families of models, evaluations and benchmarks, once in a process."""
    for name, kind in referring.KINDS.items():
        toy_scenes.KINDS.register(name, kind)
    for name, evaluation in evaluations.EVALUATIONS.items():
        EVALUATIONS.register(name, evaluation)
    for name, benchmark in benchmarks.BENCHMARKS.items():
        BENCHMARKS.register(name, benchmark)
    METHODS.register("smart-clip", SMART_CLIP)
    chinese_clip.register()
