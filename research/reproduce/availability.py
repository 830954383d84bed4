"""What tables cost, and whether their data and weights are on this machine."""

from collections.abc import Collection, Iterable
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from debias_diffusion.errors import UserError
from debias_diffusion.eval.retrieval_sets import find_root

from .papers import Base, Column, Model, World, ablation_settings, fill, training_settings

TFLOPS = 120e12  # FLOP a second of the GPU that hours are counted for: an A100 at two fifths of its bf16 peak
PAIRS_OF_SHAREGPT4V = 1_245_901
_WEIGHT_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin", "model.safetensors", "pytorch_model.bin")


def gpu_hours(model: Model, world: World) -> float:
    """Of one training on ShareGPT4V, by count; other data are small."""
    if "data" in (model.training or {"data": None}) or model.base not in world.bases:
        return 0.0
    pairs = PAIRS_OF_SHAREGPT4V * (model.training.get("epochs") or world.training.get("epochs", 3))
    return pairs * world.bases[model.base].tflop * 1e12 / TFLOPS / 3600


def missing_parts(world: World, root: Path, models: Collection[Model], columns: Iterable[Column]) -> list[str]:
    """What is not here of the data and weights of these rows and columns, one line each, with how to get it."""
    settings = [ablation_settings(world, model) for model in models if model.ablation is not None]
    settings += [world.alignment | model.alignment for model in models if model.alignment is not None]
    settings += [training_settings(world, model) for model in models if model.training is not None]
    settings += [world.evaluations.get(column.evaluation, {}) for column in columns]
    bases = [world.bases[model.base] for model in models if model.base in world.bases]
    lines, benchmarks, places = [], [], [place for base in bases for place in (base.model, base.pretrained) if place]
    for given in settings:
        dataset = given.get("dataset") if given.get("kind") != "classification" else None
        for name in [dataset] if isinstance(dataset, str) else dataset or ():
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
