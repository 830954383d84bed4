"""The whole chain in the toy world: `train`, `export` and `evaluate all` in a row, and one page of the results.

Each command continues where it was stopped, so the quickstart does too. It only remembers which settings made each
folder, and removes a folder when they change.
"""

import math
import shutil
import time
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from debias_diffusion.errors import UserError
from debias_diffusion.eval.common.report import digest, table, versions
from debias_diffusion.eval.common.settings import OVERLAP
from debias_diffusion.eval.everything import EVALUATE, settings_of_all
from debias_diffusion.eval.merged_report import evaluate_report
from debias_diffusion.eval.options import AllConfig, ReportConfig
from debias_diffusion.eval.story import EDITS, SHORT_FOLDER, SHORT_PROMPTS, claims, numbers
from debias_diffusion.files import folder_lock, read_json_object, write_json
from debias_diffusion.limits import check_seeds, check_steps
from debias_diffusion.models.shipped import GUIDANCE_SCALE, shipped
from debias_diffusion.toymodels.fine_tuning import RECIPES, VALIDATION, toy_training
from debias_diffusion.toyworld.pairs import write_pairs
from debias_diffusion.training import train

from .export.command import export
from .export.options import ExportConfig
from .options import QuickstartConfig

MOST_SCENES = 1000  # of a split of the toy world
MOST_SHORT_PROMPTS = 60
IMAGES_AT_ONCE = 20
_SPLITS = ("development", "test")
_MARKER = "quickstart.json"
RESULTS_FOLDER = "evaluation"
_EARLIER_RELEASES = ("stages", "retrieval", "pictures")


@dataclass(frozen=True)
class Models:
    """Folders or names of the base model, the SDXL checkpoint, and the network behind the FID and DINO scores."""

    clip: str = "toy/clip"
    sdxl: str = "toy/sdxl"
    features: str = "toy/features"


def quickstart(config: QuickstartConfig, models: Models | None = None) -> Path:
    """Runs every command that is not finished yet, and prints a summary.

    Args:
        models: those that come with the package, unless given.

    Returns:
        The path of report.html.

    Raises:
        UserError: a setting cannot be used, the output folder holds something else, or the toy models are missing.
    """
    _check(config)
    run = _Quickstart(config, models or Models())
    with _owned(run.output):
        run.remove_outdated()
        report = run.run()
    _print_summary(report)
    print(f"\nReport: {run.output / 'report.html'}")
    return run.output / "report.html"


def _check(config: QuickstartConfig) -> None:
    least = {"seed": 0, "scenes": 1, "prompts": 2, "steps": 1, "batch": 4, "drawing_steps": 1}
    for name, number in (least | {"trained_on": config.batch}).items():
        if getattr(config, name) < number:
            reason = ", the batch" if name == "trained_on" else ""
            raise UserError(f"{name} is {getattr(config, name)}, but must be at least {number}{reason}.")
    for name in ("scenes", "prompts"):
        if getattr(config, name) > MOST_SCENES:
            raise UserError(f"{name} is {getattr(config, name)}, but must be at most {MOST_SCENES}, all of a split.")
    check_steps(config.drawing_steps)
    check_seeds(config.seed, config.seed + config.prompts)
    if config.split.partition("-")[0] not in _SPLITS:
        raise UserError(
            f"split is {config.split!r}, but must be one of {', '.join(_SPLITS)}, or one of them with -suffix, such as "
            "test-2. The models were trained on the others."
        )
    if not (config.learning_rate > 0 and math.isfinite(config.learning_rate)):
        raise UserError(f"learning_rate is {config.learning_rate}, but must be above 0.")
    if config.short_weight is not None and not 0 <= config.short_weight <= 1:
        raise UserError(f"short_weight is {config.short_weight}, but must be from 0 to 1, or null.")


