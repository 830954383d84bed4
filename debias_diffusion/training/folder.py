"""The output folder of a run: its lock, its settings, its logs and its models."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError, reason
from ..files import atomic_file, atomic_folder, folder_lock, json_digest, restore_folder, write_json
from ..models.backbone import Backbone
from .checkpoint import restore_checkpoints

NOT_FINITE = "not-finite.jsonl"
# Settings that may be paths: relative or absolute is the same.
_PATHS = ("data", "images", "base", "model", "import_file")


class RunFolder:
    """A run's output folder.

    Attributes:
        path: the folder.
        last: open_clip folder of the model after the last step, the result of the run.
        best: that of the best model so far, with `keep_best`.
        checkpoints: the folder of checkpoints to resume from.
    """

    def __init__(self, path: str):
        self.path = Path(path)
        self.best = self.path / "best"
        self.last = self.path / "last"
        self.checkpoints = self.path / "checkpoints"
        self._settings = self.path / "settings.json"
        self._log = self.path / "log.jsonl"
        self._not_finite = self.path / NOT_FINITE

    @contextmanager
    def owned(self, is_main: bool) -> Iterator[None]:
        """Makes the folder and locks it for this run; the main process of a run holds the lock.

        Raises:
            UserError: it cannot be made, or another run holds the lock.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"The output folder {str(self.path)!r} cannot be made: {error.strerror}.") from error
        if not is_main:
            yield
            return
        taken = f"Another run is writing to {str(self.path)!r}. Wait for it, or give another output folder."
        with folder_lock(self.path, taken):
            for folder in (self.best, self.last):
                restore_folder(folder)
            restore_checkpoints(self.checkpoints)
            yield

    @property
    def begun(self) -> bool:
        """Whether a run has started its first step here."""
        return self._settings.exists()

    def claim(self, settings: dict) -> None:
        """Writes the settings that decide the run's result, with a checksum."""
        write_json(self._settings, settings | {"sha256": json_digest(settings)})

    def settings(self) -> dict:
        """The settings that `claim` wrote; empty for a folder without a run.

        Raises:
            UserError: it cannot be read.
        """
        if not self.begun:
            return {}
        try:
            settings = json.loads(self._settings.read_text(encoding="utf-8"))
            is_whole = settings.get("sha256") == json_digest(settings)
            problem = None if is_whole else "it and its checksum do not agree; it was changed or is damaged"
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            problem = reason(error)
        if problem:
            raise UserError(
                f"{str(self._settings)!r}, the settings of the run, cannot be read: {problem}. Put a copy in its "
                "place, or give another output folder. If you are sure that the run had the settings you give now, "
                "remove the file: the run continues, and nothing compares them."
            )
        return settings

    def check_settings(self, settings: dict) -> None:
        """Raises UserError that names the differing settings if the folder belongs to a run with others."""
        begun = self.settings()
        differing = [key for key, value in settings.items() if not _is_same(key, value, begun.get(key))]
        if begun and differing:
            changes = "; ".join(f"{key}: {begun.get(key)!r} there, {settings[key]!r} here" for key in differing)
            contents = (key.removesuffix("_sha256") for key in differing if key.endswith("_sha256"))
            replaced = "".join(f" The {name.replace('_', ' ')} is another one, by its contents." for name in contents)
            raise UserError(
                f"The output folder {str(self.path)!r} belongs to a run with other settings ({changes}).{replaced} "
                "Give another output folder, or the same settings to continue that run."
            )

    def log(self, line: dict) -> None:
        """Adds a line to log.jsonl."""
        _append(self._log, line)

    def log_not_finite(self, line: dict) -> None:
        """Logs a skipped step: its sample ids in not-finite.jsonl, their number in log.jsonl."""
        _append(self._not_finite, line)
        self.log(line | {"samples": len(line["samples"])})

    def cut_log(self, step: int) -> None:
        """Removes lines after `step`, which will be written again (all if the run starts again), and unreadable lines,
        which a kill or a damaged disk left."""
        for log in (self._log, self._not_finite):
            if log.exists():
                lines = log.read_bytes().splitlines(keepends=True)
                kept = [line for line in lines if step > 0 and _step_of(line) <= step]
                if kept != lines:
                    with atomic_file(log) as temporary:
                        temporary.write_bytes(b"".join(kept))

    def save_model(self, folder: Path, backbone: Backbone, scores: dict) -> None:
        """Writes an open_clip folder with its scores, complete or not at all."""
        with atomic_folder(folder) as temporary:
            backbone.save(temporary)
            write_json(temporary / "scores.json", scores)


def _is_same(key: str, a, b) -> bool:
    if key in _PATHS and isinstance(a, str) and isinstance(b, str):
        return a == b or os.path.realpath(a) == os.path.realpath(b)
    return a == b


def _step_of(line: bytes) -> float:
    """The step of a line of a log; infinity where it cannot be read."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"}\n") else None
    except (ValueError, TypeError, LookupError, RecursionError):
        step = None
    return step if type(step) is int else math.inf


def _append(path: Path, line: dict) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
