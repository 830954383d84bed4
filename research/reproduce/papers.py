"""The files under `research/papers/`: tables, claims and worlds, read into dataclasses that name every allowed key."""

from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import yaml

from debias_diffusion.errors import UserError, reason
from debias_diffusion.files import read_file
from debias_diffusion.limits import Checked
from debias_diffusion.registry import Registry
from debias_diffusion.text.chunks import Reading

from ..options import ReproduceConfig

NOT_HERE, CLAIMS, WORLD = "not-here", "claims", "world-"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
_REPOSITORY = Path(__file__).parents[1] / "papers"


@dataclass(frozen=True)
class Queries:
    """A score's queries: it is sum(above) / sum(below), and the queries of a group are resampled together.

    Attributes:
        above, below: of each query, [N].
        groups: the name of what each query belongs to: an image, or a family of scenes, [N].
    """

    above: list[float]
    below: list[float]
    groups: list[str]

    @property
    def mean(self) -> float:
        return sum(self.above) / sum(self.below)

    def group_sums(self) -> tuple[np.ndarray, np.ndarray]:
        """Above and below the line, for each group, [G] each."""
        group = np.unique(self.groups, return_inverse=True)[1]
        return np.bincount(group, self.above), np.bincount(group, self.below)


@dataclass(frozen=True)
class Column(Checked):
    """A column of a table: a score of one of the world's evaluations.

    Attributes:
        evaluation: a name in the world's `evaluations`.
        score: one of its scores, see `measuring.KINDS`.
    """

    evaluation: str
    score: str = "t2i"


@dataclass(frozen=True)
class Model(Checked):
    """A model that a table compares.

    Attributes:
        base: a name in the world's `bases`.
        training: settings of `train` besides the world's; None for the base model itself.
        ablation: settings of `ablate` besides the world's, of the base model.
        alignment: settings of `align` besides the world's, of the trained encoder or of the SDXL checkpoint's own.
        reading: of prompts longer than the context length, in images; None: as the encoder's name says.
        evaluation: settings of the evaluation besides the world's.
        positions: that captions are read with: short, of a Fix-CLIP training, are the base model's own.
    """

    base: str = "openai-b16"
    training: dict[str, Any] | None = None
    ablation: dict[str, Any] | None = None
    alignment: dict[str, Any] | None = None
    reading: Reading | None = None
    evaluation: dict[str, Any] | None = None
    positions: Literal["long", "short"] = "long"

    @property
    def is_trained(self) -> bool:
        """Whether each seed has a model of its own."""
        return not (self.training is None and self.ablation is None and self.alignment is None)


@dataclass(frozen=True)
class Row(Model):
    """A row of a table.

    Attributes:
        published: a number for each column, None where there is none.
        repeated: likewise, as others measured it with the published model.
        minus: the row whose scores are subtracted, with 95% intervals; empty: none.
        sets: {a column's evaluation: the one that this row's published number is of}.
    """

    published: list[float | None] = field(default_factory=list)
    repeated: list[float | None] = field(default_factory=list)
    minus: str = ""
    sets: dict[str, str] = field(default_factory=dict)

    def column(self, column: Column) -> Column:
        """A column of the table, as it is for this row."""
        return replace(column, evaluation=self.sets.get(column.evaluation, column.evaluation))


@dataclass(frozen=True)
class PaperTable(Checked):
    """A table or figure of a paper.

    Attributes:
        paper: its short name.
        title: what it compares.
        source: where the published numbers stand.
        columns: by title.
        rows: by name.
        note: on what is compared or could not be read.
        within: how near to the published numbers ours must be; None: the page does not say.
        otherwise: what to look at where one is not.
    """

    paper: str
    title: str
    source: str
    columns: dict[str, Column]
    rows: dict[str, Row]
    note: str = ""
    within: float | None = None
    otherwise: str = ""


