"""The job folder: how work that was killed continues, and what may continue in a folder.

One process works in a folder: it writes all items and their lines. Other processes of the same run hand it what they
made. An item is written under a temporary name and synced; then its line is appended and synced; then it is renamed.
An item holds if one of its lines has its checksum. So a kill between any two of these leaves the old item or the new
one.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from .errors import UserError, explain_failure
from .files import append, folder_lock, path_digest, read_file, recover, remove_path, replacing, unfinished, write_json

JOB, LINES = "job.json", "items.jsonl"


class Job:
    """A folder of work that may be killed at any point: its lock, its settings, its finished items.

    `job.json` holds the command, the settings that decide the result and the digests of the inputs. `items.jsonl` has
    a line for each finished item: its name, the sha256 of its content, and notes.

    Attributes:
        folder: where the items lie, by their names.
        command: which made the folder; empty for a folder without a job.
        settings: that decide the result.
        inputs: digests of data and models, by name.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.command: str = ""
        self.settings: dict = {}
        self.inputs: dict[str, str | None] = {}
        self._items: dict[str, dict[str | None, dict]] = {}  # by name: notes by sha256, which is None without a file
        self._read_lines()

    @classmethod
    @contextmanager
    def open(
        cls,
        folder: str | os.PathLike,
        command: str,
        settings: Mapping | None = None,
        inputs: Mapping[str, str | None] | None = None,
        may_change: Collection[str] = (),
    ) -> Iterator["Job"]:
        """Makes the folder, or continues in it: holds its lock, and removes what a killed process left.

        Args:
            command: "train", "generate": what may continue here.
            settings: JSON values that decide the result: no paths, and no batch size that only changes speed.
            inputs: {name: digest} of data and models, wherever they lie.
            may_change: names of settings that a continued job may have otherwise, such as paths.

        Raises:
            UserError: the folder holds something else; another process works there; a setting or an input differs.
                Names it, both values, and what to do. Where nothing was finished, a job begins anew, with any settings.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        values = {"command": command, "settings": dict(settings or {}), "inputs": dict(inputs or {})}
        now = json.loads(json.dumps(values))  # as it will be read
        with folder_lock(folder):
            job = cls.read(folder)
            recover(job.folder, job._items, alone=True)
            before = {name: getattr(job, name) for name in now}
            if job.command and job.names():
                job._compare(now, may_change)
            if before != now:
                write_json(job.folder / JOB, now)
            vars(job).update(now)
            yield job

    @classmethod
    def read(cls, folder: str | os.PathLike) -> "Job":
        """The job in a folder as it is now, also while another process works there; without items if there is none.

        Raises UserError if `job.json` is damaged.
        """
        job = cls(Path(folder))
        path = job.folder / JOB
        if os.path.lexists(path):  # not in a file, nor in what is no name of a folder at all
            advice = "Put a copy in its place, or give another folder. Remove it if you are sure of your settings."
            with explain_failure(f"{str(path)!r} is damaged", advice):
                record = json.loads(read_file(path))
                job.command, job.settings, job.inputs = record["command"], record["settings"], record["inputs"]
        return job

    def __contains__(self, name: str) -> bool:
        """Whether an item is finished and there, damaged or not."""
        return name in self._items and (None in self._items[name] or os.path.lexists(self.folder / name))

    def names(self, prefix: str = "") -> list[str]:
        """Of the finished items."""
        return [name for name in self._items if name.startswith(prefix) and name in self]

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
        path = self.folder / name
        if os.path.lexists(path) and name not in self:
            raise UserError(f"{str(path)!r} was not made by this job. Move it away, or give another output folder.")
        return replacing(self.folder, name, lambda temporary: self._append(name, path_digest(temporary), notes))

    def note(self, name: str, **notes) -> None:
        """An item without a file."""
        self._append(name, None, notes)

    def is_whole(self, name: str) -> bool:
        """Whether an item is there and fits its checksum."""
        return name in self and None not in self._items[name] and self._verify(name) is not None

    def path(self, name: str) -> Path | None:
        """Where an item lies; None if it is not there. Raises UserError if it does not fit its checksum."""
        path = self.folder / name
        if name not in self or None in self._items[name]:
            return None
        if not self._verify(name):
            raise UserError(f"{str(path)!r} is damaged. Remove it, and the same command continues from before.")
        return path

    def ensure(self, name: str, write: Callable[[Path], None]) -> Path:
        """Where an item lies that `write` writes to a temporary path if it is not there or damaged."""
        if not self.is_whole(name):
            with self.write(name) as temporary:
                write(temporary)
        return self.folder / name

    def remove(self, name: str) -> None:
        """Removes an item's file or folder. A kill leaves all of it or nothing."""
        if name in self:
            temporary = unfinished(self.folder, name, "tmp")
            os.replace(self.folder / name, temporary)
            remove_path(temporary)

    def _read_lines(self) -> None:
        """Reads the lines. Those cut short by a kill, or damaged, do not count."""
        lines = read_file(self.folder / LINES).splitlines() if os.path.lexists(self.folder / LINES) else []
        for line in lines:
            with suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
                item = json.loads(line)
                self._items.setdefault(item["name"], {})[item["content"]] = item["notes"]

    def _append(self, name: str, digest: str | None, notes: dict) -> None:
        item = {"name": name, "content": digest, "notes": notes}
        append(self.folder / LINES, json.dumps(item), sync=True)
        self._items.setdefault(name, {})[digest] = notes

    def _verify(self, name: str) -> str | None:
        """The sha256 of an item that fits one of its lines; None for a damaged item."""
        with suppress(OSError):
            digest = path_digest(self.folder / name)
            if digest not in self._items[name]:
                self._read_lines()  # another process may have replaced the item
            return digest if digest in self._items[name] else None

    def _compare(self, now: dict, may_change: Collection[str]) -> None:
        """Raises UserError unless this job may continue as `now`."""
        place = f"The output folder {str(self.folder)!r} belongs to a run"
        if self.command != now["command"]:
            raise UserError(f"{place} of `{self.command}`, and not of `{now['command']}`. Give another output folder.")
        there, here = (
            settings | {f"contents of {name}": digest for name, digest in inputs.items()}
            for settings, inputs in ((self.settings, self.inputs), (now["settings"], now["inputs"]))
        )
        changes = "; ".join(
            f"{name}: {there.get(name)!r} there, {here.get(name)!r} here"
            for name in here | self.settings
            if name not in may_change and there.get(name) != here.get(name)
        )
        if changes:
            raise UserError(f"{place} with other settings ({changes}). Give the same ones, or another folder.")
