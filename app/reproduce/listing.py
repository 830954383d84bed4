"""`reproduce`, and its list of tables: what each costs, and whether data and weights are here; no large library."""

from collections.abc import Collection, Iterable
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from debias_diffusion.data.retrieval_sets import find_root
from debias_diffusion.errors import UserError

from ..options import ReproduceConfig
from . import papers
from .papers import Base, Column, Model, World, fill

TFLOPS = 120e12  # FLOP a second of the GPU that hours are counted for: an A100 at two fifths of its bf16 peak
PAIRS_OF_SHAREGPT4V = 1_245_901
_WEIGHT_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin", "model.safetensors", "pytorch_model.bin")


def reproduce(config: ReproduceConfig) -> list[Path]:
    """Lists tables, or trains and evaluates what is missing and writes tables. Returns the files written.

    Raises:
        UserError: a name is unknown, a setting cannot be used, or data or weights are missing.
    """
    if config.list:
        print(list_tables(config))
        return []
    from .command import Reproduction  # imports what takes seconds

    return Reproduction(config).run()


def list_tables(config: ReproduceConfig) -> str:
    """Every table and figure, what it needs, and whether that is here."""
    folder = papers.find_papers(config.papers)
    world, lines = papers.read_world(folder, config.world), []
    for name, table in sorted(papers.read_tables(folder).items(), key=lambda pair: (pair[1].paper, pair[0])):
        models = table.rows.values()
        missing = missing_parts(world, Path(config.root), models, table.columns.values())
        hours = sum({papers.describe(model): gpu_hours(model, world) for model in models}.values())
        needs = f"{hours:.0f} GPU hours" if hours else ("no training" if not world.pairs else "toy")
        state = f"missing {len(missing)}: {missing[0]}" if missing else "here"
        lines.append(f"{name:22}  {table.paper:12}  {needs:14}  {table.title}\n{'':24}{state}")
    form = "{name:22}  {paper:12}                  {title}\n                        not here: {reason}"
    lines += [form.format(**absent) for absent in papers.read_absent(folder)]
    return "\n".join(lines)


def gpu_hours(model: Model, world: World) -> float:
    """Of one training on ShareGPT4V, by count."""
    if model.training is None or model.base not in world.bases:
        return 0.0
    pairs = PAIRS_OF_SHAREGPT4V * (model.training.get("epochs") or world.training.get("epochs", 3))
    return pairs * world.bases[model.base].tflop * 1e12 / TFLOPS / 3600


def missing_parts(world: World, root: Path, models: Collection[Model], columns: Iterable[Column]) -> list[str]:
    """What is not here of the data and weights of these rows and columns, one line each, with how to get it."""
    settings = [papers.ablation_settings(world, model) for model in models if model.ablation is not None]
    settings += [world.alignment | model.alignment for model in models if model.alignment is not None]
    settings += [world.evaluations.get(column.evaluation, {}) for column in columns]
    bases = [world.bases[model.base] for model in models if model.base in world.bases]
    lines, benchmarks, places = [], [], [base.model for base in bases]
    places += world.needs if any(model.training is not None for model in models) else ()
    for given in settings:
        dataset = given.get("dataset") or []
        for name in [dataset] if isinstance(dataset, str) else dataset:
            try:
                find_root(name, fill(given.get("root", "{root}"), root, 0))
            except UserError as error:
                benchmarks.append(str(error))
        places += [part for part in given.values() if isinstance(part, str)]
    for place in places:
        path = Path(fill(place, root, 0))
        if place.startswith("{root}/") and not path.exists():
            lines.append(f"{str(path)!r} is not there. Get it with: {world.needs.get(place, 'see docs/evaluation.md')}")
    weights = [line for base in bases for line in missing_weights(base)]
    return list(dict.fromkeys(lines + benchmarks + weights))


def missing_weights(base: Base) -> list[str]:
    """Of weights with a hub repository or a hub id: a line if they are not in the hub's cache of this machine."""
    if base.pretrained is not None and Path(base.pretrained).exists():
        return []
    is_local = base.model.startswith(("toy/", "{root}/")) or ":" in base.model or Path(base.model).exists()
    repository = base.weights or (base.model if base.model.count("/") == 1 and not is_local else None)
    if not repository or any(isinstance(try_to_load_from_cache(repository, file), str) for file in _WEIGHT_FILES):
        return []
    name = f"{base.model}:{base.pretrained}" if base.pretrained else base.model
    return [f"The weights {name} are not in the hub's cache. Get them with: hf download {repository}"]