@dataclass(frozen=True)
class Comparison(Checked):
    """A score of one model less that of another, and the sign that is expected: a - b, or (a - b) - (c - d).

    Attributes:
        a, b, c, d: names of models.
        evaluation, score: as in `Column`.
        sign: above or below 0, or between -margin and margin.
        margin: for "=".
    """

    a: str
    b: str
    evaluation: str
    score: str = "t2i"
    sign: Literal["+", "-", "="] = "+"
    margin: float = 0.0
    c: str | None = None
    d: str | None = None


@dataclass(frozen=True)
class Recorded(Checked):
    """Differences in the results of a benchmark, a JSON file in the repository.

    Attributes:
        file: below the repository.
        path: keys down to {"difference", "low", "high", "p"}, or, with `less`, to a number. "*" stands for every key:
            each then is a seed. Of a list, values in the place of a key name the entry.
        less: keys to the number that is subtracted.
        sign, margin: as in `Comparison`.
        text: what is compared.
    """

    file: str
    path: list[str | dict]
    text: str
    less: list[str | dict] | None = None
    sign: Literal["+", "-", "="] = "+"
    margin: float = 0.0


@dataclass(frozen=True)
class Claim(Checked):
    """A statement of a paper, and the differences that decide it: it holds if all of them have the expected sign.

    Attributes:
        claim: the statement.
        source: where it stands.
        published: the published numbers, in words.
        compare: differences that this command measures.
        recorded: differences from the results of benchmarks.
        note: on the claim.
    """

    claim: str
    source: str
    published: str = ""
    compare: list[Comparison] = field(default_factory=list)
    recorded: list[Recorded] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Claims(Checked):
    """All claims, and the models that they compare.

    Attributes:
        models: by name.
        claims: in groups, by title.
        editions: of the papers that were read, for the page.
    """

    models: dict[str, Model]
    claims: dict[str, list[Claim]]
    editions: str = ""


@dataclass(frozen=True)
class Base(Checked):
    """A base model.

    Attributes:
        model, pretrained: as `train` takes them; "original", for images, is the SDXL checkpoint's own encoder.
        weights: hub repository of `pretrained`, to see whether it is on this machine.
        tflop: counted TFLOP of a training step for each pair, forward and backward; for estimates.
    """

    model: str
    pretrained: str | None = None
    weights: str | None = None
    tflop: float = 0.0


@dataclass(frozen=True)
class World(Checked):
    """Where data, base models and settings of all tables come from. "{root}" and "{seed}" are filled in.

    Attributes:
        title: for pages.
        bases: base models, by the names that tables use.
        training, ablation, alignment: settings of `train`, `ablate` and `align`.
        evaluations: by name: "kind", one of `measuring.KINDS`, and settings of that evaluation.
        steps_per_epoch: of small worlds: an epoch of a table is so many steps here; None: a pass over the data.
        substitute: {setting: {value: value here}}: what does not fit the world's models, in recipes and ablations.
        pairs: training pairs to draw before the first training; None: they are there. Those of alignments have captions
            of all styles.
        held_out: of drawn pairs, how many more are held out.
        seconds_per_step: of a training on one core, for estimates; None: count FLOP.
        keep_checkpoints: whether a finished training keeps its checkpoints.
        needs: {file or folder: the command that gets it}, what trainings and evaluations read besides benchmarks.
        budget: of a training, in words.
        of_papers: whether data and models are the papers', so that published numbers can be subtracted.
    """

    title: str
    bases: dict[str, Base]
    training: dict[str, Any]
    ablation: dict[str, Any]
    evaluations: dict[str, dict[str, Any]]
    alignment: dict[str, Any] = field(default_factory=dict)
    steps_per_epoch: int | None = None
    substitute: dict[str, dict[Any, Any]] = field(default_factory=dict)
    pairs: int | None = None
    held_out: int = 100
    seconds_per_step: float | None = None
    keep_checkpoints: bool = True
    needs: dict[str, str] = field(default_factory=dict)
    budget: str = ""
    of_papers: bool = False


