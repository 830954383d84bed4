"""The folder of a run: whose it is, and everything that is left in it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..backbones import Backbone
from ..errors import UserError
from ..files import held, restore_folder, whole_folder, write_json


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
        with open(self._log, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def cut_log(self, step: int) -> None:
        """Removes the lines of steps after `step`, which will be made again, and a line that a kill cut short."""
        if self._log.exists():
            lines = [line for line in self._log.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            self._log.write_text("".join(line + "\n" for line in kept))

    def save_model(self, folder: Path, backbone: Backbone, scores: dict) -> None:
        """Writes an open_clip folder with its scores, whole or not at all."""
        with whole_folder(folder) as temporary:
            backbone.save(temporary)
            write_json(temporary / "scores.json", scores)