@contextmanager
def _owned(output: Path):
    """Makes the output folder and holds it for this process alone.

    Raises:
        UserError: it holds something else, cannot be made, or another quickstart works in it.
    """
    try:
        if not (output / _MARKER).exists() and output.exists() and any(output.iterdir()):
            raise UserError(
                f"The output folder {str(output)!r} is not empty, and not made by quickstart. Give another one."
            )
        write_json(output / _MARKER, read_json_object(output / _MARKER) | {"made_by": "quickstart"})
    except OSError as error:
        raise UserError(
            f"The output folder {str(output)!r} cannot be used ({error.strerror}). Give another one."
        ) from error
    with folder_lock(
        output, f"Another quickstart is working in {str(output)!r}. Wait for it, or give another output folder."
    ):
        yield


class _Quickstart:
    """One run: `results` is the folder of what `evaluate` writes, `digests` are of the models to start from."""

    def __init__(self, config: QuickstartConfig, models: Models):
        self.config, self.models = config, models
        self.output = Path(config.output)
        self.results = self.output / RESULTS_FOLDER
        self.digests = {f"toy/{name}": digest(shipped(model)) for name, model in asdict(models).items()}

    # ---- what settings made which folder

    def made_with(self) -> dict[str, dict]:
        """By folder in the output: everything that decides its content."""
        known = asdict(self.config) | self.digests | {"version": version("debias-diffusion")}

        def pick(*names: str) -> dict:
            return {name: known[name] for name in ("version", *names)}

        training = pick("trained_on", "steps", "learning_rate", "batch", "short_weight", "seed", "toy/clip")
        images = pick("split", "seed", "drawing_steps", "toy/clip", "toy/sdxl")
        image_folders = (f"{RESULTS_FOLDER}/pictures", f"{RESULTS_FOLDER}/{SHORT_FOLDER}/pictures")
        return {
            "data": pick("trained_on"),
            **dict.fromkeys(image_folders, images),
            **{
                folder: training
                for recipe in RECIPES
                for folder in (f"training/{recipe}", recipe, *(f"{images}/{recipe}" for images in image_folders))
            },
        }

    def remove_outdated(self) -> None:
        """Removes the folders that other settings, models or releases made, so that results never mix.

        Raises:
            UserError: a folder's place is a link that leads out of the output.
        """
        marker = read_json_object(self.output / _MARKER)
        before, now = marker.get("made_with", {}), self.made_with()
        outdated = [folder for folder in now if before.get(folder) != now[folder]]
        if not before:
            outdated += _EARLIER_RELEASES
        if removed := [folder for folder in outdated if self._remove(folder)]:
            print(f"Settings, models or the release have changed since; made anew: {', '.join(removed)}")
        # "train-long-clip" is the time of "training/long-clip", and so on.
        commands = {"data": "data-training"} | {recipe: f"export-{recipe}" for recipe in RECIPES}
        commands |= {f"training/{recipe}": f"train-{recipe}" for recipe in RECIPES}
        stale = [commands.get(folder) for folder in outdated]
        seconds = {name: took for name, took in marker.get("seconds", {}).items() if name not in stale}
        self._write_marker(made_with=now, seconds=seconds)

    def _remove(self, folder: str) -> bool:
        """Whether there was anything to remove."""
        path = self.output / folder
        if not path.parent.resolve().is_relative_to(self.output.resolve()):
            raise UserError(f"{str(path)!r} leads out of the output folder, so it is not removed. Remove the link.")
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            return False
        return True

    def _write_marker(self, **content) -> None:
        marker = self.output / _MARKER
        write_json(marker, read_json_object(marker) | {"version": version("debias-diffusion")} | content)

    # ---- the commands

    def run(self) -> dict:
        """Runs the commands one after the other, and returns the content of report.json."""
        evaluations = self._evaluations()
        work = {"data-training": ("draw scenes to train on", self._pairs)}
        work |= {f"train-{recipe}": (f"train {recipe}", partial(self._train, recipe)) for recipe in RECIPES}
        work |= {f"export-{recipe}": (f"export {recipe}", partial(self._export, recipe)) for recipe in RECIPES}
        work |= {
            name: (f"evaluate {name}", partial(EVALUATE[evaluation], settings))
            for name, (evaluation, settings) in evaluations.items()
        }
        page = ReportConfig(str(self.results), str(self.output))
        work["report"] = ("write the report", partial(evaluate_report, page))
        results, seconds = {}, read_json_object(self.output / _MARKER).get("seconds", {})
        for number, (name, (title, command)) in enumerate(work.items(), 1):
            print(f"[{number}/{len(work)}] {title}", flush=True)
            started = time.monotonic()
            with open(self.output / "log.txt", "a", encoding="utf-8") as log, redirect_stdout(log):
                results[name] = command()
            if name in evaluations:
                seconds[name] = results[name]["seconds"]  # over all runs
            else:  # a finished command takes only a moment when it is started again, which does not count
                seconds.setdefault(name, round(time.monotonic() - started, 1))
            self._write_marker(seconds=seconds)
        measured = numbers(results["generation"], results["robustness"], results[SHORT_FOLDER])
        report = measured | {
            "expectations": claims(measured),
            "seconds": {name: seconds[name] for name in work if name != "report"},
            "settings": asdict(self.config),
            "digests": self.digests | {recipe: digest(self.output / recipe) for recipe in RECIPES},
            "versions": versions(),
        }
        write_json(self.output / "report.json", report)
        return report

    def _pairs(self) -> tuple[Path, Path]:
        """(data file, image folder)"""
        return write_pairs(self.output / "data", VALIDATION, self.config.trained_on)

    def _train(self, recipe: str) -> None:
        names = ("steps", "batch", "learning_rate", "short_weight", "seed")
        settings = {name: getattr(self.config, name) for name in names}
        output = self.output / "training" / recipe
        if train(toy_training(recipe, self.models.clip, *self._pairs(), output, **settings)) is None:
            raise KeyboardInterrupt  # asked to stop, it has left a checkpoint to go on from

    def _export(self, recipe: str) -> None:
        export(ExportConfig(str(self.output / "training" / recipe), str(self.output / recipe)))

    def _evaluations(self) -> dict[str, tuple[str, Any]]:
        """By name, an evaluation of `EVALUATE` and its settings: those of `evaluate all`, and one of short prompts."""
        config, models = self.config, self.models
        encoders = [models.clip, OVERLAP + models.clip, *(str(self.output / "training" / recipe) for recipe in RECIPES)]
        settings = settings_of_all(
            AllConfig(
                encoders,
                str(self.results),
                f"toy/{config.split}",
                limit=config.scenes,
                base=models.sdxl,
                dino=models.features,
                own_features=models.features,
            )
        )
        images = replace(
            settings["generation"],
            limit=config.prompts,
            seed=config.seed,
            steps=config.drawing_steps,
            guidance_scale=GUIDANCE_SCALE,
            images_at_once=IMAGES_AT_ONCE,
        )
        short = replace(
            images,
            output=str(self.results / SHORT_FOLDER),
            data=SHORT_PROMPTS + config.split,
            limit=min(MOST_SHORT_PROMPTS, config.prompts),
            dino=None,
            own_features=None,
        )
        evaluations = {name: (name, options) for name, options in settings.items()}
        return evaluations | {"generation": ("generation", images), SHORT_FOLDER: ("generation", short)}


def _print_summary(report: dict) -> None:
    for title, direction in (("text to image", "t2i_r1"), ("image to text", "i2t_r1")):
        rows = [
            [encoder, *(edits[edit][direction] for edit in EDITS)] for encoder, edits in report["retrieval"].items()
        ]
        print("\n" + table([f"R@1 in percent, {title}", *EDITS], rows))
    objects, images = [], []
    for encoder, scores in report["generation"].items():
        shares = [scores[name] for name in ("objects_correct", "precision", "f1", "empty_filled", "background")]
        objects.append([encoder, *(None if share is None else 100 * share for share in shares)])
        images.append([encoder, 100 * report["short_prompts"][encoder], scores["fid"], scores["dino"]])
    header = [
        "long prompts",
        "objects right, %",
        "precision, %",
        "F1, %",
        "empty places filled, %",
        "background right, %",
    ]
    print("\n" + table(header, objects))
    print("\n" + table(["images", "short prompts: objects right, %", "FID", "DINO"], images) + "\n")
    for line in report["expectations"]:
        verdict = {True: "met", False: "not met", None: "open"}[line["met"]]
        print(f"{verdict:>7}: {line['expectation']}\n         {line['found']}")
