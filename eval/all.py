"""Every evaluation that the settings allow, in one command, and one page of all results."""

import os
from pathlib import Path
from typing import Any

from debias_diffusion.errors import UserError

from .options import AllConfig, ReportConfig
from .page import evaluate_report
from .registry import EVALUATIONS


def evaluate_all(config: AllConfig) -> Path:
    """Runs every evaluation that the settings allow, one after the other, and writes one page of all results.

    Returns:
        The path of report.html.

    Raises:
        UserError: a setting cannot be used.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "evaluate all runs in one process. To generate on several GPUs, run `accelerate launch -m debias_diffusion "
            "evaluate generation` with the same output first; its images are then there."
        )
    settings = settings_of_all(config)
    for number, (name, evaluation) in enumerate(settings.items(), 1):
        print(f"\n[{number}/{len(settings)}] {name}", flush=True)
        getattr(EVALUATIONS[name].load(), f"evaluate_{name}")(evaluation)
    return evaluate_report(ReportConfig(config.output))


def settings_of_all(config: AllConfig) -> dict[str, Any]:
    """The settings of each evaluation that `config` allows, by its name in `EVALUATIONS`, in the order to run them.

    Raises:
        UserError: a setting cannot be used, or a network cannot be loaded, which should not stop a run later.
    """
    settings = {}
    for name, entry in EVALUATIONS.items():
        choose = getattr(entry.load(), "settings_for", None)
        chosen = choose(config) if choose else config.settings(entry.options)
        if chosen is not None:
            settings[name] = chosen
    return settings
