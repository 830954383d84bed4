"""The whole chain in the toy world: train both recipes, export, measure retrieval, draw, score, report.

Nothing that is shown was made before: every number and picture comes from the run itself. Heavy libraries are imported
by the stages that need them, so that a run with nothing left to do is quick.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

from debias_diffusion.errors import UserError
from debias_diffusion.eval.common.report import digest, table, versions
from debias_diffusion.eval.quickstart import ENCODERS, TRAINED
from debias_diffusion.files import write_json
from debias_diffusion.limits import check_seeds, check_steps
from debias_diffusion.models.shipped import shipped
from debias_diffusion.toyworld.grammar import Caption, caption, short_prompt
from debias_diffusion.toyworld.scenes import ARRANGEMENTS, Scene, scene

from .stages import Stage, Stages

EDITS = ("keep", "move2", "move4", "remove")
COMPARED = (("debias-clip", "long-clip"), ("debias-clip", "clip"))
SHORT_PROMPTS = 60  # at most
EXAMPLES = 8  # the first of each family of scenes, not the best ones
_AT_ONCE = 20  # pictures drawn
_SPLITS = ("development", "test")


@dataclass
class QuickstartConfig:
    """Train DeBias-CLIP and Long-CLIP in a small world, draw with both and the original, and compare all three.

    Attributes:
        output: Folder for everything: data, models, encoders (long-clip/ and debias-clip/), pictures, report.json and
            report.html. A run that was stopped continues there; what has not changed is not done again.
        seed: Of the training and of the noise that pictures start from.
        split: Scenes that retrieval and prompts are of: test, or development to choose settings by; test-2 and the like
            are further ones.
        scenes: Scenes that retrieval chooses among.
        prompts: Long prompts drawn with each encoder, at least 2.
        trained_on: Pairs of picture and long caption in the training.
        steps: Training steps.
        learning_rate: Peak learning rate of the training.
        batch: Pairs a step, at least 4.
        short_weight: w of the loss w * short + (1 - w) * long, from 0 to 1, of both recipes. null leaves each its own.
        drawing_steps: Denoising steps of a picture.
    """

    output: str = "runs/quickstart"
    seed: int = 0
    split: str = "test"
    scenes: int = 1000
    prompts: int = 200
    trained_on: int = 4000
    steps: int = 150
    learning_rate: float = 5e-4
    batch: int = 128
    short_weight: float | None = None
    drawing_steps: int = 20


@dataclass(frozen=True)
class Models:
    """Folders of the models that everything starts from: base CLIP, SDXL, and the network that scores pictures."""

    clip: str
    sdxl: str
    features: str


def quickstart(config: QuickstartConfig) -> Path:
    """Does what is not done yet, and prints what was found.

    Returns:
        report.html

    Raises:
        UserError: a setting cannot be used, the output folder is something else's, or the toy models are missing.
    """
    _check(config)
    return run_quickstart(config, Models(*map(shipped, ("toy/clip", "toy/sdxl", "toy/features"))))


def run_quickstart(config: QuickstartConfig, models: Models) -> Path:
    """`quickstart` with models of one's own."""
    work = _Quickstart(config, models)
    with work.done.owned("quickstart"):
        work.done.run(work.stages())
    _print_summary(json.loads((work.output / "report.json").read_text(encoding="utf-8")))
    print(f"\nReport: {work.output / 'report.html'}")
    return work.output / "report.html"


def _check(config: QuickstartConfig) -> None:
    least = {"seed": 0, "scenes": 1, "prompts": 2, "steps": 1, "batch": 4, "drawing_steps": 1}
    for name, number in (least | {"trained_on": config.batch}).items():
        if getattr(config, name) < number:
            why = ", the batch" if name == "trained_on" else ""
            raise UserError(f"{name} is {getattr(config, name)}, but must be at least {number}{why}.")
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


