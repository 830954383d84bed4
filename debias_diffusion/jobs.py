"""The job folder: how work that was killed continues, and what may continue in a folder.

An item is written under a temporary name and synced; then its line is appended and synced; then it is renamed. An item
holds if one of its lines has its checksum. So a kill between any two of these leaves the old item or the new one.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Literal

from .errors import UserError
from .files import (
    MACHINE,
    append,
    file_lock,
    json_digest,
    open_regular,
    path_digest,
    read_json,
    recover,
    remove_path,
    replacing,
    short_digest,
    unfinished,
    write_json,
)

JOB = "job.json"


class Job:
    """A folder of work that may be killed at any point: its lock, its settings, its finished items.

    `job.json` holds the command, the settings that decide the result and the digests of the inputs, with a checksum.
    `items.jsonl`, or `items-WRITER.jsonl` of each process of a shared job, has a line for each finished item: its name,
    the sha256 of its content, and notes, with a checksum of these.

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
        self._items: dict[str, dict[str | None, dict]] = {}  # by name: notes by sha256, which is None without a file
        self._read_to: dict[Path, int] = {}  # bytes of each file of lines that have been read

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
    ) -> Iterator["Job"]:
        """Makes the folder, or continues in it.

        Args:
            command: "train", "generate", "cache": what may continue here.
            settings: JSON values that decide the result: no paths, and no batch size that only changes speed. None: no
                settings, items are told apart by their names (caches, outputs of evaluations).
            inputs: {name: digest} of data and models, wherever they lie.
            may_change: names of settings that a continued job may have otherwise, such as paths.
            shared: several processes at once: no lock, each writes lines of its own, and only temporary files of dead
                processes are removed. Otherwise this process holds the lock and removes all that a killed one left.

        Raises:
            UserError: the folder holds something else; another process works there (not `shared`);
                a setting or an input differs. Names it, both values, and what to do. Where nothing was finished, a job
                begins anew, with any settings.
        """
        job = cls(Path(folder), f"items-{MACHINE}-{os.getpid()}.jsonl" if shared else "items.jsonl")
        job.folder.mkdir(parents=True, exist_ok=True)
        values = {"command": command, "settings": dict(settings or {}), "inputs": dict(inputs or {})}
        now = json.loads(json.dumps(values))  # as it will be read
        with nullcontext(True) if shared else file_lock(job.folder / ".lock") as is_free:
            if not is_free:
                raise UserError(f"Another process works in {str(folder)!r}. Wait for it, or give another folder.")
            job._read_lines()
            recover(job.folder, job._items, alone=not shared)
            before = job._record()
            if before and job.names():
                job._compare(before, now, may_change)
            if before != now:
                write_json(job.folder / JOB, now | {"sha256": json_digest(now)})
            vars(job).update(now)
            yield job

    @classmethod
    def read(cls, folder: str | os.PathLike) -> "Job":
        """The job in a folder, also while another process works there; without items if there is none.

        Raises:
            UserError: `job.json` is damaged.
        """
        job = cls(Path(folder))
        job._read_lines()
        vars(job).update(job._record() or {})
        return job

    def __contains__(self, name: str) -> bool:
        """Whether an item is finished and there, damaged or not."""
        if not self._is_there(name):
            self._read_lines()
        return self._is_there(name)

    def names(self, prefix: str = "") -> list[str]:
        """Of the finished items."""
        self._read_lines()
        return [name for name in self._items if name.startswith(prefix) and self._is_there(name)]

    def notes(self, name: str) -> dict:
        """What was noted of a finished item. Raises KeyError for another."""
        if name not in self:
            raise KeyError(name)
        *_, newest = notes = self._items[name].values()
        return self._items[name].get(self._verify(name), newest) if len(notes) > 1 else newest

    def write(self, name: str, **notes) -> AbstractContextManager[Path]:
        """Gives a temporary path for a file or a folder, which becomes the item, new or in place of the old one.

        Raises:
            UserError: what lies there is not of this job.
        """
        return self._write(name, notes)

    def _write(self, name: str, notes: dict) -> AbstractContextManager[Path]:
        """`write`, with notes as they are at the end."""
        path = self.folder / name
        if os.path.lexists(path) and name not in self:
            raise UserError(
                f"{str(path)!r} is in the place of a result and was not made by this job. Move it away, or give "
                "another output folder."
            )
        return replacing(self.folder, name, lambda temporary: self._append(name, path_digest(temporary), notes))

    def note(self, name: str, **notes) -> None:
        """An item without a file."""
        self._append(name, None, notes)

    def path(self, name: str, damaged: Literal["refuse", "absent"] = "refuse") -> Path | None:
        """Where an item lies, compared with its checksum; None if it is not there.

        Args:
            damaged: whether an item that does not fit its checksum is refused, or is as none.

        Raises:
            UserError: it is damaged; names it, and says what to do.
        """
        path = self.folder / name
        if name not in self or None in self._items[name]:
            return None
        if self._verify(name):
            return path
        if damaged == "absent":
            return None
        raise UserError(
            f"{str(path)!r} is damaged: it and its checksum do not agree. Remove it, and the same command continues "
            "from what was finished before."
        )

    def ensure(self, name: str, write: Callable[[Path], None]) -> Path:
        """Where an item lies that `write` writes to a temporary path if it is not there or damaged.

        How long that took is noted, as "seconds".
        """
        if self.path(name, damaged="absent") is None:
            started, notes = time.monotonic(), {}
            with self._write(name, notes) as temporary:
                write(temporary)
                notes["seconds"] = time.monotonic() - started
        return self.folder / name

    def remove(self, name: str) -> None:
        """Removes an item's file or folder. A kill leaves all of it or nothing."""
        if self._is_there(name):
            temporary = unfinished(self.folder, name, "tmp")
            os.replace(self.folder / name, temporary)
            remove_path(temporary)

    @staticmethod
    def key(kind: str, depends: Mapping) -> str:
        """`kind` and a digest of all that affects a value, as JSON values: the name of an item."""
        return f"{kind}-{json_digest({'depends': depends})[:32]}"

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Whether an item of a shared job is to be made here: it is not finished, and nobody else is making it."""
        with file_lock(self.folder / f".{short_digest(name)}.lock") as is_free:
            yield is_free and name not in self

    def _is_there(self, name: str) -> bool:
        return name in self._items and (None in self._items[name] or os.path.lexists(self.folder / name))

    def _read_lines(self) -> None:
        """Reads the lines that were added since the last time. Those cut short by a kill, or damaged, do not count."""
        for file in sorted(self.folder.glob("items*.jsonl")):
            with open_regular(file) as opened:
                opened.seek(self._read_to.get(file, 0))
                whole, end, _ = opened.read().rpartition(b"\n")  # another process may be writing the rest
            self._read_to[file] = self._read_to.get(file, 0) + len(whole + end)
            for line in whole.splitlines():
                with suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
                    item = json.loads(line)
                    if item.pop("sha256") == json_digest(item):
                        self._items.setdefault(item["name"], {})[item["content"]] = item["notes"]

    def _append(self, name: str, digest: str | None, notes: dict) -> None:
        item = {"name": name, "content": digest, "notes": notes}
        append(self._lines, json.dumps(item | {"sha256": json_digest(item)}), sync=True)
        self._items.setdefault(name, {})[digest] = notes

    def _verify(self, name: str) -> str | None:
        """The sha256 of an item that fits one of its lines; None for a damaged item."""
        with suppress(OSError):
            digest = path_digest(self.folder / name)
            if digest not in self._items[name]:
                self._read_lines()  # another process may have replaced the item
            return digest if digest in self._items[name] else None

    def _record(self) -> dict | None:
        """The content of `job.json`; None if there is none."""
        path = self.folder / JOB
        if not os.path.lexists(path):  # nor in a file, or what is no name of a folder at all
            return None
        advice = (
            "It holds the settings of what lies there. Put a copy in its place, or give another folder. If you are "
            "sure that the settings are the same, remove the file."
        )
        record = read_json(path, advice=advice)
        if record.pop("sha256", None) != json_digest(record):
            raise UserError(f"{str(path)!r} and its checksum do not agree: it was changed or is damaged. {advice}")
        return record

    def _compare(self, before: dict, now: dict, may_change: Collection[str]) -> None:
        """Raises UserError unless a job that began as `before` may continue as `now`."""
        place = f"The output folder {str(self.folder)!r} belongs to a run"
        if before["command"] != now["command"]:
            raise UserError(
                f"{place} of `{before['command']}`, and not of `{now['command']}`. Give another output folder."
            )
        there, here = (
            job["settings"] | {f"contents of {name}": digest for name, digest in job["inputs"].items()}
            for job in (before, now)
        )
        changes = "; ".join(
            f"{name}: {there.get(name)!r} there, {here.get(name)!r} here"
            for name in here | before["settings"]
            if name not in may_change and there.get(name) != here.get(name)
        )
        if changes:
            raise UserError(
                f"{place} with other settings ({changes}). Give another output folder, or the same settings to "
                "continue there."
            )
