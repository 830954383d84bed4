"""Files and folders that a kill leaves whole or not at all, locks, and digests."""

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import psutil
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from .errors import UserError, reason

MACHINE = platform.node()[:32].replace(os.sep, "-")  # machines may share folders
# What a process is writing (`.tmp`), and the folder that it replaces (`.old`): a name that nobody else gives.
_UNFINISHED = re.compile(r"\.([0-9a-f]{16})\.(.+)-(\d{1,9})\.(tmp|old)", re.DOTALL)


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Opens a regular file for reading; follows links, never blocks on a FIFO. Raises OSError for anything else."""
    at_once = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)  # Windows has neither
    file = open(path, "rb", opener=lambda path, flags: os.open(path, flags | at_once))  # noqa: SIM115 (returned open)
    # Checked on the open file, because another one may have replaced it at `path` in the meantime.
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EPERM, "not a regular file, but a FIFO or device", os.fspath(path))
    return file


def read_file(path: str | os.PathLike) -> bytes:
    """The content of a regular file. Raises OSError as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def bytes_digest(parts: Iterable) -> str:
    """sha256, in hexadecimal, of bytes (or memory that holds them), one part after the other."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()


def sha256(path: str | os.PathLike) -> str:
    """sha256, in hexadecimal, of a file."""
    with open_regular(path) as file:
        return bytes_digest(iter(lambda: file.read(1 << 20), b""))


def path_digest(path: str | os.PathLike) -> str:
    """sha256, in hexadecimal, of a file, or of the names and contents of a folder's files, except hidden ones."""
    path = Path(path)
    if not path.is_dir():
        return sha256(path)
    files = [(name, path / name) for name in visible_files(path, follow_links=True)]
    return bytes_digest(f"{name}\0{sha256(file)}\n".encode() for name, file in files)


def visible_files(root: Path, follow_links: bool = False) -> list[str]:
    """The files in a folder and its subfolders, as posix paths relative to it, sorted; hidden ones are left out.

    Args:
        follow_links: also into folders that are links, as caches of a hub have; a link back up is left out.

    Raises:
        OSError: a folder cannot be read.
    """

    def refuse(error: OSError):
        raise error

    found: list[str] = []
    for place, folders, names in os.walk(root, onerror=refuse, followlinks=follow_links):
        folder = Path(place)
        above = [path.resolve() for path in (folder, *folder.parents)] if follow_links else ()
        folders[:] = [name for name in folders if name[0] != "." and (folder / name).resolve() not in above]
        files = (folder / name for name in names if name[0] != "." and (folder / name).is_file())
        found += [file.relative_to(root).as_posix() for file in files]
    return sorted(found)


def json_digest(values: dict) -> str:
    """sha256, in hexadecimal, of JSON values in any order."""
    return bytes_digest([json.dumps(values, sort_keys=True).encode()])


def with_checksum(values: dict) -> dict:
    """JSON values with a checksum of them, as "sha256"."""
    return values | {"sha256": json_digest(values)}


def read_checked(path: str | os.PathLike) -> dict | None:
    """The values in a file of `with_checksum`; None if it is not there, was changed or is damaged."""
    values = read_json_object(path)
    checksum = values.pop("sha256", None)
    return values if checksum == json_digest(values) else None


def file_stamp(path: str | os.PathLike) -> tuple[int, int, int]:
    """What changes whenever a file does: its size, and the times when its content and anything of it last changed.

    Copies and changed permissions have another one, too: where stamps differ, contents decide. Raises OSError.
    """
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def read_json(path: str | os.PathLike, shape: type = dict, advice: str = "") -> Any:
    """The content of a JSON file. Raises UserError, which ends with `advice`, if it holds nothing of type `shape`."""
    try:
        content = json.loads(read_file(path).decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r} cannot be read as JSON: {reason(error)}. {advice}".rstrip()) from error
    if not isinstance(content, shape):
        kinds = f"a {type(content).__name__}, not a {shape.__name__}"
        raise UserError(f"{str(path)!r} holds {kinds}. {advice}".rstrip())
    return content


def read_json_object(path: str | os.PathLike) -> dict:
    """The JSON object in a file; empty if there is no readable one."""
    try:
        return read_json(path)
    except UserError:
        return {}


def write_json(path: str | os.PathLike, content) -> None:
    """Writes JSON. A kill leaves the old file or the new one. Raises ValueError for NaN and infinities."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes `text` to `path` as UTF-8. A kill leaves the old file or the new one, never half of one."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def atomic_file(path: str | os.PathLike) -> AbstractContextManager[Path]:
    """Gives a temporary path for a file, which replaces `path` once it is complete and on the disk.

    After a failure or a kill `path` is as it was. A link or FIFO at `path` is replaced, and never written through. The
    first write to a folder removes what killed processes left there. Raises UserError for a folder in its place.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _recover_once(path.parent.absolute())
    if path.is_dir() and not path.is_symlink():
        raise UserError(f"{str(path)!r} is a folder, in the place of a file. Move it away, or give another place.")
    return replacing(path.parent, path.name)


@contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Gives a temporary folder to fill, which replaces `path`, or what that links to, once it is complete and on the
    disk.

    After a failure `path` is as it was. After a kill between the two renames the next call puts the old folder back.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path.parent, [path.name])
    with replacing(path.parent, path.name) as temporary:
        temporary.mkdir()
        yield temporary


@contextmanager
def replacing(folder: Path, name: str, record: Callable[[Path], None] = lambda temporary: None) -> Iterator[Path]:
    """Gives a temporary path in `folder` for a file or a folder, which replaces `folder / name` once it is on the disk.

    Args:
        record: is called when it is on the disk, and before it has its name.
    """
    path, (temporary, old) = folder / name, (unfinished(folder, name, kind) for kind in ("tmp", "old"))
    remove_path(temporary)
    try:
        yield temporary
        for part in (*temporary.rglob("*"), temporary):
            _sync(part)
        record(temporary)
        path.parent.mkdir(parents=True, exist_ok=True)
        if temporary.is_dir() or path.is_dir():  # only a file replaces a file in one step
            remove_path(old)
            with suppress(FileNotFoundError):
                os.replace(path, old)
        os.replace(temporary, path)
        if os.path.lexists(old):
            _sync(path.parent)  # else a power failure could undo the renames, and not the removal
            remove_path(old)
    finally:
        remove_path(temporary)


def unfinished(folder: Path, name: str, kind: str) -> Path:
    """Where this process writes `name` before it is complete ("tmp"), or keeps the folder that it replaces ("old")."""
    return folder / f".{short_digest(name)}.{MACHINE}-{os.getpid()}.{kind}"


def short_digest(name: str) -> str:
    """Of a name of any length, what fits into the name of a file."""
    return bytes_digest([os.fsencode(name)])[:16]


def recover(folder: Path, names: Iterable[str] = (), alone: bool = False) -> None:
    """Puts back folders of these names that ended processes were replacing, and removes what they were writing.

    Args:
        alone: whether nobody else writes there. Otherwise what living processes and other machines write is left.
    """
    name_of = {short_digest(name): name for name in names}
    for match in filter(None, map(_UNFINISHED.fullmatch, os.listdir(folder))):
        digest, machine, process, kind = match.groups()
        name = name_of.get(digest)
        if not alone and (machine != MACHINE or psutil.pid_exists(int(process))):
            continue
        if kind == "tmp" or (name and os.path.lexists(folder / name)):
            remove_path(folder / match[0])
        elif name:
            os.replace(folder / match[0], folder / name)


# Once a process, because listing a folder of many images before each write would be quadratic.
_recover_once = lru_cache(maxsize=1024)(recover)


def append(path: Path, line: str, sync: bool = False) -> None:
    """Adds a line to a file, which is made if there is none. A line that a kill cut short is ended first.

    `sync`: on the disk when this returns. Raises UserError for a link, and for what is no regular file.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"{str(path)!r} is no regular file. Nothing is written through it: remove it.")
    with open(path, "ab+") as file:
        if file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            line = f"\n{line}"
        file.write(f"{line}\n".encode())
        file.flush()
        if sync:
            os.fsync(file.fileno())


def remove_path(path: Path) -> None:
    """Removes a file or a folder, or a link but not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Waits until a file, or the list of a folder's files, is on the disk."""
    on_windows = sys.platform == "win32"  # which opens no folder for this, and no file to read alone
    if on_windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if on_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def file_lock(file: Path) -> Iterator[bool]:
    """Takes a lock, if no other process has it: whether it did. Raises UserError for a link, which would be emptied."""
    if file.is_symlink():
        raise UserError(f"The lock {str(file)!r} is a link. Remove it, or give another folder.")
    lock = FileLock(file, timeout=0)
    with suppress(Timeout):
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()


@contextmanager
def folder_lock(folder: str | os.PathLike) -> Iterator[None]:
    """Within the context, no other process works in a folder. Raises UserError if one does."""
    with file_lock(Path(folder, ".lock")) as is_free:
        if not is_free:
            raise UserError(f"Another process works in {str(folder)!r}. Wait for it, or give another folder.")
        yield


@contextmanager
def explain_full_disk() -> Iterator[None]:
    """Turns a full disk into a UserError that says what is safe and what to do."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        in_words = re.search(r"os error (\d+)", str(error))  # safetensors has no errno
        torchs = getattr(error.__context__, "errno", None)  # torch raises a RuntimeError while it handles the first one
        number = getattr(error, "errno", None) or torchs or (in_words and int(in_words[1]))
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"No space left on the disk ({error}). Everything completed before is unharmed: make room and start "
                "the same command again."
            ) from error
        raise
