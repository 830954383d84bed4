"""Units of work that any number of processes share through one folder: each is done once, and again if killed."""

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from debias_diffusion.files import file_lock, read_checked, with_checksum, write_json

RESULT, LOG, BEGUN = "result.json", "console.txt", "begun.json"
PAUSE = 2.0  # seconds between two looks for what another process is doing


@dataclass(frozen=True)
class Unit:
    """A piece of work with a folder of its own.

    Attributes:
        name: path of its folder in that of all, with a digest of all that decides the result.
        title: for the console.
        work: fills the folder, continues there if it was killed, and returns JSON values to keep.
        needs: names of the units that must be done before.
        cost: of the work, in seconds; the dearest free unit of the first seed is taken first.
    """

    name: str
    title: str
    work: Callable[[Path], dict]
    needs: tuple[str, ...] = ()
    cost: float = 0.0


def result_of(folder: Path, name: str) -> dict | None:
    """What a finished unit has returned, as "content"; every `program` that had a part in it, as "made_with". None if
    it is not done, or its result was changed or is damaged.
    """
    return read_checked(folder / name / RESULT)


@cache
def program() -> dict[str, str]:
    """The package's "version", and in a checkout its "commit", as they were when this process first asked."""
    commit = commit_of(Path(__file__))
    return {"version": version("debias-diffusion")} | ({"commit": commit} if commit else {})


def commit_of(file: Path) -> str:
    """The commit of a checkout that a file belongs to, with "-dirty" where something was changed since; "" of none."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # an environment may lie in a checkout of something else
        return git("describe", "--always", "--abbrev=12", "--dirty", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return ""


def run_units(units: Mapping[str, Unit], folder: Path, say: Callable[[str], None] = print) -> None:
    """Does what is not done, until all is. Processes with the same folder share the units.

    A process that finds no free unit waits for those that the waiting ones need. A unit whose process was killed is
    free again, because the system releases its lock.

    Args:
        units: by name, with everything that they need.
        say: prints a line.
    """
    missing = {*units}
    while missing := {name for name in missing if result_of(folder, name) is None}:
        ready = [unit for name, unit in units.items() if name in missing and not missing & set(unit.needs)]
        ready.sort(key=lambda unit: (unit.name.split("/")[0], -unit.cost))  # a seed is whole before the next begins
        if not any(_claim(unit, folder / unit.name, f"{len(missing)} of {len(units)} left", say) for unit in ready):
            time.sleep(PAUSE)


def _claim(unit: Unit, folder: Path, left: str, say: Callable[[str], None]) -> bool:
    """Whether the unit was free, and has been done now."""
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / ".unit.lock") as is_free:
        if is_free and (is_free := read_checked(folder / RESULT) is None):
            say(f"[{left}] {unit.title}")
            # A killed unit may go on with another commit.
            programs = (read_checked(folder / BEGUN) or {"programs": []})["programs"]
            if program() not in programs:
                programs = [*programs, program()]
                write_json(folder / BEGUN, with_checksum({"programs": programs}))
            with open(folder / LOG, "a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
                content = json.loads(json.dumps(unit.work(folder)))
            write_json(folder / RESULT, with_checksum({"made_with": programs, "content": content}))
    return is_free
