"""Whether a command may write into a folder.

Folders that are replaced as a whole hold a mark that names their files with their digests.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from debias_diffusion.errors import UserError
from debias_diffusion.files import atomic_folder, read_json_object, sha256, write_json
from debias_diffusion.jobs import JOB

MARK = ".debias-diffusion.json"
_LEFT_BY_OTHERS = {MARK, "__pycache__", ".cache", ".DS_Store"}  # by Python, the hub's library and a desktop


def check_free(folder: Path) -> None:
    """Raises UserError, or OSError for a file, unless a folder is new, empty, or a job's, but for hidden files."""
    used = folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir())
    if used and not (folder / JOB).is_file():
        raise UserError(f"The output {str(folder)!r} exists and holds something else. Give a new folder.")


def check_replaceable(folder: Path, command: str) -> None:
    """Raises UserError unless nothing is there, or only files that `command` wrote and nobody changed."""
    if folder.is_file():
        raise UserError(f"The output {str(folder)!r} is a file. Give a new folder.")
    mark = read_json_object(folder / MARK)
    is_ours = mark.get("command") == command
    digests = _digests(folder, _LEFT_BY_OTHERS if is_ours else set())
    for name, digest in digests.items():
        if not is_ours or mark["files"].get(name) != digest:
            raise UserError(
                f"The output {str(folder)!r} would be replaced, but holds {name!r}, which `{command}` did not write or "
                "which was changed since. Move it away, or give a new folder."
            )


@contextmanager
def written_folder(path: Path, command: str) -> Iterator[Path]:
    """Gives a temporary folder to fill, which replaces `path`, marked, once it is complete; see `check_replaceable`."""
    with atomic_folder(path) as folder:
        yield folder
        write_json(folder / MARK, {"command": command, "files": _digests(folder, _LEFT_BY_OTHERS)})
        check_replaceable(path, command)


def _digests(folder: Path, left_out: set[str]) -> dict[str, str]:
    """By path in the folder, sha256 of each file; "" for a link and what is no file."""
    return {
        path.relative_to(folder).as_posix(): sha256(path) if path.is_file() and not path.is_symlink() else ""
        for path in sorted(folder.rglob("*"))
        if not left_out & set(path.relative_to(folder).parts) and (path.is_symlink() or not path.is_dir())
    }
