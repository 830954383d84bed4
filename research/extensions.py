"""What research/ adds to the package's registries. `python -m research COMMAND` runs it before any command."""

from functools import cache

from debias_diffusion.app.cli import EVALUATIONS, Command

from . import options


@cache
def register() -> None:
    """Adds research's methods, families of models, evaluations and benchmarks, once in a process."""
    EVALUATIONS.register(
        "judge",
        Command(
            options.JudgeConfig,
            "judge_labels:evaluate_judge",
            "--labels labels --judge toy/checker --output scores",
            "eval",
        ),
    )
