"""Files and folders that a kill leaves whole or not at all, locks, and digests."""

import errno
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import psutil
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from .errors import UserError

MACHINE = platform.node()[:32].replace(os.sep, "-")  # machines may share folders
_TEMPORARY = re.compile(rf"\..+\.{re.escape(MACHINE)}-(\d+)\.tmp", re.DOTALL)  # a file that `atomic_file` is writing
_MARK = ".debias-diffusion"  # of a folder that `atomic_folder` writes
_LONGEST_NAME = 255  # bytes of a file's name, on every common file system


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Opens a regular file for reading. Follows links, and never blocks, as `open` does on a FIFO.

    Raises:
        OSError: the file cannot be opened, or is a folder, FIFO, device or socket.
    """
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 (returned open)
    # Checked on the open file, because another one may have replaced it at `path` in the meantime.
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file, but a FIFO or device", os.fspath(path))
    return file


def _open_at_once(path: str, flags: int) -> int:
    # `open` has set O_CLOEXEC already. Not every system has the others.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0), 0o666)


def bytes_digest(parts: Iterable) -> str:
    """sha256, in hexadecimal, of bytes (or memory that holds them), one part after the other."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()


def sha256(path: str | os.PathLike) -> str:
    """sha256, in hexadecimal, of a file."""
    with open(path, "rb") as file:
        return bytes_digest(iter(lambda: file.read(1 << 20), b""))


def path_digest(path: str | os.PathLike) -> str:
    """sha256, in hexadecimal, of a file, or of the names and contents of a folder's files, except hidden ones."""
    path = Path(path)
    if path.is_file():
        return sha256(path)
    files = sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*"))
    visible = ((name, file) for name, file in files if not re.search(r"(^|/)\.", name) and file.is_file())
    return bytes_digest(f"{name}\0{sha256(file)}\n".encode() for name, file in visible)


def json_digest(values: dict) -> str:
    """sha256, in hexadecimal, of JSON values in any order. A value named "sha256" does not count."""
    values = {name: value for name, value in values.items() if name != "sha256"}
    return bytes_digest([json.dumps(values, sort_keys=True).encode()])


def write_json(path: str | os.PathLike, content) -> None:
    """Writes `content` to `path`. A kill leaves the old file or the new one, never half of one.

    Raises:
        ValueError: `content` holds NaN or an infinity, which JSON does not have.
    """
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes `text` to `path` as UTF-8. A kill leaves the old file or the new one, never half of one."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Gives a temporary file to write, which replaces `path` once it is complete and on the disk.

    After a failure or a kill `path` is as it was. The first write to a folder removes what killed processes left there.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent.absolute())
    temporary = hidden_sibling(path, f".{MACHINE}-{os.getpid()}.tmp")
    new_file(temporary).close()
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@lru_cache(maxsize=1024)  # once a process, because listing a folder of many images before each write would be quadratic
def _remove_leftovers(folder: Path) -> None:
    """Removes the temporary files of this machine's dead processes. Others may be writing there right now."""
    for name in os.listdir(folder):
        temporary = _TEMPORARY.fullmatch(name)
        if temporary and not psutil.pid_exists(int(temporary[1][:9])):
            (folder / name).unlink(missing_ok=True)


def hidden_sibling(path: Path, suffix: str) -> Path:
    """The hidden file `.NAME` + `suffix` beside `path`; a name too long for the suffix is replaced by its digest."""
    name = f".{path.name}{suffix}"
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:32]}{suffix}"
    return path.with_name(name)


def new_file(path: Path) -> BinaryIO:
    """Creates a file and opens it for writing.

    Whatever has its name, as a killed run may leave it, is removed first and never written through: a symbolic link
    under a name that can be guessed could lead to any file.
    """
    path.unlink(missing_ok=True)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666), "wb")


