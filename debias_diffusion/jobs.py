"""The job folder: how work that was killed continues, and what may continue in a folder.

An item is written under a temporary name and synced; then its line is appended and synced; then it is renamed. Of an
item's lines the newest whose checksum fits the file holds, and lines that fit nothing do not count. So a kill between
any two of these leaves the old item or the new one.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
from filelock import FileLock, Timeout

from .errors import UserError, reason
from .files import (
    MACHINE,
    append,
    bytes_digest,
    folder_lock,
    json_digest,
    open_regular,
    path_digest,
    remove_path,
    replace_path,
    sync_path,
    write_json,
)

if TYPE_CHECKING:
    from torch import Tensor

JOB = "job.json"
_LINES = "items*.jsonl"
# What a process of this machine is writing; `.old` is a folder that is being replaced.
_UNFINISHED = re.compile(rf"\..+\.{re.escape(MACHINE)}-(\d+)\.(?:tmp|old)", re.DOTALL)


class Job:
    """A folder of work that may be killed at any point: its lock, its settings, its finished items.

    `job.json` holds the command, the settings that decide the result and the digests of the inputs, with a checksum.
    `items.jsonl`, or `items-WRITER.jsonl` of each process of a shared job, has a line for each finished item: name,
    sha256, bytes and notes, with a checksum.

    Attributes:
        folder: where the items lie, by their names.
        command: which made the folder; empty for a folder without a job.
        settings: that decide the result.
        inputs: digests of data and models, by name.
    """

    def __init__(self, folder: Path, lines: str = "items.jsonl"):
        self.folder, self._lines = folder, folder / lines
        self.command: str = ""
        self.settings: dict = {}
        self.inputs: dict[str, str | None] = {}
        self._items: dict[str, list[dict]] = {}  # lines of each item, oldest first
        self._verified: dict[str, dict] = {}  # the line whose checksum was compared with the item
        self._read_to: dict[Path, int] = {}  # bytes of each file of lines that have been read
        self._alone = False  # whether nobody else adds lines

    @classmethod
    @contextmanager
    def open(
        cls,
        folder: str | os.PathLike,
        command: str,
        settings: Mapping | None = None,
        inputs: Mapping[str, str | None] | None = None,
        may_change: Collection[str] = (),
        shared: bool = False,
        process: int = 0,
    ) -> Iterator["Job"]:
        """Makes the folder, or continues in it.

        Args:
            command: "train", "generate", "cache": what may continue here.
            settings: JSON values that decide the result: no paths, and no batch size that only changes speed. None: no
                settings, items are told apart by their names (caches, outputs of evaluations).
            inputs: {name: digest} of data and models, wherever they lie.
            may_change: names of settings that a continued job may have otherwise, such as paths.
            shared: several processes at once: no lock, each writes lines of its own, and only temporary files of dead
                processes are removed. Otherwise process 0 holds the lock and removes all that a killed process left.
            process: of one job; others than 0 only read.

        Raises:
            UserError: the folder cannot be made; it holds something else; another process works there (not `shared`);
                a setting or an input differs. Names it, both values, and what to do. Where nothing was finished, a job
                begins anew, with any settings.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"The output folder {str(folder)!r} cannot be made: {error.strerror}.") from error
        job = cls(folder, f"items-{_writer()}.jsonl" if shared else "items.jsonl")
        taken = f"Another process works in {str(folder)!r}. Wait for it, or give another folder."
        with nullcontext() if shared or process else folder_lock(folder, taken):
            job._read_items()
            job._alone = not shared and process == 0
            if process == 0:
                job._remove_unfinished(shared)
            now = {"command": command, "settings": dict(settings or {}), "inputs": dict(inputs or {})}
            job._begin(json.loads(json.dumps(now)), may_change, process == 0)
            yield job

    @classmethod
    def read(cls, folder: str | os.PathLike) -> "Job":
        """The job in a folder, also while another process works there; without items if there is none.

        Raises:
            UserError: `job.json` is damaged.
        """
        job = cls(Path(folder))
        job._read_items()
        vars(job).update(job._record() or {})
        return job

    def __contains__(self, name: str) -> bool:
        """Whether an item is finished and there, damaged or not."""
        if not self._is_there(name):
            self._read_items()
        return self._is_there(name)

    def names(self, prefix: str = "") -> list[str]:
        """Of the finished items, in the order in which they were finished (of a shared job, by each process)."""
        self._read_items()
        return [name for name in self._items if name.startswith(prefix) and self._is_there(name)]

    def notes(self, name: str) -> dict:
        """What was noted of a finished item. Raises KeyError for another."""
        if name not in self:
            raise KeyError(name)
        lines = self._items[name]
        if len(lines) > 1 and lines[-1]["sha256"] and self._verify(name):
            return self._verified[name]["notes"]
        return lines[-1]["notes"]

    @contextmanager
    def write(self, name: str, **notes) -> Iterator[Path]:
        """A temporary path for a file or a folder, which becomes the item, new or in place of the old one.

        Raises:
            UserError: what lies there is not of this job.
        """
        path, temporary = self.folder / name, self._unfinished(name, "tmp")
        if os.path.lexists(path) and name not in self:
            raise UserError(
                f"{str(path)!r} is in the place of a result and was not made by this job. Move it away, or give "
                "another output folder."
            )
        remove_path(temporary)
        try:
            yield temporary
            sync_path(temporary)
            line = {"name": name, "sha256": path_digest(temporary), "bytes": _size(temporary), "notes": notes}
            self._append(line)
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_path(temporary, path, self._unfinished(name, "old"))
            self._verified[name] = line
        finally:
            remove_path(temporary)

    def note(self, name: str, **notes) -> None:
        """An item without a file."""
        self._append({"name": name, "sha256": None, "bytes": 0, "notes": notes})

    def path(self, name: str, damaged: Literal["refuse", "absent"] = "refuse") -> Path | None:
        """Where an item lies, its checksum compared once; None if it is not there.

        Args:
            damaged: whether an item that does not fit its checksum is refused, or is as none.

        Raises:
            UserError: it is damaged; names it, and says what to do.
        """
        if name not in self or not self._items[name][-1]["sha256"]:
            return None
        path = self.folder / name
        if name in self._verified or self._verify(name):
            return path
        if damaged == "absent" or not path.exists():
            return None
        raise UserError(
            f"{str(path)!r} is damaged: it and its checksum do not agree. Remove it, and the same command continues "
            "from what was finished before."
        )

    def remove(self, name: str) -> None:
        """Removes an item's file or folder. A kill leaves all of it or nothing."""
        if self._is_there(name):
            temporary = self._unfinished(name, "tmp")
            os.replace(self.folder / name, temporary)
            remove_path(temporary)
        self._verified.pop(name, None)

    def json(self, name: str, compute: Callable[[], dict]) -> dict:
        """The JSON object of an item, computed if it is not there or damaged."""
        path = self.path(name, damaged="absent")
        if path is None:
            content = compute()
            with self.write(name) as temporary:
                write_json(temporary, content)
            path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8"))

    def tensors(self, name: str, compute: Callable[[], dict[str, "Tensor"]]) -> dict[str, "Tensor"]:
        """The tensors of an item, a safetensors file, computed if it is not there or damaged."""
        from safetensors.torch import load_file, save_file  # not for help, which loads no torch

        path = self.path(name, damaged="absent")
        if path is None:
            content = {key: tensor.contiguous() for key, tensor in compute().items()}
            with self.write(name) as temporary:
                save_file(content, temporary)
            path = self.folder / name
        return load_file(path)

    @staticmethod
    def key(kind: str, depends: Mapping) -> str:
        """`kind` and a digest of all that affects a value, as JSON values: the name of an item."""
        return f"{kind}-{json_digest({'depends': depends})[:32]}"

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Whether an item of a shared job is to be made here: it is not finished, and nobody else is making it."""
        lock = FileLock(self.folder / f".{_short(name)}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            yield False
            return
        try:
            yield name not in self
        finally:
            lock.release()

    # ---- lines

    def _read_items(self) -> None:
        """Reads the lines that were added since the last time."""
        for file in () if self._alone else sorted(self.folder.glob(_LINES)):
            with open_regular(file) as opened:
                opened.seek(self._read_to.get(file, 0))
                whole, _, _ = opened.read().rpartition(b"\n")  # another process may be writing the rest
            self._read_to[file] = self._read_to.get(file, 0) + len(whole)
            for line in filter(None, map(_parsed, whole.splitlines())):
                self._add(line)

    def _append(self, line: dict) -> None:
        record = {"item": line}
        append(self._lines, json.dumps(record | {"sha256": json_digest(record)}), sync=True)
        self._add(line)

    def _add(self, line: dict) -> None:
        before = [other for other in self._items.pop(line["name"], []) if other != line]
        self._items[line["name"]] = [*before, line]  # the last to be finished is the last

    def _is_there(self, name: str) -> bool:
        lines = self._items.get(name)
        return bool(lines) and (lines[-1]["sha256"] is None or os.path.lexists(self.folder / name))

    def _verify(self, name: str) -> bool:
        """Whether the checksum of one of its lines fits an item."""
        for _ in range(2):  # a folder may be replaced while it is read
            try:
                digest = path_digest(self.folder / name)
            except OSError:
                continue
            for _ in range(2):  # the line of what another process has put there since the lines were read
                for line in reversed(self._items.get(name, [])):
                    if line["sha256"] == digest:
                        self._verified[name] = line
                        return True
                self._read_items()
        return False

    # ---- files that are not finished

    def _unfinished(self, name: str, kind: str) -> Path:
        return self.folder / f".{_short(name)}.{_writer()}.{kind}"

    def _remove_unfinished(self, shared: bool) -> None:
        """Puts back folders that were being replaced, and removes temporary files: of a shared job, of the dead."""
        unfinished = [p for p in self.folder.iterdir() if p.name.startswith(".") and p.suffix in (".tmp", ".old")]
        dead = [path for path in unfinished if not shared or _is_of_the_dead(path)]
        replaced = {path.name.split(".")[1]: path for path in dead if path.suffix == ".old"}
        for name in self._items if replaced else ():
            if _short(name) in replaced and not os.path.lexists(self.folder / name):
                os.replace(replaced[_short(name)], self.folder / name)
        for path in dead:
            remove_path(path)

    # ---- settings

    def _record(self) -> dict | None:
        """The content of `job.json`; None if there is none."""
        path = self.folder / JOB
        if not os.path.lexists(path):  # nor in a file, or what is no name of a folder at all
            return None
        try:
            with open_regular(path) as file:
                record = json.loads(file.read().decode("utf-8"))
            if record.pop("sha256") == json_digest(record) and record.keys() == {"command", "settings", "inputs"}:
                return record
            problem = "it and its checksum do not agree; it was changed or is damaged"
        except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            problem = reason(error)
        raise UserError(
            f"{str(path)!r}, the settings of what lies there, cannot be read: {problem}. Put a copy in its place, or "
            "give another folder. If you are sure that the settings were those you give now, remove the file: the work "
            "continues, and nothing compares them."
        )

    def _begin(self, now: dict, may_change: Collection[str], writes: bool) -> None:
        """Compares the job with what began here, and writes it down."""
        before = self._record()
        if before and self.names():
            self._compare(before, now, may_change)
        if writes and before != now:
            write_json(self.folder / JOB, now | {"sha256": json_digest(now)})
        vars(self).update(now)

    def _compare(self, before: dict, now: dict, may_change: Collection[str]) -> None:
        place = f"The output folder {str(self.folder)!r} belongs to a run"
        if before["command"] != now["command"]:
            raise UserError(
                f"{place} of `{before['command']}`, and not of `{now['command']}`. Give another output folder."
            )
        settings = (before["settings"], now["settings"])
        differing = [key for key in now["settings"] | before["settings"] if _differ(*settings, key, may_change)]
        changes = "; ".join(
            f"{key}: {settings[0].get(key)!r} there, {settings[1].get(key)!r} here" for key in differing
        )
        inputs = [name for name, digest in now["inputs"].items() if before["inputs"].get(name) != digest]
        replaced = "".join(
            f" The {name} is another one, by its contents: {before['inputs'].get(name)} there, "
            f"{now['inputs'][name]} here."
            for name in inputs
        )
        if differing or inputs:
            raise UserError(
                f"{place} with other settings{f' ({changes})' if changes else ''}.{replaced} Give another "
                "output folder, or the same settings to continue there."
            )


def _differ(before: dict, now: dict, key: str, may_change: Collection[str]) -> bool:
    return key not in may_change and before.get(key) != now.get(key)


def _writer() -> str:
    return f"{MACHINE}-{os.getpid()}"


def _is_of_the_dead(path: Path) -> bool:
    writer = _UNFINISHED.fullmatch(path.name)
    return bool(writer) and not psutil.pid_exists(int(writer[1][:9]))


def _short(name: str) -> str:
    """Of any name, what fits into the name of a file."""
    return bytes_digest([name.encode()])[:16]


def _parsed(line: bytes) -> dict | None:
    """A line's item; None where a kill cut it short or a disk damaged it."""
    try:
        record = json.loads(line)
        return record["item"] if record["sha256"] == json_digest(record) else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
