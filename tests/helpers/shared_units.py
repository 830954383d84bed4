"""Units of work for processes that `test_reproduce` forks."""

import os
import time
from pathlib import Path

COUNT = 12
SUM = "sum"


def count_units(job):
    """`COUNT` units that note each time they are done, and one that needs them all."""
    from debias_diffusion.app.reproduce.units import Unit, result_of

    def note(folder: Path) -> dict:
        with open(folder / "times.txt", "a") as times:
            times.write("done\n")
        time.sleep(0.05)
        return {"number": int(folder.name)}

    def add(folder: Path) -> dict:
        return {"total": sum(result_of(job, str(number))["number"] for number in range(COUNT))}

    units = {str(number): Unit(str(number), f"unit {number}", note) for number in range(COUNT)}
    return units | {SUM: Unit(SUM, "the sum", add, tuple(units))}


def do_all(output, screen):
    """The body of a process: all units, its lines in the file `screen`."""
    from debias_diffusion.app.reproduce import units
    from debias_diffusion.jobs import Job

    units.PAUSE = 0.05
    with open(screen, "w") as lines, Job.open(output, "reproduce", shared=True) as job:
        units.run_units(count_units(job), job, lambda line: print(line, file=lines, flush=True))


def die_within(output):
    """The body of a process that is killed in the middle of its first unit."""
    from debias_diffusion.app.reproduce.units import Unit, run_units
    from debias_diffusion.jobs import Job

    def die(folder: Path) -> dict:
        (folder / "half.txt").write_text("half")
        os._exit(9)

    with Job.open(output, "reproduce", shared=True) as job:
        run_units({"0": Unit("0", "unit 0", die)}, job)
