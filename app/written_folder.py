"""Folders that a command writes and may replace: a mark in each names its files with their digests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from debias_diffusion.errors import UserError
from debias_diffusion.files import atomic_folder, read_json_object, sha256, write_json

MARK = ".debias-diffusion.json"
_LEFT_BY_OTHERS = {MARK, "__pycache__", ".cache", ".DS_Store"}  # by Python, the hub's library and a desktop


def check_replaceable(folder: Path, command: str) -> None:
    """Raises UserError unless nothing is there, or only files that `command` wrote and nobody changed."""
    if folder.is_file():
        raise UserError(f"The output {str(folder)!r} is a file. Give a new folder.")
    mark = read_json_object(folder / MARK)
    files = mark.get("files", {}) if mark.get("command") == command else {}
    for name, digest in _digests(folder).items():
        if files.get(name) != digest:
            raise UserError(
                f"The output {str(folder)!r} would be replaced, but holds {name!r}, which `{command}` did not write or "
                "which was changed since. Move it away, or give a new folder."
            )


@contextmanager
def written_folder(path: Path, command: str) -> Iterator[Path]:
    """Gives a temporary folder to fill, which replaces `path`, marked, once it is complete; see `check_replaceable`."""
    with atomic_folder(path) as folder:
        yield folder
        write_json(folder / MARK, {"command": command, "files": _digests(folder)})


def _digests(folder: Path) -> dict[str, str]:
    """By path in the folder, sha256 of each file; "" for a link and what is no file."""
    return {
        path.relative_to(folder).as_posix(): sha256(path) if path.is_file() and not path.is_symlink() else ""
        for path in sorted(folder.rglob("*"))
        if not _LEFT_BY_OTHERS & set(path.relative_to(folder).parts) and (path.is_symlink() or not path.is_dir())
    }
