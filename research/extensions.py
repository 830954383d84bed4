"""What research/ adds to the package's registries. `python -m research` runs it before any command."""

from debias_diffusion.eval.registry import EVALUATIONS

from .evaluations import registry as evaluations


def register(only_for_help: bool = False) -> None:
    """Adds research's evaluations, kinds of toy scenes, benchmarks, methods and families of models.

    Args:
        only_for_help: leaves out all but the evaluations: the others import libraries, which take seconds.
    """
    for name, evaluation in evaluations.EVALUATIONS.items():
        EVALUATIONS.register(name, evaluation)
    if only_for_help:
        return
    from debias_diffusion.data import toy_scenes
    from debias_diffusion.eval.retrieval_sets import BENCHMARKS
    from debias_diffusion.methods import METHODS

    from . import chinese_clip
    from .evaluations import benchmarks
    from .referring import grammar as referring
    from .smart_clip.method import SMART_CLIP
    from .studies import tags
    from .studies.states_alone import STATES_ALONE

    for name, kind in (referring.KINDS | tags.KINDS).items():
        toy_scenes.KINDS.register(name, kind)
    for name, benchmark in benchmarks.BENCHMARKS.items():
        BENCHMARKS.register(name, benchmark)
    METHODS.register("smart-clip", SMART_CLIP)
    METHODS.register("states-alone", STATES_ALONE)
    chinese_clip.register()
