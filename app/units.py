"""Units of work that any number of processes share through one folder: each is done once, and done again if killed."""

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from debias_diffusion.files import read_json_object, write_json

DONE, LOCKS, LOG = "done.json", ".locks", "console.txt"
PAUSE = 2.0  # seconds between two looks for a unit that has become free


@dataclass(frozen=True)
class Unit:
    """A piece of work with a folder of its own.

    Attributes:
        name: path of its folder in the output.
        title: for the console.
        work: fills the folder, continues there if it was killed, and returns JSON values to keep.
        needs: names of the units that must be done before.
        cost: of the work, in seconds on one core; the dearest free unit of the first seed is taken first.
    """

    name: str
    title: str
    work: Callable[[Path], dict]
    needs: tuple[str, ...] = ()
    cost: float = 0.0


def is_done(output: Path, name: str) -> bool:
    """Whether a unit is done."""
    return (output / name / DONE).is_file()


def result_of(output: Path, name: str) -> dict:
    """What a finished unit has returned."""
    return read_json_object(output / name / DONE).get("result", {})


def run_units(units: Mapping[str, Unit], output: Path, say: Callable[[str], None] = print) -> None:
    """Does what is not done, until all is. Processes with the same output share the units.

    A process that finds no free unit waits for those that the waiting ones need. A unit whose process was killed is
    free again, because the system releases its lock.

    Args:
        units: by name, with everything that they need.
        say: prints a line.
    """
    while missing := [unit for unit in units.values() if not is_done(output, unit.name)]:
        ready = [unit for unit in missing if all(is_done(output, name) for name in unit.needs)]
        ready.sort(key=lambda unit: (unit.name.split("/")[0], -unit.cost))  # a seed is whole before the next begins
        if not any(_claim(unit, output, f"{len(missing)} of {len(units)} left", say) for unit in ready):
            time.sleep(PAUSE)


def unit_lock(output: Path, name: str) -> FileLock:
    """The lock of a unit. It lies apart from the unit's folder, which the work may make anew."""
    folder = output / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.lock", timeout=0)


def _claim(unit: Unit, output: Path, left: str, say: Callable[[str], None]) -> bool:
    """Whether the unit was free, and has been done now."""
    lock = unit_lock(output, unit.name)
    try:
        lock.acquire()
    except Timeout:
        return False
    try:
        if is_done(output, unit.name):
            return True
        say(f"[{left}] {unit.title}")
        started, folder = time.monotonic(), output / unit.name
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / LOG, "a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
            result = unit.work(folder)
        write_json(
            folder / DONE, {"title": unit.title, "seconds": round(time.monotonic() - started, 1), "result": result}
        )
        return True
    finally:
        lock.release()
