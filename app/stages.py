"""Work in stages that are not done again: each remembers what it depended on, what it found and how long it took."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from debias_diffusion.errors import UserError
from debias_diffusion.files import held, read_json_object, write_json


@dataclass(frozen=True)
class Stage:
    """One piece of work.

    Attributes:
        name: of its file, `stages/NAME.json`.
        title: what is printed.
        work: does it and returns what it found, as plain JSON values. Called again after a kill, it may go on from what
            it has left in `leaves`; after a change it finds nothing there.
        reads: settings and digests that what it does depends on.
        after: names of the earlier stages that it builds on.
        leaves: folders and files that belong to it alone, relative to the output folder.
    """

    name: str
    title: str
    work: Callable[[], dict]
    reads: dict = field(default_factory=dict)
    after: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()


class Stages:
    """An output folder and what its stages have found so far.

    What a stage prints goes to `stages/NAME.txt`; progress bars stay on the screen.

    Attributes:
        found: what each stage found, by its name.
        seconds: how long each stage took, in the run that did it.
    """

    def __init__(self, output: Path):
        self.output, self.found, self.seconds = output, {}, {}
        self._keys: dict[str, str] = {}

    @contextmanager
    def owned(self, maker: str):
        """Makes the folder and holds it for this process alone; `maker` says whose it is.

        Raises:
            UserError: it holds something else, cannot be made, or another process works in it.
        """
        marker = self.output / f"{maker}.json"
        try:
            if not marker.exists() and self.output.exists() and any(self.output.iterdir()):
                raise UserError(
                    f"The output folder {str(self.output)!r} is not empty, and not made by {maker}. Give another one."
                )
            write_json(marker, {"made_by": maker, "version": version("debias-diffusion")})
        except OSError as error:
            raise UserError(
                f"The output folder {str(self.output)!r} cannot be used ({error.strerror}). Give another one."
            ) from error
        taken = f"Another {maker} is working in {str(self.output)!r}. Wait for it, or give another output folder."
        with held(self.output, taken):
            yield

    def run(self, stages: Sequence[Stage]) -> None:
        """Does what is not done, in this order."""
        for number, stage in enumerate(stages, 1):
            header = f"[{number}/{len(stages)}] {stage.title}"
            key = self._keys[stage.name] = self._key(stage)
            before = self._remembered(stage)
            if self._is_done(stage, before, key):
                print(f"{header}: already done ({before['seconds']:.0f} s)", flush=True)
            else:
                print(header, flush=True)
                before = self._do(stage, before, key)
            self.found[stage.name], self.seconds[stage.name] = before["result"], before["seconds"]

    def _key(self, stage: Stage) -> str:
        """Of everything that the stage depends on."""
        earlier = {name: self._keys[name] for name in stage.after}
        depends = [stage.name, stage.reads, earlier, version("debias-diffusion")]
        return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()

    def _file(self, stage: Stage) -> Path:
        return self.output / "stages" / f"{stage.name}.json"

    def _remembered(self, stage: Stage) -> dict:
        """What the stage's file holds: "key" if it was begun, with "result", "seconds" and "files" if it was done."""
        return read_json_object(self._file(stage))

    def _is_done(self, stage: Stage, before: dict, key: str) -> bool:
        return before.get("key") == key and "result" in before and self._count_files(stage) >= before["files"]

    def _do(self, stage: Stage, before: dict, key: str) -> dict:
        # What the same work left when it was killed is gone on from. What another work left, or what was whole and is
        # no more, is of no use.
        if before.get("key") != key or "result" in before:
            self._remove(stage)
        write_json(self._file(stage), {"key": key})
        started = time.monotonic()
        with open(self._file(stage).with_suffix(".txt"), "w", encoding="utf-8") as log, redirect_stdout(log):
            result = stage.work()
        done = {
            "key": key,
            "seconds": round(time.monotonic() - started, 1),
            "files": self._count_files(stage),
            "result": result,
        }
        write_json(self._file(stage), done)
        return done

    def _count_files(self, stage: Stage) -> int:
        """Files that the stage has left, hidden ones not counted."""
        paths = [path for name in stage.leaves for path in (self.output / name, *(self.output / name).rglob("*"))]
        return sum(path.is_file() and not path.name.startswith(".") for path in paths)

    def _remove(self, stage: Stage) -> None:
        for path in (self.output / name for name in stage.leaves):
            if not path.parent.resolve().is_relative_to(self.output.resolve()):
                raise UserError(f"{str(path)!r} leads out of the output folder, so it is not removed. Remove the link.")
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
