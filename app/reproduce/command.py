"""Tables, figures and claims of the papers, regenerated with real data or in the toy world."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from debias_diffusion.errors import UserError, near_matches
from debias_diffusion.eval.report import Table, versions
from debias_diffusion.files import write_json, write_text
from debias_diffusion.jobs import Job
from debias_diffusion.training.plan import duration

from ..options import ReproduceConfig
from .availability import TFLOPS, gpu_hours, missing_parts
from .building import Work
from .claims import all_claims, budgets, decide, find_model, needed, with_epochs
from .evidence import evidence_page
from .papers import (
    CLAIMS,
    Claims,
    Column,
    Model,
    PaperTable,
    describe,
    find_papers,
    read_absent,
    read_tables,
    read_world,
    read_yaml,
)
from .table_sheets import write_table
from .units import is_done, result_of, run_units

ALL = "all"
_FEWEST = 3  # seeds that decide a claim while others are still to be run
RESULTS = "benchmarks/results/claims.json"  # as the page names them


def regenerate(config: ReproduceConfig) -> list[Path]:
    """Trains and evaluates what is missing, and writes tables; or plans.

    Returns:
        The files written.

    Raises:
        UserError: a name is unknown, a setting cannot be used, or data or weights are missing.
    """
    return _Reproduction(config).run()


class _Reproduction:
    """One call: `tables` are the tables wanted, `claims` the claims if they are."""

    def __init__(self, config: ReproduceConfig):
        self.config, self.folder = config, find_papers(config.papers)
        self.world = read_world(self.folder, config.world)
        self.output, self.root = Path(config.output) / config.world, Path(config.root)
        self.all_tables = read_tables(self.folder)
        self.tables = self._find_tables(config.target)
        wants_claims = {CLAIMS, ALL} & set(config.target)
        self.claims = read_yaml(self.folder / f"{CLAIMS}.yaml", Claims) if wants_claims else None
        self.work = Work(self.world, self.root.resolve(), self.output, config.device)
        self.job = Job.read(self.output)
        self._places: dict[str, str] = {}

    def run(self) -> list[Path]:
        self._add_units()
        print(self._plan())
        if self.config.plan:
            return []
        if missing := missing_parts(self.world, self.root, *self._rows_and_columns()):
            raise UserError("Some of what this needs is not here:\n- " + "\n- ".join(missing))
        if self.config.device == "cpu":
            os.environ["ACCELERATE_USE_CPU"] = "true"  # trainings have no option of their own for it
        with Job.open(self.output, "reproduce", shared=True) as self.job:
            if not self.config.finished:
                run_units(self.work.units, self.job, lambda line: print(line, flush=True))
            return self._write()  # each process writes the same

    # ---- what is wanted

    def _find_tables(self, wanted: list[str]) -> dict[str, PaperTable]:
        if ALL in wanted:
            return self.all_tables
        absent = {entry.name: entry.reason for entry in read_absent(self.folder)}
        for name in wanted:
            if name in absent:
                raise UserError(f"{name} cannot be reproduced here: {absent[name]} `reproduce --list` names what can.")
            if name not in (*self.all_tables, CLAIMS):
                known = [*self.all_tables, CLAIMS, ALL]
                raise UserError(f"There is no {name!r}.{near_matches(name, known)} Choose from: {', '.join(known)}.")
        return {name: self.all_tables[name] for name in wanted if name != CLAIMS}

    def _pairs(self) -> Iterable[tuple[Model, Column]]:
        """Every model wanted, with each column it is needed for."""
        for table in self.tables.values():
            yield from ((row, column) for row in table.rows.values() for column in table.columns.values())
        if self.claims:
            yield from needed(self.claims)

    def _rows_and_columns(self) -> tuple[list[Model], list[Column]]:
        pairs = list(self._pairs())
        return [model for model, _ in pairs], [column for _, column in pairs]

    def _add_units(self) -> None:
        for seed in self.config.seeds:
            for model, column in self._pairs():
                [unit] = self.work.add(model, [column], seed).values()
                self._places[_key(model, column.evaluation, seed)] = unit

    # ---- the plan and the list

    def _plan(self) -> str:
        units = self.work.units
        left = {name: unit for name, unit in units.items() if not is_done(self.job, name)}
        trainings = [unit for name, unit in left.items() if "/training/" in name]
        lines = [f"{len(units)} pieces of work, {len(units) - len(left)} done; in {self.output}"]
        lines += [f"  {unit.title}" for unit in left.values()] if self.config.plan else []
        lines.append(
            f"to do: {len(trainings)} trainings, {len(left) - len(trainings)} other pieces; about {self._cost(left)}"
        )
        return "\n".join(lines)

    def _cost(self, units: dict) -> str:
        if self.world.seconds_per_step is not None:
            return f"{duration(sum(unit.cost for unit in units.values()))} of one core"
        models = {describe(model): model for model in self._rows_and_columns()[0] if model.training is not None}
        hours = {}
        for seed in self.config.seeds:
            for model in models.values():
                if (name := self.work.training_name(model, seed)) in units:
                    hours[name] = gpu_hours(model, self.world)
        return f"{sum(hours.values()):.0f} GPU hours for the trainings (counted for {TFLOPS / 1e12:.0f} TFLOP/s)"

    # ---- results

    def _scores(self, model: Model, evaluation: str, score: str) -> dict:
        """{seed: values of the score}"""
        values = {}
        for seed in self.config.seeds:
            unit = self._places[_key(model, evaluation, seed)]
            if self.config.finished and not is_done(self.job, unit):
                continue
            scores = result_of(self.job, unit)
            if score not in scores:
                raise UserError(
                    f"{evaluation} has no score {score!r}.{near_matches(score, scores)} It has: {', '.join(scores)}."
                )
            values[seed] = scores[score]
        return values

    def _write(self) -> list[Path]:
        files = [
            write_table(name, table, self._scores, self.world.title, self.config.seeds, self.output)
            for name, table in self.tables.items()
        ]
        for file in files:
            print(f"\n{file.read_text(encoding='utf-8')}")
        return files + (self._write_claims() if self.claims else [])

    def _write_claims(self) -> list[Path]:
        files = [self.output / "claims.json", *([Path(self.config.results)] if self.config.results else [])]
        content = self._claims_content()
        for file in files:
            write_json(file, content)
        page = self.output / "claims.md"
        write_text(page, evidence_page(content, RESULTS))
        verdicts = [[entry["claim"], entry["verdict"]] for group in content["claims"].values() for entry in group]
        print(f"\n{Table(['claim', 'verdict'], verdicts)}")
        return [*files, page]

    def _claims_content(self) -> dict:
        fewest = min(_FEWEST, len(self.config.seeds))
        groups = decide(self.claims, self._scores, self.folder.resolve().parents[1], fewest)
        for entry in (entry for group in groups.values() for entry in group):
            entry["steps"] = self._steps(entry["epochs"])
        return {
            "world": self.world.title,
            "budget": self.world.budget,
            "editions": self.claims.editions,
            "seeds": self.config.seeds,
            "versions": versions(),
            "claims": groups,
            "scores": self._all_scores(),
        }

    def _steps(self, epochs: int | None) -> int | None:
        """The steps that trainings of so many epochs really took; None where the world counts epochs."""
        if epochs is None:
            return None
        model = next(model for model in self.claims.models.values() if model.training is not None)
        return self.work.training_settings(with_epochs(model, epochs)).get("max_steps")

    def _all_scores(self) -> dict[str, dict]:
        """{evaluation: {model: {score: {"mean", "deviation" over seeds}}}}"""
        scores = {}
        for claim in all_claims(self.claims):
            for epochs in budgets(claim):
                for comparison in claim.compare:
                    for name in comparison.names:
                        label = name if epochs is None else f"{name}, {epochs} epochs"
                        model = with_epochs(find_model(self.claims, name), epochs)
                        values = self._scores(model, comparison.evaluation, comparison.score)
                        if not values:
                            continue
                        by_model = scores.setdefault(comparison.evaluation, {}).setdefault(label, {})
                        by_model[comparison.score] = _summary([float(np.mean(part)) for part in values.values()])
        return scores


def _summary(by_seed: list[float]) -> dict:
    deviation = float(np.std(by_seed, ddof=1)) if len(by_seed) > 1 else None
    return {"mean": float(f"{np.mean(by_seed):.5g}"), "deviation": deviation and float(f"{deviation:.3g}")}


def _key(model: Model, evaluation: str, seed: int) -> str:
    return f"{seed}/{evaluation}/{describe(model)}"
