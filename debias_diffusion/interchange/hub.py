"""Repositories of the hub: the commit in use, and the one file of weights of those like Long-CLIP's."""

from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, hf_hub_download, snapshot_download

from ..errors import UserError
from ..models.model_files import CONFIG_FILE, explain_failure
from .transformers_folder import WEIGHTS_FILES

_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_SECONDS = 10  # to wait for an answer, as huggingface_hub waits for the files themselves
# What other loaders read, with the configuration beside it.
_FOLDERS = {*WEIGHTS_FILES, *(f"text_encoder/{name}" for name in WEIGHTS_FILES), CONFIG_FILE}


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
    names, cached = _list_files(name)
    files = [file for file in names if "/" not in file and PurePosixPath(file).suffix in _SUFFIXES]
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


def find_commit(name: str) -> str:
    """The commit of a repository (owner/name, or owner/name@revision) that is cached, else its newest; "" if unknown.

    Before a download and after it the answer is the same.
    """
    name, revision, *_ = *name.split("@"), None
    if cached := _find_cached(name, revision):
        return cached.name
    try:
        return HfApi().model_info(name, revision=revision, timeout=_SECONDS).sha or ""
    except Exception:  # no network, no such repository, no right to read it: loading says so
        return ""


def _list_files(name: str) -> tuple[list[str], Path | None]:
    """(the paths in a repository, sorted; None), or without the hub (those in the cache, their folder)."""
    try:
        # not list_repo_files, which without a network tries for 24 seconds
        siblings = HfApi().model_info(name, timeout=_SECONDS).siblings or []
        return sorted(file.rfilename for file in siblings), None
    except Exception:  # no network, no such repository, no right to read it: what is cached decides
        folder = _find_cached(name)
    files = folder.rglob("*") if folder else ()
    return sorted(file.relative_to(folder).as_posix() for file in files if file.is_file()), folder


def _find_cached(name: str, revision: str | None = None) -> Path | None:
    """The folder of a repository in the hub's cache, whose name is the commit; None if nothing of it is cached."""
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # nothing is cached, or it is no name of a repository
        return None