def read_json_object(path: str | os.PathLike) -> dict:
    """The JSON object in a file; empty if there is no readable one."""
    try:
        with open_regular(path) as file:
            content = json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def describe_changes(before: dict, now: dict) -> str:
    """The settings that differ, by name, in words: "size was 256, now 384; ..."."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return "; ".join(f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in names)


@contextmanager
def folder_lock(folder: Path, by_another: str) -> Iterator[None]:
    """Locks a folder for this process.

    Raises:
        UserError: another process has the lock (`by_another` is the message), or `.lock` is no regular file.
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
def atomic_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Gives a temporary folder to fill, which replaces `path`, or what that links to, once it is complete and on the
    disk.

    After a failure `path` is as it was. After a kill between the two renames the next call puts the old folder back.
    Processes that write the same folder at once replace it one after the other.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = hidden_sibling(path, f".{MACHINE}-{os.getpid()}.unfinished")
    beginning = unfinished.name.removesuffix(f"{os.getpid()}.unfinished")
    for leftover in path.parent.glob(f"{glob.escape(beginning)}*.unfinished"):
        process = leftover.name.removeprefix(beginning).removesuffix(".unfinished")
        is_ours = process.isdecimal() and (leftover / _MARK).is_file()  # the name alone does not make it ours
        if is_ours and (int(process) == os.getpid() or not psutil.pid_exists(int(process[:9]))):
            _end_folder(leftover, path)
    with suppress(OSError):
        unfinished.rmdir()  # an empty one is nobody's
    unfinished.mkdir()
    (unfinished / _MARK).touch()
    new = unfinished / "new"
    try:
        new.mkdir()
        yield new
        sync_path(new)
        _replace_folder(new, path, unfinished / "old")
    finally:
        _end_folder(unfinished, path)


def _replace_folder(new: Path, path: Path, old: Path) -> None:
    for attempts_left in (2, 1, 0):  # another process may put its folder there between the two renames
        try:
            return replace_path(new, path, old)
        except OSError as error:
            if not attempts_left or error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise
            remove_path(old)


def _end_folder(unfinished: Path, path: Path) -> None:
    """Removes what `atomic_folder` left. The old folder is put back, if nothing is in its place."""
    if (unfinished / "old").exists() and not os.path.lexists(path):
        os.replace(unfinished / "old", path)
    for part in (unfinished / "new", unfinished / "old", unfinished):  # the mark goes last
        remove_path(part)


def append(path: Path, line: str, sync: bool = False) -> None:
    """Adds a line to a file, which is made if there is none. A line that a kill cut short is ended first.

    Args:
        sync: whether it is on the disk when this returns.

    Raises:
        UserError: what lies there is no regular file, or a link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = _open_at_once(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise _not_regular(path) from error
        raise
    with open(descriptor, "wb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _not_regular(path)
        size = os.fstat(descriptor).st_size
        cut = size and os.pread(descriptor, 1, size - 1) != b"\n"
        file.write(b"\n" * bool(cut) + line.encode() + b"\n")
        file.flush()
        if sync:
            os.fsync(descriptor)


def _not_regular(path: Path) -> UserError:
    return UserError(f"{str(path)!r} is no regular file. Nothing is written through it: remove it.")


def replace_path(new: Path, path: Path, old: Path) -> None:
    """Renames a file or folder to `path`. What lies there goes; a folder becomes `old` first."""
    if os.path.lexists(path) and (path.is_dir() or new.is_dir()):
        os.replace(path, old)
    os.replace(new, path)
    if os.path.lexists(old):
        sync_path(path.parent, deep=False)  # else a power failure could undo the renames, and not the removal
        remove_path(old)


def remove_path(path: Path) -> None:
    """Removes a file or a folder, or a link but not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_path(path: Path, deep: bool = True) -> None:
    """Waits until a file, or a folder and all that is in it, is on the disk."""
    for part in (*(path.rglob("*") if deep and path.is_dir() else ()), path):
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
