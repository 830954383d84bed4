"""The method in the toy world: a first image, a training, evaluations, and one page of the results.

Every step continues where it was stopped, so the quickstart does too.
"""

import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from debias_diffusion.eval.all_options import ReportConfig
from debias_diffusion.eval.images.generation import GenerationConfig, evaluate_generation
from debias_diffusion.eval.images.objects import BY_SENTENCE
from debias_diffusion.eval.page import evaluate_report
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval
from debias_diffusion.eval.robustness import RobustnessConfig, evaluate_robustness
from debias_diffusion.eval.story import SHORT_FOLDER, SHORT_PROMPTS
from debias_diffusion.jobs import Job
from debias_diffusion.toyworld.pairs import write_pairs
from debias_diffusion.training.two_tower import train

from .export import export
from .fine_tuning import RECIPES, VALIDATION, toy_training
from .options import ExportConfig, QuickstartConfig
from .written_folder import check_free

MOST_SHORT_PROMPTS = 60
IMAGES_AT_ONCE = 20
RESULTS_FOLDER = "evaluation"


@dataclass(frozen=True)
class Setup:
    """The models to start from, and how much is done with them; a test makes them small."""

    clip: str = "toy/clip"
    sdxl: str = "toy/sdxl"  # with the same text encoder
    features: str = "toy/features"  # network of FID and DINO score
    pairs: int = 4000  # to train on, besides the held-out ones
    training: dict = field(default_factory=dict)  # arguments of `toy_training`
    denoising_steps: int = 20


def quickstart(config: QuickstartConfig, setup: Setup | None = None) -> Path:
    """Runs every step that is not finished yet, prints a summary, and returns the path of report.html."""
    output = Path(config.output)
    check_free(output)
    # Other settings of a step give it other results in the same place; these two would replace those of all steps.
    with Job.open(output, "quickstart", {"seed": config.seed, "split": config.split}) as job:
        steps = _steps(config, setup or Setup())
        for number, (title, step) in enumerate(steps, 1):
            print(f"[{number}/{len(steps)}] {title}", flush=True)
            started = time.monotonic()
            with open(output / "log.txt", "a", encoding="utf-8") as log, redirect_stdout(log):
                shown = step()
            seconds = time.monotonic() - started
            job.note(title, seconds=seconds)
            print(f"      {shown if isinstance(shown, str) else f'{seconds:.0f} s'}", flush=True)
        return evaluate_report(ReportConfig(str(output / RESULTS_FOLDER), str(output)))


def _steps(config: QuickstartConfig, setup: Setup) -> list[tuple[str, Callable]]:
    """A title and a function of each step; text that one returns is for the console."""
    output, results, data = Path(config.output), Path(config.output) / RESULTS_FOLDER, f"toy/{config.split}"
    trained = RECIPES if config.train == "all" else [config.train]
    runs = {recipe: str(output / "training" / recipe) for recipe in trained}
    encoders = [runs.get(recipe, f"toy/{recipe}") for recipe in RECIPES]
    # Settings are made of these when their step begins, because encoders must be there then.
    pairs = {"encoders": [setup.clip, *encoders], "output": str(results), "data": data, "limit": config.scenes}
    images = {
        "encoders": ["cut:original", "original", *encoders],
        "output": str(results),
        "base": setup.sdxl,
        "data": data,
        "limit": config.prompts,
        "seed": config.seed,
        "steps": setup.denoising_steps,
        "images_at_once": IMAGES_AT_ONCE,
    }
    few = min(MOST_SHORT_PROMPTS, config.prompts // 2)
    short = images | {"output": str(results / SHORT_FOLDER), "data": SHORT_PROMPTS + config.split, "limit": few}
    first = images | {"encoders": images["encoders"][:2], "output": str(output / "first-image"), "limit": 1}
    images |= {"dino": setup.features, "own_features": setup.features}
    return [
        ("draw one long prompt, cut at 77 tokens and whole", partial(_first_image, GenerationConfig(**first))),
        *((f"train {recipe}", partial(_train, config, setup, recipe, run)) for recipe, run in runs.items()),
        *((f"export {name}", partial(export, ExportConfig(str(output / name), run))) for name, run in runs.items()),
        (f"find {config.scenes} images by caption", lambda: evaluate_retrieval(RetrievalConfig(**pairs))),
        ("and by edited captions", lambda: evaluate_robustness(RobustnessConfig(**pairs))),
        (
            f"draw {config.prompts} long prompts with 5 encoders",
            lambda: evaluate_generation(GenerationConfig(**images)),
        ),
        (f"draw {few} short prompts", lambda: evaluate_generation(GenerationConfig(**short))),
    ]


def _first_image(config: GenerationConfig) -> str:
    report = evaluate_generation(config)
    lines = [f"open {Path(config.output) / 'examples.png'}"]
    for label, entry in report["encoders"].items():
        objects = sum(line["objects"] for line in entry["scores"][BY_SENTENCE])
        lines.append(
            f"{label}: {objects * entry['scores']['objects_right']['value'] / 100:.0f} of {objects} objects right"
        )
    return "\n      ".join(lines)


def _train(config: QuickstartConfig, setup: Setup, recipe: str, run: str) -> None:
    pairs = write_pairs(Path(config.output) / "data", VALIDATION, setup.pairs)
    if train(toy_training(recipe, setup.clip, *pairs, run, seed=config.seed, **setup.training)) is None:
        raise KeyboardInterrupt  # asked to stop, it has left a checkpoint to go on from
