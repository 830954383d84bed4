"""What trainings cost, and whether data and weights are on this machine. Nothing is downloaded."""

from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from debias_diffusion.data.retrieval_sets import find_root
from debias_diffusion.errors import UserError

from .papers import Base, Column, Model, World, ablation_settings, fill

TFLOPS = 120e12  # FLOP a second of the GPU that hours are counted for: an A100 at two fifths of its bf16 peak
PAIRS_OF_SHAREGPT4V = 1_245_901
_WEIGHT_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin", "model.safetensors", "pytorch_model.bin")


def missing_parts(world: World, root: Path, models: Iterable[Model], columns: Iterable[Column]) -> list[str]:
    """What is not here of the data and weights of these rows and columns, one line each, with how to get it."""
    models = list(models)
    lines = []
    if any(model.training is not None for model in models):
        lines += _missing_files(world, root, world.needs)
    for model in models:
        if model.ablation is not None:
            lines += _missing_data(world, root, ablation_settings(world, model))
    for name in dict.fromkeys(column.evaluation for column in columns):
        lines += _missing_data(world, root, world.evaluations.get(name, {}))
    for name in dict.fromkeys(model.base for model in models):
        if name in world.bases:
            lines += missing_weights(world.bases[name])
    return list(dict.fromkeys(lines))


def _missing_data(world: World, root: Path, settings: dict) -> list[str]:
    lines = []
    for name in _benchmarks(settings):
        try:
            find_root(name, fill(settings.get("root", "{root}"), root, 0))
        except UserError as error:
            lines.append(str(error))
    named = [part for part in settings.values() if isinstance(part, str) and part.startswith("{root}/")]
    return lines + _missing_files(world, root, named)


def _benchmarks(settings: dict) -> list[str]:
    dataset = settings.get("dataset") or []
    return [dataset] if isinstance(dataset, str) else dataset


def _missing_files(world: World, root: Path, places: Iterable[str]) -> list[str]:
    paths = {place: Path(fill(place, root, 0)) for place in places}
    return [
        f"{str(path)!r} is not there. Get it with: {world.needs.get(place, 'see docs/evaluation.md')}"
        for place, path in paths.items()
        if not path.exists()
    ]


def missing_weights(base: Base) -> list[str]:
    """Of weights with a hub repository or a hub id: a line if they are not in the hub's cache of this machine."""
    if base.pretrained is not None and Path(base.pretrained).exists():
        return []
    is_local = ":" in base.model or base.model.startswith("toy/") or Path(base.model).exists()  # ":" ends a reading
    repository = base.weights or (base.model if base.model.count("/") == 1 and not is_local else None)
    name = f"{base.model}:{base.pretrained}" if base.pretrained else base.model
    return _not_cached(repository, name) if repository else []


def _not_cached(repository: str, name: str) -> list[str]:
    if any(isinstance(try_to_load_from_cache(repository, file), str) for file in _WEIGHT_FILES):
        return []
    return [f"The weights {name} are not in the hub's cache. Get them with: hf download {repository}"]


def gpu_hours(model: Model, world: World) -> float:
    """Of one training on ShareGPT4V, by count."""
    if model.training is None or model.base not in world.bases:
        return 0.0
    pairs = PAIRS_OF_SHAREGPT4V * (model.training.get("epochs") or world.training.get("epochs", 3))
    return pairs * world.bases[model.base].tflop * 1e12 / TFLOPS / 3600
