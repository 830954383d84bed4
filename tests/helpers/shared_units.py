"""Units of work for processes that `test_reproduce` forks."""

import os
import time
from pathlib import Path

COUNT = 12
SUM = "sum"


def count_units(output):
    """`COUNT` units that note each time they are done, and one that needs them all."""
    from debias_diffusion.app.units import Unit, result_of

    def note(folder: Path) -> dict:
        with open(folder / "times.txt", "a") as times:
            times.write("done\n")
        time.sleep(0.05)
        return {"number": int(folder.name)}

    def add(folder: Path) -> dict:
        note_of = [result_of(output, str(number))["number"] for number in range(COUNT)]
        return {"total": sum(note_of)}

    units = {str(number): Unit(str(number), f"unit {number}", note) for number in range(COUNT)}
    return units | {SUM: Unit(SUM, "the sum", add, tuple(units))}


def do_all(output, screen):
    """The body of a process: all units, its lines in the file `screen`."""
    from debias_diffusion.app import units

    units.PAUSE = 0.05
    with open(screen, "w") as lines:
        units.run_units(count_units(output), output, lambda line: print(line, file=lines, flush=True))


def die_within(output):
    """The body of a process that is killed in the middle of its first unit."""
    from debias_diffusion.app.units import Unit, run_units

    def die(folder: Path) -> dict:
        (folder / "half.txt").write_text("half")
        os._exit(9)

    run_units({"0": Unit("0", "unit 0", die)}, output)
