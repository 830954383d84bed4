"""What all benchmarks share: their options, rounds in turns, and where results are written."""

import argparse
import ctypes
import gc
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from debias_diffusion.devices import machine_name, seconds
from debias_diffusion.eval.report import Table, versions
from debias_diffusion.files import write_json, write_text

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")


def read_options(description: str, **defaults: Any) -> argparse.Namespace:
    """The options on the command line, `--batch-size` for `batch_size`, each of the type of its default.

    Args:
        defaults: of a list, any number of its values (of an empty one, whole numbers); of a tuple, one of its values,
            the first unless given; False: a flag; None: text.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(flag, choices=default, default=default[0])
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="*", type=type(default[0]) if default else int, default=default)
        else:
            parser.add_argument(flag, type=str if default is None else type(default), default=default)
    return parser.parse_args()


def by_turns(
    variants: Mapping[str, Callable] | Callable[[int], Mapping[str, Callable]],
    rounds: int,
    measure: Callable[[Callable], Any],
) -> dict[str, list]:
    """What `measure` gives for each variant in each round; they take turns, so that other work falls on all alike.

    Args:
        variants: by name, or what makes those of a round; round 0 comes first and is not counted.
        measure: a variant -> seconds, or whatever is measured.
    """
    measured: dict[str, list] = {}
    for number in tqdm(range(rounds + 1), desc="rounds, the first uncounted"):
        for name, run in (variants(number) if callable(variants) else variants).items():
            result = measure(run)
            if number:
                measured.setdefault(name, []).append(result)
    return measured


def median_seconds(variants: Mapping[str, Callable], rounds: int, device: torch.device) -> dict[str, float]:
    """The median seconds of each variant, in turns."""
    times = by_turns(variants, rounds, lambda run: seconds(run, device))
    return {name: statistics.median(values) for name, values in times.items()}


def publish(
    name: str, measured: Mapping, *parts: Table | str, device: torch.device = CPU, folder: Path = RESULTS
) -> None:
    """Prints tables and text, and writes them to NAME.md in the folder, with the numbers as NAME.json.

    Args:
        measured: what the JSON holds, beside the machine and the versions of libraries.
    """
    text = "\n\n".join(part.markdown() if isinstance(part, Table) else part for part in parts) + "\n"
    print("\n" + text)
    folder.mkdir(exist_ok=True)
    write_json(folder / f"{name}.json", {"machine": machine_name(device), "versions": versions()} | measured)
    write_text(folder / f"{name}.md", text)


class PeakMemory:
    """By how many bytes the memory in use grew at most since `start`: of the GPU's allocator, or of this process.

    A process's peak can begin anew on Linux alone; elsewhere `read` gives None.
    """

    def __init__(self, device: torch.device):
        self.device, self._before = device, 0

    def start(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif Path("/proc/self/clear_refs").exists():
            ctypes.CDLL(None).malloc_trim(0)  # or what was freed and not given back would count as in use
            Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is in use now
        self._before = self._peak() or 0

    def read(self) -> int | None:
        peak = self._peak()
        return None if peak is None else peak - self._before

    def _peak(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
