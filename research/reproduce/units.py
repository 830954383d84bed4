"""Units of work that any number of processes share through one job: each is done once, and done again if killed."""

import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from debias_diffusion.files import read_json, write_json
from debias_diffusion.jobs import Job

from .contents import PAUSE

RESULT, LOG, BEGUN = "result.json", "console.txt", "begun"


@dataclass(frozen=True)
class Unit:
    """A piece of work with a folder of its own.

    Attributes:
        name: path of its folder in the job's, with a digest of all that decides the result.
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


def is_done(job: Job, name: str) -> bool:
    """Whether a unit is done, and its result whole."""
    return job.path(f"{name}/{RESULT}", damaged="absent") is not None


def result_of(job: Job, name: str) -> dict:
    """What a finished unit has returned, as "content"; every `program` that had a part in it, as "made_with"."""
    return read_json(job.path(f"{name}/{RESULT}"))


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


def run_units(units: Mapping[str, Unit], job: Job, say: Callable[[str], None] = print) -> None:
    """Does what is not done, until all is. Processes with the same job share the units.

    A process that finds no free unit waits for those that the waiting ones need. A unit whose process was killed is
    free again, because the system releases its lock.

    Args:
        units: by name, with everything that they need.
        say: prints a line.
    """
    for name in units:
        if f"{name}/{RESULT}" in job and not is_done(job, name):  # damaged
            job.remove(f"{name}/{RESULT}")
    while missing := units.keys() - {result.removesuffix(f"/{RESULT}") for result in job.names()}:
        ready = [unit for name, unit in units.items() if name in missing and not missing & set(unit.needs)]
        ready.sort(key=lambda unit: (unit.name.split("/")[0], -unit.cost))  # a seed is whole before the next begins
        if not any(_claim(unit, job, f"{len(missing)} of {len(units)} left", say) for unit in ready):
            time.sleep(PAUSE)


def _claim(unit: Unit, job: Job, left: str, say: Callable[[str], None]) -> bool:
    """Whether the unit was free, and has been done now."""
    result = f"{unit.name}/{RESULT}"
    with job.claim(result) as is_free:
        if is_free:
            say(f"[{left}] {unit.title}")
            started, folder = time.monotonic(), job.folder / unit.name
            folder.mkdir(parents=True, exist_ok=True)
            # A killed unit may go on with another commit.
            begun = f"{unit.name}/{BEGUN}"
            programs = job.notes(begun)["programs"] if begun in job else []
            if program() not in programs:
                programs = [*programs, program()]
                job.note(begun, programs=programs)
            with open(folder / LOG, "a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
                content = unit.work(folder)
            with job.write(result, title=unit.title, seconds=round(time.monotonic() - started, 1)) as temporary:
                write_json(temporary, {"made_with": programs, "content": content})
    return is_free
