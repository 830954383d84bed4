"""The folder of a run: whose it is, and everything that is left in it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..backbones import Backbone
from ..errors import UserError
from ..files import held, restore_folder, whole_folder, write_json

NOT_FINITE = "not-finite.jsonl"


class RunFolder:
    """A run's output folder.

    Attributes:
        path: the folder.
        best, last: open_clip folders of the best model so far and of the last one.
        checkpoints: what to continue from.
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
        """Makes the folder and holds it for this run alone; `is_main` says which process of a run holds it.

        Raises:
            UserError: it cannot be made, or another run holds it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"The output folder {str(self.path)!r} cannot be made: {error.strerror}.") from error
        if not is_main:
            yield
            return
        taken = f"Another run is writing to {str(self.path)!r}. Wait for it, or give another output folder."
        with held(self.path, taken):
            for folder in (self.best, self.last):
                restore_folder(folder)
            yield

    @property
    def begun(self) -> bool:
        """Whether a run has made its first step here, or tried to."""
        return self._settings.exists()

    def claim(self, settings: dict) -> None:
        """Writes what this run's result depends on."""
        write_json(self._settings, settings)

    def check_settings(self, settings: dict) -> None:
        """Raises UserError if the folder belongs to a run with other settings, and names them."""
        if not self.begun:
            return
        theirs = json.loads(self._settings.read_text())
        differing = [key for key in settings if settings[key] != theirs.get(key)]
        if differing:
            changes = "; ".join(f"{key}: {theirs.get(key)!r} there, {settings[key]!r} here" for key in differing)
            raise UserError(
                f"The output folder {str(self.path)!r} belongs to a run with other settings ({changes}). Give another "
                "output folder, or the same settings to continue that run."
            )

    def log(self, line: dict) -> None:
        """Adds a line to log.jsonl."""
        _append(self._log, line)

    def log_not_finite(self, line: dict) -> None:
        """Names the samples of a step that was not applied, in log.jsonl by their number, in a file of its own."""
        _append(self._not_finite, line)
        self.log(line | {"samples": len(line["samples"])})

    def cut_log(self, step: int) -> None:
        """Removes what will be written again, the lines after `step` (all of a run that starts anew), and a line that a
        kill cut short."""
        for log in (self._log, self._not_finite):
            if log.exists():
                lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
                kept = [line for line in lines if json.loads(line)["step"] <= step and step > 0]
                log.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def save_model(self, folder: Path, backbone: Backbone, scores: dict) -> None:
        """Writes an open_clip folder with its scores, whole or not at all."""
        with whole_folder(folder) as temporary:
            backbone.save(temporary)
            write_json(temporary / "scores.json", scores)


def _append(path: Path, line: dict) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
