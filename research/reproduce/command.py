"""Tables, figures and claims of the papers, regenerated with real data or in the toy world."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from debias_diffusion.errors import FailedError, UserError
from debias_diffusion.eval.report import Table, cell, escaped, versions
from debias_diffusion.files import write_json, write_text
from debias_diffusion.registry import Registry
from debias_diffusion.training.progress import duration

from ..options import ReproduceConfig
from . import papers
from .availability import TFLOPS, missing_parts
from .building import Work
from .claims import BySeed, Lookup, compare, compared_models, decide, mean_of
from .contents import Contents
from .evidence import evidence_page, mixed_note
from .papers import CLAIMS, Column, Model, PaperTable, Queries, World
from .units import result_of, run_units

ALL = "all"


class Reproduction:
    """One call: `tables` are the tables wanted, `claims` the claims if they are.

    Raises:
        UserError: a name is unknown, a setting cannot be used.
    """

    def __init__(self, config: ReproduceConfig):
        self.config, self.folder = config, papers.find_papers(config.papers)
        self.world = papers.read_world(self.folder, config.world)
        self.output, self.root = Path(config.output) / config.world, Path(config.root)
        self.tables = self._find_tables(config.target)
        wants_claims = {CLAIMS, ALL} & set(config.target)
        self.claims = papers.read_yaml(self.folder / f"{CLAIMS}.yaml", papers.Claims) if wants_claims else None
        self.mixed: list[str] = []  # tables made of results of several commits

    def run(self) -> list[Path]:
        """Trains and evaluates what is missing, and writes tables; or plans. Returns the files written.

        Raises:
            UserError: data or weights are missing, or a setting cannot be used.
            FailedError: results of several commits are in one table, unless `config.mixed`.
        """
        if self.config.plan:
            self._add_units()
            return []
        models, columns = zip(*self._models_and_columns(), strict=True)
        if missing := missing_parts(self.world, self.root, models, columns):
            raise UserError("Some of what this needs is not here:\n- " + "\n- ".join(missing))
        if self.config.device == "cpu":
            os.environ["ACCELERATE_USE_CPU"] = "true"  # trainings have no option of their own for it
        self._add_units()
        run_units(self.work.units, self.output, lambda line: print(line, flush=True))
        files = self._write()  # each process writes the same
        if self.mixed and not self.config.mixed:
            raise FailedError(
                f"{', '.join(self.mixed)}: written, but from results of several commits. Give another --output, to "
                "compute all with this commit, or --mixed, to accept them."
            )
        return files

    def _add_units(self) -> None:
        """Adds all that is wanted, by the contents of data and models, and prints the plan."""
        contents = Contents(self.output, read=not self.config.plan)
        self.work = Work(self.world, self.root.resolve(), self.output, self.config.device, contents)
        for seed in self.config.seeds:
            for model, column in self._models_and_columns():
                self.work.add(model, column.evaluation, seed)
        print(self._plan())

    def _find_tables(self, wanted: list[str]) -> dict[str, PaperTable]:
        tables = papers.read_tables(self.folder)
        absent = {entry["name"]: entry["reason"] for entry in papers.read_absent(self.folder)}
        for name in wanted:
            if name in absent:
                raise UserError(f"{name} cannot be reproduced here: {absent[name]} `reproduce --list` names what can.")
            Registry("table", tables | dict.fromkeys((CLAIMS, ALL))).find(name)
        return {name: table for name, table in tables.items() if name in wanted or ALL in wanted}

    def _models_and_columns(self) -> Iterator[tuple[Model, Column]]:
        """Every model wanted, with each column it is needed for."""
        for table in self.tables.values():
            yield from _cells_of(table)
        yield from ((model, column) for _, model, column in self._compared())

    def _compared(self) -> Iterator[tuple[str, Model, Column]]:
        """Every model of a claim by its name, with each column it is compared in."""
        for claim in (claim for group in (self.claims.claims.values() if self.claims else ()) for claim in group):
            for comparison, models in compared_models(self.claims, claim):
                for name, model in models:
                    yield name, model, Column(comparison.evaluation, comparison.score)

    def _plan(self) -> str:
        units = self.work.units
        left = {name: unit for name, unit in units.items() if result_of(self.output, name) is None}
        trainings = [unit.cost for name, unit in left.items() if "/training/" in name]
        cost = f"{sum(trainings) / 3600:.0f} GPU hours for the trainings (counted for {TFLOPS / 1e12:.0f} TFLOP/s)"
        if self.world.seconds_per_step is not None:
            cost = f"{duration(sum(unit.cost for unit in left.values()))} of one core"
        lines = [f"{len(units)} pieces of work, {len(units) - len(left)} done; in {self.output}"]
        lines += [f"  {unit.title}" for unit in left.values()] if self.config.plan else []
        lines.append(f"to do: {len(trainings)} trainings, {len(left) - len(trainings)} other pieces; about {cost}")
        return "\n".join(lines)

    def _scores(self, model: Model, evaluation: str, score: str) -> BySeed:
        values = {}
        for seed in self.config.seeds:
            scores = result_of(self.output, self.work.add(model, evaluation, seed))["content"]
            value = Registry(f"score of {evaluation}", scores).find(score)
            values[seed] = Queries(**value) if isinstance(value, dict) else value
        return values

    def _programs(self, name: str, wanted: Iterable[tuple[Model, Column]]) -> list[str]:
        """The versions and commits that made the results of a table: its evaluations, and all that these need."""
        units = [
            self.work.add(model, column.evaluation, seed) for model, column in wanted for seed in self.config.seeds
        ]
        for unit in units:  # which grows
            units += self.work.units[unit].needs
        made = (program for unit in dict.fromkeys(units) for program in result_of(self.output, unit)["made_with"])
        programs = sorted({" ".join(program.values()) for program in made})
        self.mixed += [name] if len(programs) > 1 else []
        return programs

    def _write(self) -> list[Path]:
        files = []
        for name, table in self.tables.items():
            programs = self._programs(name, _cells_of(table))
            arguments = name, table, self._scores, self.world, self.config.seeds, self.output, programs
            files.append(write_table(*arguments))
            print(f"\n{files[-1].read_text(encoding='utf-8')}")
        return files + (self._write_claims() if self.claims else [])

    def _write_claims(self) -> list[Path]:
        groups = decide(self.claims, self._scores, self.folder.resolve().parents[1])
        content = {
            "world": self.world.title,
            "budget": self.world.budget,
            "editions": self.claims.editions,
            "seeds": self.config.seeds,
            "versions": versions(),
            "made_with": self._programs(CLAIMS, ((model, column) for _, model, column in self._compared())),
            "claims": groups,
            "scores": self._means(),
        }
        files = [self.output / "claims.json", *([Path(self.config.results)] if self.config.results else [])]
        for file in files:
            write_json(file, content)
        write_text(page := self.output / "evidence.md", evidence_page(content))
        verdicts = [[entry["claim"], entry["verdict"]] for group in groups.values() for entry in group]
        print(f"\n{Table(['claim', 'verdict'], verdicts)}")
        return [*files, page]

    def _means(self) -> dict[str, dict]:
        """{evaluation: {model: {score: {"mean", "deviation" over seeds}}}}"""
        means = {}
        for name, model, column in self._compared():
            by_seed = [mean_of(part) for part in self._scores(model, column.evaluation, column.score).values()]
            deviation = float(f"{np.std(by_seed, ddof=1):.3g}") if len(by_seed) > 1 else None
            of_model = means.setdefault(column.evaluation, {}).setdefault(name, {})
            of_model[column.score] = {"mean": float(f"{np.mean(by_seed):.5g}"), "deviation": deviation}
        return means


def _cells_of(table: PaperTable) -> Iterator[tuple[Model, Column]]:
    """Every row with every column."""
    return ((row, row.column(column)) for row in table.rows.values() for column in table.columns.values())


def write_table(
    name: str,
    table: PaperTable,
    scores: Lookup,
    world: World,
    seeds: list[int],
    output: Path,
    made_with: Sequence[str] = (),
) -> Path:
    """Writes a table as NAME.md and NAME.json into `output`, and returns the Markdown file.

    Args:
        made_with: versions and commits; the page names several.

    Raises:
        UserError: a row is compared with one that is not there.
    """
    head = {part: getattr(table, part) for part in ("paper", "title", "source", "note", "within", "otherwise")}
    content = {"name": name, **head, "world": world.title, "seeds": seeds, "versions": versions()}
    content |= {"made_with": list(made_with), "of_papers": world.of_papers}
    content["columns"] = {title: column.evaluation for title, column in table.columns.items()}
    content["sets"] = {label: list(row.sets.values()) for label, row in table.rows.items() if row.sets}
    content["rows"] = {label: _cells(table, label, scores) for label in table.rows}
    write_json(output / f"{name}.json", content)
    write_text(output / f"{name}.md", table_page(content))
    return output / f"{name}.md"


def _cells(table: PaperTable, label: str, scores: Lookup) -> dict[str, dict]:
    """{column: "ours", the mean over seeds, "by_seed", "published", "repeated", and of some rows "minus"}"""
    row, cells = table.rows[label], {}
    if row.minus and row.minus not in table.rows:
        raise UserError(f"{label} is compared with {row.minus!r}, which is none of the rows {', '.join(table.rows)}.")
    given = ([*part, *[None] * len(table.columns)] for part in (row.published, row.repeated))
    for (title, column), *numbers in zip(table.columns.items(), *given, strict=False):
        column = row.column(column)
        values = scores(row, column.evaluation, column.score)
        by_seed = [mean_of(of_seed) for of_seed in values.values()]
        cells[title] = {"ours": round(float(np.mean(by_seed)), 4), "by_seed": [round(value, 4) for value in by_seed]}
        cells[title] |= dict(zip(("published", "repeated"), numbers, strict=True))
        if row.minus:
            subtracted = scores(table.rows[row.minus], column.evaluation, column.score)
            trained = row.is_trained or table.rows[row.minus].is_trained
            cells[title]["minus"] = {"row": row.minus} | compare(values, subtracted, trained).numbers()
    return cells


def table_page(content: dict) -> str:
    """The Markdown of a written table: ours, what is published, if anything is, and differences of rows.

    Published numbers are subtracted in a world with the papers' data alone.
    """
    all_cells = [cell for cells in content["rows"].values() for cell in cells.values()]
    given = [kind for kind in ("published", "repeated") if any(cell[kind] is not None for cell in all_cells)]
    subtracts, header, rows = content["of_papers"] and "published" in given, ["row"], []
    for title in content["columns"]:
        header += [title, *given, *["difference"] * subtracts]
    for label, cells in content["rows"].items():
        compared = next((numbers["minus"]["row"] for numbers in cells.values() if "minus" in numbers), None)
        details = [*content["sets"].get(label, []), *([f"minus {compared}"] if compared else [])]
        row = [f"{label} ({', '.join(details)})" if details else label]
        for numbers in cells.values():
            ours, minus = cell(numbers["ours"], form=".2f"), numbers.get("minus")
            row.append(f"{ours}: {cell(minus['difference'], minus['low'], minus['high'], '+.2f')}" if minus else ours)
            number = numbers["published"]
            row += [cell(numbers[kind], form=".2f") for kind in given]
            row += [cell(None if number is None else numbers["ours"] - number, form="+.2f")] * subtracts
        rows.append(row)
    lines = [f"# {escaped(content['paper'])}, {escaped(content['name'])}: {escaped(content['title'])}"]
    lines += [f"{content['world']}, seeds {', '.join(map(str, content['seeds']))}. Published: {content['source']}."]
    sets = ", ".join(f"{title}: {evaluation}" for title, evaluation in content["columns"].items())
    lines += [line for line in (content["note"], f"Sets: {sets}.", mixed_note(content["made_with"])) if line]
    ending = [_nearness(content)] if subtracts and content["within"] is not None else []
    return "\n\n".join([*lines, Table(header, rows).markdown(), *ending]) + "\n"


def _nearness(content: dict) -> str:
    """Whether all numbers are as near to the published ones as the table says, which are not, and what to look at."""
    within, far = content["within"], []
    for label, cells in content["rows"].items():
        for title, numbers in cells.items():
            if numbers["published"] is not None and abs(numbers["ours"] - numbers["published"]) > within + 1e-9:
                far.append(f"{label} {title} by {numbers['ours'] - numbers['published']:+.2f}")
    if not far:
        return f"All numbers are within {within} of the published ones."
    return f"Further than {within} from the published: {', '.join(far)}. {content['otherwise']}"