class _Quickstart:
    """The stages, each of which finds its inputs in the output folder.

    Args:
        config: the settings.
        models: what to start from.

    Attributes:
        output: the output folder.
        done: its stages, with what they found.
    """

    def __init__(self, config: QuickstartConfig, models: Models):
        self.config, self.models = config, models
        self.output = Path(config.output)
        self.done = Stages(self.output)
        self.digests = {f"toy/{name}": digest(folder) for name, folder in asdict(models).items()}

    def stages(self) -> list[Stage]:
        """In the order in which they are done."""
        stages = [
            Stage(
                "data-training",
                "draw scenes to train on",
                partial(self._write_pairs, "training"),
                self._reads("trained_on"),
                leaves=("data/training",),
            ),
            Stage(
                "data-evaluation",
                "draw scenes to search among",
                partial(self._write_pairs, "evaluation"),
                self._reads("split", "scenes"),
                leaves=("data/evaluation",),
            ),
        ]
        stages += [self._training(recipe) for recipe in TRAINED]
        stages += [self._export_of(recipe) for recipe in TRAINED]
        stages += [self._retrieval_of(encoder) for encoder in ENCODERS]
        stages += [self._drawing_with(encoder) for encoder in ENCODERS]
        exports = tuple(f"export-{recipe}" for recipe in TRAINED)
        drawn = tuple(f"generate-{encoder}" for encoder in ENCODERS)
        return [
            *stages,
            Stage(
                "short-prompts",
                "draw short prompts with all three",
                self._draw_short_prompts,
                self._reads("seed", "split", "prompts", "drawing_steps", "toy/sdxl"),
                exports,
                ("pictures/short",),
            ),
            Stage("scores", "score pictures", self._score, self._reads("toy/features"), drawn, ("pictures/originals",)),
            Stage(
                "report",
                "write the report",
                self._report,
                after=(*(stage.name for stage in stages), "short-prompts", "scores"),
                leaves=("report.json", "report.html"),
            ),
        ]

    def _training(self, recipe: str) -> Stage:
        reads = self._reads("steps", "learning_rate", "batch", "short_weight", "seed", "toy/clip")
        work = partial(self._train, recipe)
        return Stage(f"train-{recipe}", f"fine-tune {recipe}", work, reads, ("data-training",), (f"training/{recipe}",))

    def _export_of(self, recipe: str) -> Stage:
        work = partial(self._export, recipe)
        return Stage(f"export-{recipe}", f"export {recipe}", work, {}, (f"train-{recipe}",), (recipe,))

    def _retrieval_of(self, encoder: str) -> Stage:
        trained = (f"train-{encoder}",) if encoder in TRAINED else ()
        return Stage(
            f"retrieval-{encoder}",
            f"retrieval with {encoder}",
            partial(self._retrieve, encoder),
            {} if trained else self._reads("toy/clip"),
            ("data-evaluation", *trained),
            (f"retrieval/{encoder}",),
        )

    def _drawing_with(self, encoder: str) -> Stage:
        return Stage(
            f"generate-{encoder}",
            f"draw long prompts with {encoder}",
            partial(self._draw_long_prompts, encoder),
            self._reads("seed", "split", "prompts", "drawing_steps", "toy/sdxl"),
            (f"export-{encoder}",) if encoder in TRAINED else (),
            (f"pictures/{encoder}",),
        )

    def _reads(self, *names: str) -> dict:
        """Settings by name, and digests of models."""
        known = asdict(self.config) | self.digests
        return {name: known[name] for name in names}

    # What the stages do.

    def _write_pairs(self, purpose: str) -> dict:
        from debias_diffusion.toymodels.fine_tuning import VALIDATION
        from debias_diffusion.toyworld.pairs import write_pairs

        config, folder = self.config, self.output / "data" / purpose
        if purpose == "training":
            write_pairs(folder, VALIDATION, config.trained_on)
        else:
            write_pairs(folder, 0, config.scenes, config.split)
        return {}

    def _pairs(self, purpose: str) -> tuple[Path, Path]:
        """(data file, image folder)"""
        from debias_diffusion.toyworld.pairs import DATA, IMAGES

        folder = self.output / "data" / purpose
        return folder / DATA, folder / IMAGES

    def _train(self, recipe: str) -> dict:
        from debias_diffusion.toymodels.fine_tuning import toy_training
        from debias_diffusion.training import train

        names = ("steps", "batch", "learning_rate", "short_weight", "seed")
        settings = {name: getattr(self.config, name) for name in names}
        output = self.output / "training" / recipe
        if train(toy_training(recipe, self.models.clip, *self._pairs("training"), output, **settings)) is None:
            raise KeyboardInterrupt  # asked to stop, it has left a checkpoint to go on from
        return {}

    def _trained(self, encoder: str) -> str:
        """The two-tower of an encoder, as a folder."""
        return str(self.output / "training" / encoder / "last") if encoder in TRAINED else self.models.clip

    def _export(self, recipe: str) -> dict:
        from .export.command import ExportConfig, export

        folder = export(ExportConfig(self._trained(recipe), str(self.output / recipe)))
        return {"digest": digest(folder)}

    def _retrieve(self, encoder: str) -> dict:
        from debias_diffusion.eval.text_image.robustness import RobustnessConfig, recall_at_1

        data, images = map(str, self._pairs("evaluation"))
        output = str(self.output / "retrieval" / encoder)
        config = RobustnessConfig([self._trained(encoder)], output, data, images, limit=None)
        (recall,) = recall_at_1(config, EDITS).values()
        return {
            edit: {"t2i_r1": values["text_to_image"], "i2t_r1": values["image_to_text"]}
            for edit, values in recall.items()
        }

    def _draw_long_prompts(self, encoder: str) -> dict:
        prompts = {index: its.text for index, (_, its) in enumerate(self._long_prompts)}
        return {"pictures": len(self._draw(encoder, prompts, f"pictures/{encoder}"))}

    @cached_property
    def _long_prompts(self) -> list[tuple[Scene, Caption]]:
        split = self.config.split
        return [(scene(split, index), caption(split, index)) for index in range(self.config.prompts)]

    def _draw(self, encoder: str, prompts: dict[int, str], folder: str) -> list[Path]:
        """Pictures of the prompts, by the original as stock SDXL draws them, by the others from all they say."""
        from debias_diffusion.eval.common.processes import Processes
        from debias_diffusion.eval.pictures.drawing import ORIGINAL, Drawing, DrawingSettings, Subject
        from debias_diffusion.models.shipped import GUIDANCE_SCALE

        settings = DrawingSettings(self.models.sdxl, self.config.drawing_steps, GUIDANCE_SCALE, _AT_ONCE)
        subjects = [Subject(f"{index:06}", text, self.config.seed + index) for index, text in prompts.items()]
        text_encoder = str(self.output / encoder) if encoder in TRAINED else ORIGINAL
        return Drawing(settings, Processes()).draw(text_encoder, self.output / folder / "images", subjects, encoder)

    def _encoder_digest(self, recipe: str) -> str:
        return self.done.found[f"export-{recipe}"]["digest"]

    def _draw_short_prompts(self) -> dict:
        count = min(SHORT_PROMPTS, self.config.prompts)
        pairs = [short_prompt(self.config.split, index) for index in range(count)]
        prompts = {index: its.text for index, (_, its) in enumerate(pairs)}
        shares = {}
        for encoder in ENCODERS:
            right = _objects_right(self._draw(encoder, prompts, f"pictures/short/{encoder}"), [its for its, _ in pairs])
            results = [is_right for picture in right for is_right in picture.values()]
            shares[encoder] = sum(results) / len(results)
        return shares

    def _pictures(self, encoder: str) -> list[Path]:
        return [self.output / "pictures" / encoder / "images" / f"{i:06}.png" for i in range(self.config.prompts)]

    def _originals(self) -> list[Path]:
        return [self.output / "pictures" / "originals" / f"{i:06}.png" for i in range(self.config.prompts)]

    def _score(self) -> dict:
        from debias_diffusion.devices import pick_device
        from debias_diffusion.eval.pictures.networks import ClsFeatures
        from debias_diffusion.eval.pictures.scores import dino_score, fid
        from debias_diffusion.eval.quickstart import objects_correct_by_sentence, paired_bootstrap

        scenes, told = [its for its, _ in self._long_prompts], [its.first_told() for _, its in self._long_prompts]
        self._write_originals(scenes)
        network = ClsFeatures(self.models.features, pick_device(None))
        originals = network(self._originals(), 100)
        generation, right = {}, {}
        for encoder in ENCODERS:
            features = network(self._pictures(encoder), 100)
            right[encoder] = _objects_right(self._pictures(encoder), scenes)
            generation[encoder] = {
                "fid": fid(features, originals),
                "dino": dino_score(features, originals),
                **objects_correct_by_sentence(right[encoder], told),
                "n": len(scenes),
            }
        bootstrap = {f"{a} - {b}": paired_bootstrap(right[a], right[b]) for a, b in COMPARED}
        return {"generation": generation, "bootstrap": bootstrap}

    def _write_originals(self, scenes: Sequence[Scene]) -> None:
        from debias_diffusion.toymodels.vae import SIZE
        from debias_diffusion.toyworld.render import render

        self._originals()[0].parent.mkdir(parents=True, exist_ok=True)
        for path, its in zip(self._originals(), scenes, strict=True):
            render(its, SIZE).save(path)

    def _report(self) -> dict:
        from debias_diffusion.eval.quickstart import expectations
        from debias_diffusion.eval.quickstart_report import write_report

        found = self.done.found
        report = {
            "retrieval": {encoder: found[f"retrieval-{encoder}"] for encoder in ENCODERS},
            **found["scores"],
            "short_prompts": found["short-prompts"],
        }
        report |= {
            "expectations": expectations(report),
            "seconds": dict(self.done.seconds),
            "settings": asdict(self.config),
            "digests": self.digests | {recipe: self._encoder_digest(recipe) for recipe in TRAINED},
            "versions": versions(),
        }
        write_json(self.output / "report.json", report)
        shown = range(0, self.config.prompts, ARRANGEMENTS)[:EXAMPLES]
        write_report(self.output, report, [self._example(index) for index in shown])
        return {}

    def _example(self, index: int):
        from PIL import Image

        from debias_diffusion.eval.quickstart_report import Example, ExampleThing

        its, prompt = self._long_prompts[index]
        drawn = {encoder: self._pictures(encoder)[index] for encoder in ENCODERS}
        right = {encoder: _objects_right([path], [its])[0] for encoder, path in drawn.items()}
        told = prompt.first_told()
        things = [
            ExampleThing(
                f"{thing.size} {thing.colour} {thing.kind}, {thing.place}",
                told[thing.place],
                {encoder: right[encoder][thing.place] for encoder in ENCODERS},
            )
            for thing in its.things
        ]
        return Example(
            [sentence.text for sentence in prompt.sentences],
            Image.open(self._originals()[index]),
            {encoder: Image.open(path) for encoder, path in drawn.items()},
            things,
        )


def _objects_right(pictures: Sequence[Path], scenes: Sequence[Scene]) -> list[dict[str, bool]]:
    from debias_diffusion.eval.pictures.toy_objects import objects_right

    return objects_right(pictures, scenes)


def _print_summary(report: dict) -> None:
    for name, direction in (("text to image", "t2i_r1"), ("image to text", "i2t_r1")):
        rows = [[encoder, *(report["retrieval"][encoder][edit][direction] for edit in EDITS)] for encoder in ENCODERS]
        print("\n" + table([f"R@1 in percent, {name}", *EDITS], rows))
    rows = []
    for encoder in ENCODERS:
        its = report["generation"][encoder]
        shares = [100 * its["objects_correct"], 100 * report["short_prompts"][encoder]]
        rows.append([encoder, *shares, its["fid"], its["dino"]])
    print("\n" + table(["pictures", "objects right, %", "short prompts, %", "FID", "DINO"], rows) + "\n")
    for line in report["expectations"]:
        verdict = {True: "met", False: "not met", None: "open"}[line["met"]]
        print(f"{verdict:>7}: {line['expectation']}\n         {line['found']}")
