"""Models in folders and in repositories of the hub: their files, their commits, and what transformers loads of them.

A location is a folder or file here, or a hub id: owner/name, or owner/name@revision.
"""

import os
import re
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from huggingface_hub import HfApi, ModelInfo, hf_hub_download, snapshot_download
from transformers.utils import cached_file

from ..clip.weight_files import (
    CONFIG_FILE,
    FG_CLIPS,
    check_finite,
    check_fit,
    fold_fg_clip,
    read_state,
    tensor_shapes,
)
from ..errors import UserError, quiet_logging
from ..files import path_digest
from .resolve import may_be_hub_id

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel

_Model = TypeVar("_Model", bound="PreTrainedModel")

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
# What other loaders read, with the configuration beside it: transformers' weights, and open_clip's folder.
_FOLDERS = re.compile(rf"(text_encoder/)?(model\.safetensors|pytorch_model\.bin)(\.index\.json)?|{CONFIG_FILE}")

# Tensors that a model may leave out: buffers that transformers before 4.31 saved; and, where one tower is read, what
# belongs to the other or to both: of CLIPModel and SigLIP, of FG-CLIP's losses on regions (its modeling_clip.py), and
# the head of an image classifier.
_BUFFERS = re.compile(r"embeddings\.position_ids$")
_OF_OTHERS = re.compile(
    r"vision_model\.|(visual|text|text_filip)_projection\.|logit_(scale|bias)|classifier\.|pooler\."
)


def from_pretrained(cls: Any, location: str, **options) -> Any:
    """`cls.from_pretrained` of a folder or of a hub id, with its revision if it names one.

    Raises ValueError if nothing of a repository is cached or may be downloaded.
    """
    place, revision = locate(location)
    return cls.from_pretrained(place, **({"revision": revision} if revision else {}), **options)


def find_file(location: str, name: str, subfolder: str = "") -> Path | None:
    """A file of a folder or of a repository of the hub, downloaded; None if it is missing.

    Raises ValueError if nothing of the repository can be had.
    """
    place, revision = locate(location)
    file = cached_file(
        place,
        name,
        subfolder=subfolder,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(file) if file else None


def find_tokenizer(folder: Path, *places: Path) -> Path:
    """The first of the places with a tokenizer. Raises UserError, which names the folder, if there is none."""
    for place in places:
        if (place / "tokenizer_config.json").is_file():
            return place
    raise UserError(f"{os.fspath(folder)!r} holds no tokenizer (tokenizer/tokenizer_config.json).")


def locate(location: str) -> tuple[str, str | None]:
    """What libraries are given: (folder or file, None), or (a repository's name, its revision).

    If the hub is out of reach, the folder in its cache: by a repository's name libraries ask for each file that is
    missing, or may be newer, and without a network for 24 seconds.

    Raises:
        ValueError: it is neither here, nor a hub id of which something is cached or may be downloaded.
    """
    return (location, None) if os.path.exists(location) else _repository(location)[:2]


@cache  # of repositories without a problem: an error is not kept
def _repository(location: str) -> tuple[str, str | None, list[str]]:
    """What `locate` gives of a hub id, and the names of the repository's files."""
    name, _, revision = location.partition("@")
    if not may_be_hub_id(name):
        raise ValueError("it is not there")
    if info := _ask(location):
        return name, revision or None, [file.rfilename for file in info.siblings or []]
    if cached := _find_cached(location):
        return str(cached), None, [file.relative_to(cached).as_posix() for file in cached.rglob("*") if file.is_file()]
    raise ValueError(
        "nothing of it is in the hub's cache, and the hub cannot be reached, or has no such model that you may read "
        "(`hf auth login`)"
    )


def _find_cached(location: str) -> Path | None:
    """The folder of a repository in the hub's cache, whose name is the commit; None if nothing of it is cached."""
    name, _, revision = location.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except Exception:  # nothing is cached, or it is no name of a repository
        return None


def _ask(location: str) -> ModelInfo | None:
    """What the hub says of a repository; None without a network, such a repository or the right to read it."""
    name, _, revision = location.partition("@")
    try:  # list_repo_files tries for 24 seconds without a network; huggingface_hub waits 10 for a file
        return HfApi().model_info(name, revision=revision or None, timeout=10)
    except Exception:
        return None


def location_digest(location: str) -> str:
    """sha256 of a file's or folder's contents; of a hub id its commit after it, the same before and after a download.

    The commit is the one that is cached, else the newest; "" if unknown.
    """
    if os.path.exists(location):
        return path_digest(location)
    hub_id = location.removeprefix("hf-hub:")
    if cached := _find_cached(hub_id):
        return f"{location}@{cached.name}"
    return f"{location}@{getattr(_ask(hub_id), 'sha', None) or ''}"


def find_hub_file(location: str) -> Path | None:
    """The file of weights of a hub repository that holds nothing else to load, such as Long-CLIP's, downloaded.

    None if the repository has a transformers or open_clip folder, or no weights at its root.
    """
    place, revision, names = _repository(location)
    files = sorted(file for file in names if "/" not in file and PurePosixPath(file).suffix in _SUFFIXES)
    if not files or any(map(_FOLDERS.fullmatch, names)):
        return None
    if len(files) > 1:
        name = location.partition("@")[0]
        raise UserError(
            f"The repository {name!r} holds {len(files)} files of weights and no transformers folder: "
            f"{', '.join(files)}. Download one, for example `hf download {name} {files[0]}`, and give the path that "
            "this prints."
        )
    if os.path.isdir(place):
        return Path(place, files[0])
    return Path(hf_hub_download(place, files[0], revision=revision))


def load_pretrained(cls: type[_Model], location: str, label: str, **options) -> _Model:
    """`from_pretrained`, in eval mode, with every weight from the files, but for a pooler's.

    Raises:
        UserError: weights are missing, of other sizes, or not finite; `label` is the model in words. Errors of
            transformers for broken files pass through.
    """
    how: Any = {"output_loading_info": True, "ignore_mismatched_sizes": True, **options}
    file = find_file(location, "model.safetensors", options.get("subfolder", ""))
    with quiet_logging():
        if file and any(name.endswith(FG_CLIPS) for name in tensor_shapes(file)):
            state = fold_fg_clip(read_state(file))
            model, info = cls.from_pretrained(None, **how, state_dict=state)
        else:
            model, info = from_pretrained(cls, location, **how)
    wrong = [f"{part[0]} is {tuple(part[1])}, not {tuple(part[2])}" for part in info["mismatched_keys"]]
    parts = {name.partition(".")[0] for name in model.state_dict()}  # in which each tensor must have its place
    wrong += [
        f"{name} has no place in it"
        for name in sorted(info["unexpected_keys"])
        if not (_BUFFERS.search(name) or (_OF_OTHERS.match(name) and name.partition(".")[0] not in parts))
    ]
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("pooler."))
    check_fit(missing, wrong, label)
    check_finite(model.state_dict().items(), label)
    for weight in model.parameters():  # where they lie in a file's memory map decides the last bits of sums
        weight.data = weight.data.clone()
    return model.eval()
