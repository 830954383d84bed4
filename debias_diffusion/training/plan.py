"""What a run will do, counted before it starts, and what its steps take, measured while it runs."""

import shutil
import time
from math import ceil
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from ..errors import UserError
from .step import parameters

GB = 1e9
_WAITS = 0.1  # share of the time that steps wait for data, above which a run is told how to wait less


def check_disk(folder: Path, needed: int, contents: str, advice: str) -> int:
    """Free bytes on the disk of `folder`. Raises UserError if they and the files there already are below `needed`."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free + sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < needed:
        raise UserError(
            f"{contents} take {needed / GB:.1f} GB in {str(folder)!r}, and {free / GB:.1f} GB are free. {advice}"
        )
    return free


def state_bytes(run) -> int:
    """Of the weights in a process, frozen ones too, and of the gradients and AdamW's two averages of those trained."""
    model = parameters(run.model, run.modules)
    return sum(p.nbytes * (4 if p.requires_grad else 1) for p in model) + sum(p.nbytes for p in run.frozen)


def print_plan(run, start: int) -> None:
    """Prints what the steps of a run from `start` on will do.

    Raises:
        UserError: the disk has no room for the checkpoints.
    """
    config, batches = run.config, run.batches
    model = list(parameters(run.model, run.modules))
    saved, trained = sum(p.nbytes for p in model), sum(p.nbytes for p in model if p.requires_grad)
    # Checkpoints, one more than are kept while it is written, and the models.
    disk = (saved + 2 * trained) * (config.keep + 1) + (2 if config.keep_best else 1) * saved
    free = check_disk(run.folder, disk, "Checkpoints and models", "Make room, or give another --output.")
    total, made = batches.total_steps, f", {start} of them made" if start else ""
    sized = f" (auto: {config.LARGEST_BATCH}, of small data fewer; --batch)" if run.given.batch == "auto" else ""
    chunks = f" in chunks of {config.chunk}" if config.chunk else ""
    rest = f"; the last {batches.remainder} pairs fill no step" if batches.remainder else ""
    chosen = " (auto: 1,000, of small data a tenth; --validation)" if run.given.validation == "auto" else ""
    choosing = f"; {config.keep_best} more choose the best model" if config.keep_best else ""
    lines = run.describe() | {
        "pairs": f"{batches.records} to train on; {len(run.held_out)} held out{chosen}{choosing}",
        "steps": f"{total} of {config.batch} pairs{sized}{chunks} ({total * config.batch / batches.records:.2f} epochs)"
        f"{made}{rest}; {config.warmup} of warm-up",
        "machine": f"{run.accelerator.num_processes} x {run.accelerator.device.type}, {run.precision}; "
        f"{config.workers} workers read data for each",
        "memory": f"{state_bytes(run) / GB:.2f} GB a process for weights, gradients and AdamW, beside activations",
        "disk": f"{disk / GB:.2f} GB in {config.output}; {free / GB:.1f} free",
    }
    print("\n".join(f"  {name:<8}{line}" for name, line in lines.items()))


def memory_advice(run) -> str:
    """What to do where the memory of a process does not suffice for a step."""
    config = run.config
    local = config.batch // run.accelerator.num_processes
    at_once = min(local, config.chunk or local)
    advice = f"--chunk {at_once // 2}, which gives the same gradient" if at_once > 1 else "--checkpoint-activations"
    states = f"{state_bytes(run) / GB:.2f} GB of weights, gradients and AdamW"
    return f"A process holds {states}, and the activations of {at_once} pairs. Start the same command with {advice}."


class Moment:
    """When a GPU has done what it was given so far; on any other device, now."""

    def __init__(self, device: torch.device):
        self._seconds, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: "Moment") -> float:
        """Seconds between two moments, for the later of which somebody has waited."""
        if self._event is None:
            return self._seconds - earlier._seconds
        return earlier._event.elapsed_time(self._event) / 1000


class Pace:
    """What steps take: measured over the second and third step that compiled nothing, then over each tenth of the run.

    Args:
        total: steps of the run.
        batch: pairs of a step, over all processes.
        device: whose memory is measured, if it is a GPU.
    """

    def __init__(self, total: int, batch: int, device: torch.device):
        self.total, self.batch, self.device = total, batch, device
        self._steps: list[tuple[float, float]] = []  # of the next line: seconds, and those of them that it waited
        self._graphs, self._lines = counters["stats"]["unique_graphs"], 0

    def add(self, step: int, seconds: float, waited: float) -> tuple[dict, str]:
        """For log.jsonl and for the user, what the steps since the last such line took; empty if none is due yet.

        Args:
            step: how many are made.
            seconds: that it took, with the wait for its batch.
            waited: seconds that it waited for its batch.
        """
        before, self._graphs = self._graphs, counters["stats"]["unique_graphs"]
        self._steps = [*self._steps, (seconds, waited)] if self._graphs == before else []
        is_due = step % max(3, ceil(self.total / 10)) == 0 if self._lines else len(self._steps) == 3
        if not (is_due and self._steps):
            return {}, ""
        steps = self._steps[not self._lines :]  # the first of all warms up
        self._steps, self._lines = [], self._lines + 1
        mean, waiting = (sum(column) / len(steps) for column in zip(*steps, strict=True))
        left = mean * (self.total - step)
        numbers: dict = {"seconds": {"step": round(mean, 4), "waiting": round(waiting, 4), "left": round(left, 1)}}
        line = f"{mean:.2g} s a step, {self.batch / mean:,.0f} pairs a second, {waiting / mean:.0%} of the time waiting"
        line += f" for data; {duration(left)} to the end"
        if self.device.type == "cuda":
            numbers["peak_gb"] = round(torch.cuda.max_memory_allocated(self.device) / GB, 2)
            line += f"; {numbers['peak_gb']} GB of memory at the peak"
        slow = "; more --workers, or small images by `debias-diffusion shards --size`, would be faster"
        return numbers, line + slow * (waiting > _WAITS * mean)


def duration(seconds: float) -> str:
    """Seconds in a readable unit: '40 s', '12 min', '5.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