def training_settings(world: World, model: Model) -> dict[str, Any]:
    """Settings of a model's `train`, without data where the world draws them."""
    settings = world.training | (model.training or {})
    drawn = ("data", "images", "validation") if world.pairs is not None else ()
    return {name: value for name, value in settings.items() if name not in drawn}


def fill(value: Any, root: Path, seed: int) -> Any:
    """`value` with {root} and {seed} replaced, if it is text."""
    return value.replace("{root}", str(root)).replace("{seed}", str(seed)) if isinstance(value, str) else value


def ablation_settings(world: World, model: Model) -> dict[str, Any]:
    """Settings of a model's `ablate`, those that do not fit the world's models replaced."""
    settings = world.ablation | (model.ablation or {})
    return {name: world.substitute.get(name, {}).get(value, value) for name, value in settings.items()}


def describe(model: Model) -> str:
    """A model's settings in a few words."""
    words = [model.base]
    for settings in (model.training, model.ablation, model.alignment):
        if settings is not None:
            words.append(", ".join(f"{name} {value}" for name, value in settings.items()) or "defaults")
    return ", ".join(words)


def find_papers(folder: str) -> Path:
    """The folder of the files: `folder`, or the repository's, wherever the command runs.

    Raises:
        UserError: there is none.
    """
    places = [Path(folder)] if folder != ReproduceConfig.papers else [Path(folder), _REPOSITORY]
    for place in places:
        if any(place.glob(f"{WORLD}*.yaml")):
            return place
    raise UserError(
        f"The folder {folder!r} holds no {WORLD}*.yaml. Give research/papers or research/studies as --papers."
    )


def read_tables(folder: Path) -> dict[str, PaperTable]:
    """Every table with a file of settings, by name."""
    names = [file.stem for file in sorted(folder.glob("*.yaml"))]
    tables = [name for name in names if name not in (NOT_HERE, CLAIMS) and not name.startswith(WORLD)]
    return {name: read_yaml(folder / f"{name}.yaml", PaperTable) for name in tables}


def read_absent(folder: Path) -> list[dict[str, str]]:
    """Of tables and figures without settings, "name", "paper" and "title", and the "reason"; studies have none."""
    file = folder / f"{NOT_HERE}.yaml"
    return read_yaml(file, list[dict[str, str]]) if file.is_file() else []


def read_world(folder: Path, name: str) -> World:
    """The world of that name. Raises UserError for an unknown one."""
    files = {file.stem.removeprefix(WORLD): file for file in sorted(folder.glob(f"{WORLD}*.yaml"))}
    return read_yaml(Registry("world", files).find(name), World)


def read_yaml(file: Path, kind: Any) -> Any:
    """The content of a YAML file as `kind`, a dataclass or a list of one.

    Raises:
        UserError: it is no YAML, has an unknown key, lacks one, or a value is of another type.
    """
    try:
        content = yaml.load(read_file(file).decode(), _LOADER)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{str(file)!r} cannot be read as YAML: {reason(error)}.") from error
    return _build(kind, content, str(file))


def _build(kind: Any, value: Any, where: str) -> Any:
    """`value` of YAML with the dataclasses of `kind`, which check their fields; `where` names the place in messages."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    if origin is list and isinstance(value, list):
        return [_build(arguments[0], part, f"{where}[{at}]") for at, part in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _build(arguments[1], part, f"{where}: {key}") for key, part in value.items()}
    return value


def _build_dataclass(kind: type, value: Any, where: str) -> Any:
    hints = get_type_hints(kind)
    allowed = f"Allowed are {', '.join(hints)}."
    if not isinstance(value, dict):
        raise UserError(f"{where} is {value!r}, but must hold keys. {allowed}")
    for key in value:
        Registry(f"key of {where}:", hints).find(key)
    parts = {key: _build(hints[key], part, f"{where}: {key}") for key, part in value.items()}
    try:
        return kind(**parts)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except TypeError as error:  # Python names the missing keys
        raise UserError(f"{where}: {str(error).partition('() ')[2]}. {allowed}") from error
