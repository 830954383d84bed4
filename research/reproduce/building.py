"""From tables, claims and a world to units: trainings, ablations, alignments and evaluations, each done once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from debias_diffusion.ablation.saved import FILE as ABLATION_FILE
from debias_diffusion.app.align.command import align
from debias_diffusion.app.options import AlignConfig
from debias_diffusion.encoders.spec import SHORT
from debias_diffusion.errors import UserError
from debias_diffusion.files import json_digest
from debias_diffusion.jobs import Job
from debias_diffusion.methods import METHODS
from debias_diffusion.registry import Registry
from debias_diffusion.toyworld.pairs import write_pairs
from debias_diffusion.training.checkpoints import BEST, CHECKPOINT
from debias_diffusion.training.config import RECIPE_OPTIONS, TrainConfig
from debias_diffusion.training.two_tower import train

from ..ablate.command import ablate
from ..options import AblateConfig
from ..referring.grammar import STYLES, caption
from .availability import gpu_hours
from .contents import Contents
from .measuring import KINDS, checked
from .papers import Model, World, ablation_settings, describe, fill, training_settings
from .units import Unit

_SPELLING = ("recipe", "method", *RECIPE_OPTIONS)  # options of a method, which can be spelled in several ways


@dataclass
class Work:
    """All units of a call.

    Attributes:
        world: where data and models come from.
        root: folder of real data, absolute.
        output: folder of everything.
        device: that evaluations and ablations run on; None: cuda where there is one.
        contents: of data and models, which name the units with the settings: no path does.
        units: by name.
    """

    world: World
    root: Path
    output: Path
    device: str | None = None
    contents: Contents = field(default_factory=Contents)
    units: dict[str, Unit] = field(default_factory=dict)
    _models: dict[str, tuple] = field(default_factory=dict)

    def add(self, model: Model, evaluation: str, seed: int) -> str:
        """Adds the evaluation of a model made with a seed, and all that it needs.

        Returns:
            the name of its unit: `units.result_of` has the scores.

        Raises:
            UserError: a name or a setting is unknown in this world.
        """
        key = str([seed, *(getattr(model, part.name) for part in fields(Model))])  # rows have more
        if key not in self._models:
            self._models[key] = self._model(model, seed)
        encoder, unablated, label, needs = self._models[key]
        given = dict(Registry("evaluation of this world", self.world.evaluations).find(evaluation))
        measure = Registry("kind of evaluation", KINDS).find(kind := given.pop("kind", ""))
        settings = self._filled(given | (model.evaluation or {}), seed)

        def work(folder: Path) -> dict:
            nothing_helps = model.ablation is not None and not Path(encoder, ABLATION_FILE).is_file()
            nothing_helps &= kind != "ablation"  # which is of the search itself
            where = {"encoders": [unablated if nothing_helps else encoder], "output": str(folder)}
            where |= {"device": self.device} if self.device else {}
            return measure(settings | where)

        # Benchmarks that are the same data in a small world are evaluated once.
        name = f"seed-{seed}/{kind}-{self._digest(settings)}/{label}"
        return self._add(name, f"evaluate {evaluation} ({kind}) of {label}, seed {seed}", work, *needs, cost=15.0)

    def _add(self, name: str, title: str, work: Callable[[Path], dict | None], *needs: str, cost: float = 0.0) -> str:
        self.units.setdefault(name, Unit(name, title, lambda folder: work(folder) or {}, needs, cost))
        return name

    def _model(self, model: Model, seed: int) -> tuple[str, str, str, tuple[str, ...]]:
        """(the name of its encoder, that of the base model, which stands for it where a search finds no head to ablate,
        its label in folder names, the unit that makes it, if any)"""
        base = Registry("base model of this world", self.world.bases).find(model.base)
        if model.training is not None and model.ablation is not None:
            raise UserError(f"A row has both a training {model.training} and an ablation {model.ablation}. Give one.")
        encoder = fill(f"{base.model}:{base.pretrained}" if base.pretrained else base.model, self.root, seed)
        unablated, identity, needs = encoder, self._digest({"model": encoder}), ()
        label = f"{model.base}-{identity}"
        makers = {"training": self._training, "ablation": self._ablation, "alignment": self._alignment}
        for command, make in makers.items():
            if getattr(model, command) is not None:
                needs = (make(model, seed, encoder, identity, needs),)
                label = identity = Path(needs[0]).name
                encoder = str(self.output / needs[0])
        if model.positions == "short":
            label, encoder = f"{label}-short", f"{SHORT}{encoder}"
        if model.reading:
            label, encoder = f"{label}-{model.reading}", f"{model.reading}:{encoder}"
        return encoder, unablated, label, needs

    # ---- trainings

    def _training(self, model: Model, seed: int, _encoder: str, identity: str, _needs: tuple[str, ...]) -> str:
        settings = self._training_settings(model)
        config = self._train_config(settings, seed, self.output)
        # Equal methods have one folder, however they are spelled: long-clip is debias-clip with three options.
        plain = {name: part for name, part in settings.items() if name not in _SPELLING}
        needs = self._pairs()
        digest = self._digest(self._filled(plain, seed), repr(config.chosen_method), identity, needs)
        cost = 3600 * gpu_hours(model, self.world)
        if self.world.seconds_per_step is not None:
            cost = self.world.seconds_per_step * (config.max_steps or 0)
        name, title = f"seed-{seed}/training/{config.recipe}-{digest}", f"train {describe(model)}, seed {seed}"
        return self._add(name, title, partial(self._train, settings, seed), *needs, cost=cost)

    def _training_settings(self, model: Model) -> dict[str, Any]:
        """Settings of `train` for a model in this world, with epochs turned into steps where the world does so."""
        base, given = self.world.bases[model.base], model.training or {}
        _check_names("train", given, TrainConfig)
        names = {"model": fill(base.model, self.root, 0), "pretrained": base.pretrained}
        settings = training_settings(self.world, model) | names
        recipe = METHODS.get(settings.get("recipe", "debias-clip"))
        for name, values in self.world.substitute.items():
            value = settings.get(name, getattr(recipe, name, None))
            if value in values:
                settings[name] = values[value]
        if self.world.steps_per_epoch is not None:
            steps = self.world.steps_per_epoch * settings.get("epochs", TrainConfig.epochs)
            settings |= {"max_steps": steps, "epochs": steps, "warmup": steps // 10, "eval_every": steps}
        return settings

    def _train_config(self, settings: dict, seed: int, folder: Path) -> TrainConfig:
        values = self._filled(settings, seed) | {"output": str(folder), "seed": seed}
        return checked(TrainConfig, values | self._drawn_pairs())

    def _train(self, settings: dict, seed: int, folder: Path) -> None:
        begun = Job.read(folder).settings  # a training continues with the spelling that it began with
        settings = settings | {name: begun[name] for name in _SPELLING if name in begun}
        if train(self._train_config(settings, seed, folder)) is None:
            raise KeyboardInterrupt  # asked to stop, it has left a checkpoint to go on from
        if not self.world.keep_checkpoints:
            job = Job.read(folder)
            for name in (*job.names(CHECKPOINT), BEST):
                job.remove(name)

    def _pairs(self, styles: int = 1) -> tuple[str, ...]:
        """The unit that draws the world's pairs, with captions of so many styles; none where they are there."""
        held_out, count = self.world.held_out, self.world.pairs
        if count is None:
            return ()

        captions = [partial(caption, style=style) for style in STYLES]

        def draw(folder: Path) -> None:
            write_pairs(folder / "data", held_out, count, captions=captions[:styles])

        name = f"pairs-{count}-{held_out}" + (f"-{styles}-styles" if styles > 1 else "")
        return (self._add(name, f"draw {count} pairs to train on", draw),)

    def _drawn_pairs(self, styles: int = 1) -> dict[str, Any]:
        """Settings of a training on pairs that are drawn."""
        data = [self.output / unit / "data" for unit in self._pairs(styles)]
        held_out = {"validation": self.world.held_out}
        return {"data": f"{data[0]}/data.json", "images": f"{data[0]}/images"} | held_out if data else {}

    # ---- ablations and alignments

    def _ablation(self, model: Model, seed: int, encoder: str, identity: str, needs: tuple[str, ...]) -> str:
        settings = ablation_settings(self.world, model)
        _check_names("ablate", settings, AblateConfig)
        settings = self._filled(settings, seed)

        def work(folder: Path) -> None:
            given = settings | {"model": encoder, "output": str(folder), "seed": seed, "device": self.device}
            ablate(checked(AblateConfig, given))

        name = f"seed-{seed}/ablation/{settings.get('search', 'ga')}-{self._digest(settings, identity)}"
        return self._add(name, f"ablate {describe(model)}, seed {seed}", work, *needs, cost=60.0)

    def _alignment(self, model: Model, seed: int, encoder: str, identity: str, needs: tuple[str, ...]) -> str:
        settings = self.world.alignment | model.alignment
        _check_names("align", settings, AlignConfig)
        settings, needs = self._filled(settings, seed), needs + self._pairs(len(STYLES))

        def work(folder: Path) -> None:
            given = settings | self._drawn_pairs(len(STYLES))
            given |= {"encoder": encoder, "output": str(folder), "seed": seed}
            if align(checked(AlignConfig, given)) is None:
                raise KeyboardInterrupt  # it, too, has left a checkpoint

        name = f"seed-{seed}/alignment/{self._digest(settings, identity, needs)}"
        cost = (self.world.seconds_per_step or 0.0) * settings.get("max_steps", 0)
        return self._add(name, f"align {describe(model)}, seed {seed}", work, *needs, cost=cost)

    def _filled(self, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Settings with places and seed filled in."""
        return {name: fill(part, self.root, seed) for name, part in settings.items()}

    def _digest(self, settings: Mapping[str, Any], *more: Any) -> str:
        """Of settings, by the contents that they name, and of JSON values: all that decides a result."""
        return json_digest({"depends": [self.contents.of(settings), *more]})[:12]


def _check_names(command: str, settings: Mapping, options: type) -> None:
    """Raises UserError for a setting that a command does not have."""
    known = Registry(f"setting of `{command}`", {part.name: part for part in fields(options)})
    for name in settings:
        known.find(name)
