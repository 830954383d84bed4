"""What research/ adds to the package's registries. `python -m research COMMAND` runs it before any command."""

from functools import cache


@cache
def register() -> None:
    """Adds research's methods, families of models, evaluations and benchmarks, once in a process."""
    from . import chinese_clip

    chinese_clip.register()
