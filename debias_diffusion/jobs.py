"""The job folder: how work that was killed continues, and what may continue in a folder.

An item is written under a temporary name and synced; then its line is appended and synced; then it is renamed. Of an
item's lines the newest whose checksum fits the file holds, and lines that fit nothing do not count. So a kill between
any two of these leaves the old item or the new one.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .errors import UserError, reason
from .files import (
    MACHINE,
    append,
    file_lock,
    folder_lock,
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

if TYPE_CHECKING:
    from torch import Tensor

JOB = "job.json"
_LINES = "items*.jsonl"


class Job:
    """A folder of work that may be killed at any point: its lock, its settings, its finished items.

    `job.json` holds the command, the settings that decide the result and the digests of the inputs, with a checksum.
    `items.jsonl`, or `items-WRITER.jsonl` of each process of a shared job, has a line for each finished item: name,
    sha256 and notes, with a checksum.

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
            UserError: the folder holds something else; another process works there (not `shared`);
                a setting or an input differs. Names it, both values, and what to do. Where nothing was finished, a job
                begins anew, with any settings.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        job = cls(folder, f"items-{MACHINE}-{os.getpid()}.jsonl" if shared else "items.jsonl")
        taken = f"Another process works in {str(folder)!r}. Wait for it, or give another folder."
        with nullcontext() if shared or process else folder_lock(folder, taken):
            job._read_items()
            job._alone = not shared and process == 0
            if process == 0:
                recover(folder, job._items, alone=not shared)
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
        path = self.folder / name
        if os.path.lexists(path) and name not in self:
            raise UserError(
                f"{str(path)!r} is in the place of a result and was not made by this job. Move it away, or give "
                "another output folder."
            )
        with replacing(self.folder, name, lambda temporary: self._append(name, path_digest(temporary), notes)) as item:
            yield item
        self._verified[name] = self._items[name][-1]

    def note(self, name: str, **notes) -> None:
        """An item without a file."""
        self._append(name, None, notes)

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
            temporary = unfinished(self.folder, name, "tmp")
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
        from safetensors.torch import load_file, save  # not for help, which loads no torch

        path = self.path(name, damaged="absent")
        if path is None:
            content = {key: tensor.contiguous() for key, tensor in compute().items()}
            with self.write(name) as temporary:
                temporary.write_bytes(save(content))  # `save_file` would let only the owner read it
            path = self.folder / name
        return load_file(path)

    @staticmethod
    def key(kind: str, depends: Mapping) -> str:
        """`kind` and a digest of all that affects a value, as JSON values: the name of an item."""
        return f"{kind}-{json_digest({'depends': depends})[:32]}"

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Whether an item of a shared job is to be made here: it is not finished, and nobody else is making it."""
        with file_lock(self.folder / f".{short_digest(name)}.lock") as is_mine:
            yield is_mine and name not in self

    # ---- lines

    def _read_items(self) -> None:
        """Reads the lines that were added since the last time."""
        for file in () if self._alone else sorted(self.folder.glob(_LINES)):
            try:
                with open_regular(file) as opened:
                    opened.seek(self._read_to.get(file, 0))
                    whole, _, _ = opened.read().rpartition(b"\n")  # another process may be writing the rest
            except OSError as error:
                raise UserError(f"The finished items of a run cannot be read: {reason(error)}. Remove it.") from error
            self._read_to[file] = self._read_to.get(file, 0) + len(whole)
            for line in filter(None, map(_parsed, whole.splitlines())):
                self._add(line)

    def _append(self, name: str, digest: str | None, notes: dict) -> None:
        line = {"name": name, "sha256": digest, "notes": notes}
        record = {"item": line}
        append(self._lines, json.dumps(record | {"sha256": json_digest(record)}), sync=True)
        self._add(line)

    def _add(self, line: dict) -> None:
        before = [earlier for earlier in self._items.pop(line["name"], []) if earlier != line]
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

    # ---- settings

    def _record(self) -> dict | None:
        """The content of `job.json`; None if there is none."""
        path = self.folder / JOB
        if not os.path.lexists(path):  # nor in a file, or what is no name of a folder at all
            return None
        advice = (
            "It holds the settings of what lies there. Put a copy in its place, or give another folder. If you are "
            "sure that the settings were those you give now, remove the file: the work continues, and nothing compares "
            "them."
        )
        record = read_json(path, advice=advice)
        if record.pop("sha256", None) == json_digest(record) and record.keys() == {"command", "settings", "inputs"}:
            return record
        raise UserError(f"{str(path)!r} and its checksum do not agree: it was changed or is damaged. {advice}")

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
        there, here = before["settings"], now["settings"]
        changes = "; ".join(
            f"{name}: {there.get(name)!r} there, {here.get(name)!r} here"
            for name in here | there
            if name not in may_change and there.get(name) != here.get(name)
        )
        replaced = "".join(
            f" The {name} is another one, by its contents: {before['inputs'].get(name)} there, {digest} here."
            for name, digest in now["inputs"].items()
            if before["inputs"].get(name) != digest
        )
        if changes or replaced:
            raise UserError(
                f"{place} with other settings{f' ({changes})' if changes else ''}.{replaced} Give another "
                "output folder, or the same settings to continue there."
            )


def _parsed(line: bytes) -> dict | None:
    """A line's item; None where a kill cut it short or a disk damaged it."""
    try:
        record = json.loads(line)
        return record["item"] if record["sha256"] == json_digest(record) else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
