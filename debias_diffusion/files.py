"""Files that are either whole or not there."""

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import psutil
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from .errors import UserError

_MACHINE = platform.node()[:32].replace(os.sep, "-")  # folders may be shared by several
_LONGEST_NAME = 255  # bytes of a file's name, on every common file system


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Opens a regular file for reading; links are followed. Never waits, as `open` does for a FIFO.

    Raises:
        OSError: it cannot be opened, or is a folder, FIFO, device or socket.
    """
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 (it is handed back open)
    # Asked of what is open, because another file may have taken its place at `path` in the meantime.
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file, but a FIFO or device", os.fspath(path))
    return file


def _open_at_once(path: str, flags: int) -> int:
    # `open` has set O_CLOEXEC already. Not every system has the others.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def sha256(path: str | os.PathLike) -> str:
    """A file's sha256, in hexadecimal."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            total.update(chunk)
    return total.hexdigest()


def path_digest(path: str | os.PathLike) -> str:
    """sha256, in hexadecimal, of a file, or of the names and contents of a folder's files, except hidden ones."""
    path = Path(path)
    if path.is_file():
        return sha256(path)
    total = hashlib.sha256()
    for name, file in sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*")):
        if file.is_file() and not re.search(r"(^|/)\.", name):
            total.update(f"{name}\0{sha256(file)}\n".encode())
    return total.hexdigest()


def write_json(path: str | os.PathLike, content) -> None:
    """Writes `content` to `path` so that a killed run leaves the old file or the new one, never half of one.

    Raises:
        ValueError: `content` holds NaN or an infinity, which JSON does not have.
    """
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes `text` to `path` as UTF-8, so that a killed run leaves the old file or the new one, never half of one."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A file to write, which takes its place at `path` only when it is complete and on the disk.

    After a failure or a kill `path` is as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    temporary = hidden_beside(path, f".{_MACHINE}-{os.getpid()}.tmp")
    new_file(temporary).close()
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_leftovers(path: Path) -> None:
    """Removes what killed processes of this machine left of `path`. Other processes may be writing it right now."""
    beginning = hidden_beside(path, f".{_MACHINE}-").name
    for name in os.listdir(path.parent):
        process = name.removeprefix(beginning).removesuffix(".tmp")
        if name == f"{beginning}{process}.tmp" and process.isdecimal() and not psutil.pid_exists(int(process[:9])):
            path.with_name(name).unlink(missing_ok=True)


def hidden_beside(path: Path, suffix: str) -> Path:
    """The hidden file `.NAME.SUFFIX` beside `path`, with a digest for a name that leaves no room for the suffix."""
    name = f".{path.name}{suffix}"
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:32]}{suffix}"
    return path.with_name(name)


def new_file(path: Path) -> BinaryIO:
    """Opens a file to write that is not there yet.

    What stands in its place, as a killed run leaves it, is removed first. It is never written through: a symbolic link
    of a name that can be guessed would lead to any file.
    """
    path.unlink(missing_ok=True)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666), "wb")


def read_json_object(path: str | os.PathLike) -> dict:
    """A JSON object; empty where there is none that can be read."""
    try:
        with open_regular(path) as file:
            content = json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def json_digest(values: dict) -> str:
    """sha256, in hexadecimal, of JSON values, whatever their order, but for one that is called "sha256" itself."""
    values = {name: value for name, value in values.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def changed_settings(before: dict, now: dict) -> str:
    """The settings that differ, by name, in words: "size was 256, now 384; ..."."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return "; ".join(f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in names)


@contextmanager
def held(folder: Path, by_another: str) -> Iterator[None]:
    """Holds a folder for this process alone.

    Raises:
        UserError: another process holds it; `by_another` is what to say then. Or its lock is no file of ours.
    """
    file = folder / ".lock"
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise UserError(f"The lock {str(file)!r} is no regular file. Remove it, or give another folder.")
    lock = FileLock(file, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(by_another) from None
    except OSError as error:
        raise UserError(
            f"The lock {str(file)!r} cannot be taken ({error.strerror}). Remove it, or give another folder."
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def whole_folder(path: str | os.PathLike) -> Iterator[Path]:
    """A folder to fill, which takes its place at `path` only when it is complete and on the disk.

    What stood at `path` before is replaced. After a failure `path` is as it was; after a kill between the two renames
    `restore_folder` puts the old one back.
    """
    path = Path(path)
    restore_folder(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = _unfinished(path), _old(path)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _sync(file)
        if path.exists():
            os.replace(path, old)
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        _remove(temporary)
        _remove(old)


def _remove(path: Path) -> None:
    """Removes a folder; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _old(path: Path) -> Path:
    return hidden_beside(path, ".old")


def _unfinished(path: Path) -> Path:
    return hidden_beside(path, ".tmp")


def restore_folder(path: str | os.PathLike) -> None:
    """Mends what a kill in `whole_folder` left, while nobody else writes there.

    The old folder is put back if it was moved away and the new one had not taken its place; what was unfinished goes.
    """
    path = Path(path)
    if _old(path).exists() and not path.exists():
        os.replace(_old(path), path)
    for leftover in (_unfinished(path), _old(path)):
        _remove(leftover)


def remove_folder(path: str | os.PathLike) -> None:
    """Removes a folder that `whole_folder` has made; a kill leaves all or nothing of it at `path`."""
    path = Path(path)
    os.replace(path, _unfinished(path))
    shutil.rmtree(_unfinished(path))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explain_full_disk() -> Iterator[None]:
    """Turns a full disk, or a limit on files' sizes, into a UserError that says what is safe and what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors tells an operating system's error only in words
        told = re.search(r"os error (\d+)", str(error))
        number = getattr(error, "errno", None) or (told and int(told[1]))
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"No space left on the disk ({error}). What was complete before is unharmed: make room and start the "
                "same command again."
            ) from error
        if number == errno.EFBIG:
            raise UserError(
                f"A file would have become larger than allowed ({error}). What was complete before is unharmed: raise "
                "the limit on the size of files (`ulimit -f unlimited`), or take a file system without one, and start "
                "the same command again."
            ) from error
        raise
