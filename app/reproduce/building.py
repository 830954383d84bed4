"""From tables, claims and a world to units: trainings, ablations and evaluations, shared by all that name them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from debias_diffusion.errors import UserError, near_matches
from debias_diffusion.files import json_digest
from debias_diffusion.jobs import Job
from debias_diffusion.methods import METHODS
from debias_diffusion.toyworld.pairs import write_pairs
from debias_diffusion.training.checkpoints import BEST, CHECKPOINT
from debias_diffusion.training.config import RECIPE_OPTIONS, TrainConfig
from debias_diffusion.training.loop import train

from ..ablate import ablate
from ..command_line import checked
from ..options import AblateConfig
from .measuring import KINDS
from .papers import Column, Model, World, ablation_settings, describe, fill
from .units import Unit

_SPELLING = ("recipe", "method", *RECIPE_OPTIONS)  # options of a method, which can be spelled in several ways
_EVALUATION_SECONDS = 15.0  # a guess, for the order of units


@dataclass
class Work:
    """All units of a call.

    Attributes:
        world: where data and models come from.
        root: folder of real data, absolute: results of another folder are others.
        output: folder of everything.
        device: that evaluations and ablations run on; None: cuda where there is one.
        units: by name.
    """

    world: World
    root: Path
    output: Path
    device: str | None = None
    units: dict[str, Unit] = field(default_factory=dict)
    _models: dict[str, tuple] = field(default_factory=dict)

    def add(self, model: Model, columns: Iterable[Column], seed: int) -> dict[str, str]:
        """Adds what the columns need of a model trained with a seed.

        Returns:
            {evaluation: name of its unit}

        Raises:
            UserError: a name or a setting is unknown in this world.
        """
        key = f"{describe(model)}/{seed}"
        if key not in self._models:
            self._models[key] = self._model(model, seed)
        name, label, needs = self._models[key]
        return {
            evaluation: self._evaluation(evaluation, name, label, needs, seed)
            for evaluation in dict.fromkeys(column.evaluation for column in columns)
        }

    # ---- models

    def _model(self, model: Model, seed: int) -> tuple[Callable[[], str], str, tuple[str, ...]]:
        """(the model's name or folder, its label in folder names, the units that it needs)"""
        base = _named(model.base, self.world.bases, "base model")
        if model.training is not None and model.ablation is not None:
            raise UserError(f"A row has both a training {model.training} and an ablation {model.ablation}. Give one.")
        if model.training is not None:
            unit = self._training(model, seed)
            return str(self.output / unit.name / "last"), Path(unit.name).name, (unit.name,)
        name = f"{base.model}:{base.pretrained}" if base.pretrained else base.model
        if model.ablation is None:
            return name, f"{model.base}-{_digest(name)}", ()
        unit = self._ablation(model, name, seed)
        return str(self.output / unit.name), Path(unit.name).name, (unit.name,)

    def _training(self, model: Model, seed: int) -> Unit:
        settings = self.training_settings(model)
        config = self._train_config(settings, seed, self.output)
        # Equal methods have one folder, however they are spelled: long-clip is debias-clip with three options.
        plain = {name: part for name, part in settings.items() if name not in _SPELLING}
        needs = (self._pairs(),) if self.world.pairs is not None else ()
        identity = _digest(repr(config.make_method()), self._filled(plain, seed), needs)
        name = f"seed-{seed}/training/{config.recipe}-{identity}"
        if name not in self.units:
            seconds = (self.world.seconds_per_step or 1.0) * (config.max_steps or 1000 * config.epochs)
            title = f"train {describe(model)}, seed {seed}"
            self.units[name] = Unit(name, title, partial(self._train, settings, seed), needs, seconds)
        return self.units[name]

    def training_name(self, model: Model, seed: int) -> str:
        """The name of a model's training."""
        return self._training(model, seed).name

    def training_settings(self, model: Model) -> dict[str, Any]:
        """Settings of `train` for a model in this world, with epochs turned into steps where the world does so."""
        base, given = self.world.bases[model.base], model.training or {}
        known = [part.name for part in fields(TrainConfig)]
        for name in given:
            if name not in known:
                raise UserError(
                    f"train has no setting {name!r}.{near_matches(name, known)} See `debias-diffusion train --help`."
                )
        settings = self.world.training | given | {"model": base.model, "pretrained": base.pretrained}
        recipe = METHODS.get(settings.get("recipe", "debias-clip"))
        further = dict(settings.get("method", {}))
        for name, values in self.world.substitute.items():
            place = settings if name in known else further
            value = place.get(name, getattr(recipe, name, None))
            if value in values:
                place[name] = values[value]
        settings |= {"method": further} if further else {}
        if self.world.steps_per_epoch is not None:
            steps = self.world.steps_per_epoch * settings.get("epochs", TrainConfig.epochs)
            settings |= {"max_steps": steps, "epochs": steps, "warmup": steps // 10, "eval_every": steps}
        return settings

    def _train_config(self, settings: dict, seed: int, folder: Path) -> TrainConfig:
        values = self._filled(settings, seed) | {"output": str(folder), "seed": seed}
        if self.world.pairs is not None:
            pairs = self.output / self._pairs() / "data"
            values |= {"data": f"{pairs}/data.json", "images": f"{pairs}/images", "validation": self.world.held_out}
        return checked(TrainConfig, values)

    def _train(self, settings: dict, seed: int, folder: Path) -> dict:
        begun = Job.read(folder).settings  # a training continues with the spelling that it began with
        settings = settings | {name: begun[name] for name in _SPELLING if name in begun}
        if train(self._train_config(settings, seed, folder)) is None:
            raise KeyboardInterrupt  # asked to stop, it has left a checkpoint to go on from
        if not self.world.keep_checkpoints:
            job = Job.read(folder)
            for name in (*job.names(CHECKPOINT), BEST):
                job.remove(name)
        return {}

    def _pairs(self) -> str:
        """The name of the unit that draws the world's pairs."""
        name = f"pairs-{self.world.pairs}-{self.world.held_out}"

        def work(folder: Path) -> dict:
            write_pairs(folder / "data", self.world.held_out, self.world.pairs)
            return {}

        self.units.setdefault(name, Unit(name, f"draw {self.world.pairs} pairs to train on", work))
        return name

    def _ablation(self, model: Model, name: str, seed: int) -> Unit:
        known = [part.name for part in fields(AblateConfig)]
        settings = ablation_settings(self.world, model)
        for key in settings:
            if key not in known:
                raise UserError(
                    f"ablate has no setting {key!r}.{near_matches(key, known)} See `debias-diffusion ablate --help`."
                )
        settings = self._filled(settings | {"model": name}, seed)
        unit = f"seed-{seed}/ablation/{settings.get('search', 'ga')}-{_digest(settings)}"

        def work(folder: Path) -> dict:
            ablate(checked(AblateConfig, settings | {"output": str(folder), "seed": seed, "device": self.device}))
            return {}

        self.units.setdefault(unit, Unit(unit, f"ablate {describe(model)}, seed {seed}", work, (), 60.0))
        return self.units[unit]

    # ---- evaluations

    def _evaluation(self, evaluation: str, model: str, label: str, needs: tuple[str, ...], seed: int) -> str:
        given = _named(evaluation, self.world.evaluations, "evaluation")
        settings = self._filled({name: part for name, part in given.items() if name != "kind"}, seed)
        kind = given["kind"]
        if kind not in KINDS:
            raise UserError(
                f"The evaluation {evaluation!r} is of the kind {kind!r}, but must be one of {', '.join(KINDS)}."
            )
        # Benchmarks that are the same data in a small world are evaluated once.
        name = f"seed-{seed}/{kind}-{_digest(settings)}/{label}"

        def work(folder: Path) -> dict:
            return KINDS[kind](model, folder, settings | ({"device": self.device} if self.device else {}))

        title = f"evaluate {evaluation} ({kind}) of {label}, seed {seed}"
        self.units.setdefault(name, Unit(name, title, work, needs, _EVALUATION_SECONDS))
        return name

    def _filled(self, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Settings with places and seed filled in."""
        return {name: fill(part, self.root, seed) for name, part in settings.items()}


def _digest(*depends: Any) -> str:
    """Of JSON values: all that decides a result, as a part of its name."""
    return json_digest({"depends": depends})[:12]


def _named(name: str, known: Mapping[str, Any], what_it_is: str) -> Any:
    if name not in known:
        raise UserError(
            f"This world has no {what_it_is} {name!r}.{near_matches(name, known)} It has: {', '.join(known)}."
        )
    return known[name]
