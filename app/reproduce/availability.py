"""Whether the data and weights that units need are on this machine, and how to get them. Nothing is downloaded."""

from collections.abc import Iterable
from pathlib import Path

import open_clip
from huggingface_hub import try_to_load_from_cache

from debias_diffusion.data.retrieval_sets import find_root
from debias_diffusion.errors import UserError

from .building import fill
from .papers import Base, Column, Model, World

_WEIGHT_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin", "model.safetensors", "pytorch_model.bin")


def missing_parts(world: World, root: Path, models: Iterable[Model], columns: Iterable[Column]) -> list[str]:
    """What is not here of the data and weights of these rows and columns, one line each, with how to get it."""
    models = list(models)
    lines = []
    if any(model.training is not None for model in models):
        lines += _missing_files(world, root, world.needs)
    if any(model.ablation is not None for model in models):
        lines += _missing_data(world, root, world.ablation)
    for name in dict.fromkeys(column.evaluation for column in columns):
        lines += _missing_data(world, root, world.evaluations.get(name, {}))
    for name in dict.fromkeys(model.base for model in models):
        if name in world.bases:
            lines += missing_weights(world.bases[name])
    return list(dict.fromkeys(lines))


def _missing_data(world: World, root: Path, settings: dict) -> list[str]:
    lines = []
    if settings.get("dataset"):
        try:
            find_root(settings["dataset"], fill(settings.get("root", "{root}"), root, 0))
        except UserError as error:
            lines.append(str(error))
    named = [part for part in settings.values() if isinstance(part, str) and part.startswith("{root}/")]
    return lines + _missing_files(world, root, named)


def _missing_files(world: World, root: Path, places: Iterable[str]) -> list[str]:
    paths = {place: Path(fill(place, root, 0)) for place in places}
    return [
        f"{str(path)!r} is not there. Get it with: {world.needs.get(place, 'see docs/evaluation.md')}"
        for place, path in paths.items()
        if not path.exists()
    ]


def missing_weights(base: Base) -> list[str]:
    """Of weights named by an open_clip tag or a hub id: a line if they are not in the caches of this machine."""
    if base.pretrained is None:
        is_hub_id = base.model.count("/") == 1 and not base.model.startswith("toy/") and not Path(base.model).exists()
        repository = base.model if is_hub_id else None
        return _not_cached(repository, base.model) if repository else []
    if Path(base.pretrained).exists():
        return []
    settings = open_clip.get_pretrained_cfg(base.model, base.pretrained)
    if not settings:
        return [f"open_clip has no weights {base.pretrained!r} of {base.model!r}, and there is no such file."]
    repository, _, _ = settings.get("hf_hub", "").rpartition("/")
    if repository:
        return _not_cached(repository, f"{base.model}:{base.pretrained}")
    file = Path("~/.cache/clip").expanduser() / Path(settings.get("url", "none")).name
    if file.exists():
        return []
    name, address = f"{base.model}:{base.pretrained}", settings.get("url")
    return [f"The weights {name} are not at {str(file)!r}. Get them with: curl -o {file} {address}"]


def _not_cached(repository: str, name: str) -> list[str]:
    if any(isinstance(try_to_load_from_cache(repository, file), str) for file in _WEIGHT_FILES):
        return []
    return [f"The weights {name} are not in the hub's cache. Get them with: hf download {repository}"]
