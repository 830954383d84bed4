"""Repositories of the hub: the commit in use, and the one file of weights of those like Long-CLIP's."""

import os
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, ModelInfo, hf_hub_download

from ..clip.model_files import CONFIG_FILE, HUB_SECONDS, WEIGHT_SUFFIXES, find_cached
from ..errors import UserError, explain_failure
from ..files import path_digest

# What other loaders read, with the configuration beside it: transformers' weights, and open_clip's folder.
_WEIGHTS = [f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json")]
_FOLDERS = {*_WEIGHTS, *(f"text_encoder/{name}" for name in _WEIGHTS), CONFIG_FILE}


def find_hub_file(name: str) -> Path | None:
    """The file of weights of a hub repository that holds nothing else to load, downloaded unless it is cached.

    Args:
        name: owner/name, as "BeichenZhang/LongCLIP-L", whose file is longclip-L.pt.

    Returns:
        The file in the hub's cache; None if the repository has a transformers or open_clip folder, has no weights at
        its root, or can neither be reached nor is cached.

    Raises:
        UserError: it has several files of weights, or its file cannot be downloaded.
    """
    cached = None
    if info := _ask(name):
        names = [file.rfilename for file in info.siblings or []]
    elif cached := find_cached(name):
        names = [file.relative_to(cached).as_posix() for file in cached.rglob("*") if file.is_file()]
    else:
        return None
    files = sorted(file for file in names if "/" not in file and PurePosixPath(file).suffix in WEIGHT_SUFFIXES)
    if not files or _FOLDERS & set(names):
        return None
    if len(files) > 1:
        raise UserError(
            f"The repository {name!r} holds {len(files)} files of weights and no transformers folder: "
            f"{', '.join(files)}. Download one, for example `hf download {name} {files[0]}`, and give the path that "
            "this prints."
        )
    if cached:
        return cached / files[0]
    with explain_failure(f"{files[0]!r} of the repository {name!r} cannot be downloaded"):
        return Path(hf_hub_download(name, files[0]))


def place_digest(place: str) -> str:
    """sha256 of a file's or folder's contents; of a hub id, owner/name, the commit after it."""
    return path_digest(place) if os.path.exists(place) else f"{place}@{find_commit(place.removeprefix('hf-hub:'))}"


def find_commit(name: str) -> str:
    """The commit of a repository (owner/name, or owner/name@revision) that is cached, else its newest; "" if unknown.

    Before a download and after it the answer is the same.
    """
    name, _, revision = name.partition("@")
    if cached := find_cached(name, revision or None):
        return cached.name
    info = _ask(name, revision or None)
    return info.sha or "" if info else ""


def _ask(name: str, revision: str | None = None) -> ModelInfo | None:
    """What the hub says of a repository; None without a network, such a repository or the right to read it."""
    try:  # list_repo_files tries for 24 seconds without a network
        return HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS)
    except Exception:
        return None
