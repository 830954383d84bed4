"""What research/ adds to the package's registries. `python -m research` runs it before any command."""

from debias_diffusion.data import toy_scenes
from debias_diffusion.eval.registry import EVALUATIONS
from debias_diffusion.eval.retrieval_sets import BENCHMARKS

from .evaluations import benchmarks
from .evaluations import registry as evaluations
from .referring import grammar as referring


def register(models: bool = True) -> None:
    """Adds research's evaluations, kinds of toy scenes, benchmarks and, with `models`, methods and families of models.

    The last two import torch and open_clip, which takes seconds and help need not wait for.
    """
    for name, kind in referring.KINDS.items():
        toy_scenes.KINDS.register(name, kind)
    for name, evaluation in evaluations.EVALUATIONS.items():
        EVALUATIONS.register(name, evaluation)
    for name, benchmark in benchmarks.BENCHMARKS.items():
        BENCHMARKS.register(name, benchmark)
    if models:
        from debias_diffusion.methods import METHODS

        from . import chinese_clip
        from .smart_clip.method import SMART_CLIP

        METHODS.register("smart-clip", SMART_CLIP)
        chinese_clip.register()
