"""What a run says of itself: its plan before it starts, what its steps take, and its logs and trackers."""

import hashlib
import importlib.util
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch._dynamo.utils import counters

from ..devices import end_group_at_exit
from ..errors import UserError, explain_failure
from ..files import atomic_file, read_file
from .config import RunConfig
from .step import parameters

GB = 1e9
LOG, NOT_FINITE = "log.jsonl", "not-finite.jsonl"  # of each step, and of steps that were skipped
FEW_STEPS, ENOUGH_STEPS = 100, 300  # a run of fewer is told how to make enough
_PROJECT = "debias-diffusion"
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
    sized = f" (auto: {config.LARGEST_BATCH}, of small data fewer; --batch)" if config.batch == "auto" else ""
    chunks = f" in chunks of {config.chunk}" if config.chunk else ""
    rest = f"; the last {batches.remainder} pairs fill no step" if batches.remainder else ""
    chosen = " (auto: 1,000, of small data a tenth; --validation)" if config.validation == "auto" else ""
    choosing = f"; {config.keep_best} more choose the best model" if config.keep_best else ""
    lines = run.describe() | {
        "pairs": f"{batches.records} to train on; {len(run.held_out)} held out{chosen}{choosing}",
        "steps": f"{total} of {run.batch} pairs{sized}{chunks} ({total * run.batch / batches.records:.2f} epochs)"
        f"{made}{rest}; {run.warmup} of warm-up",
        "machine": f"{run.accelerator.num_processes} x {run.accelerator.device.type}, {run.precision}; "
        f"{run.workers} workers read data for each",
        "memory": f"{state_bytes(run) / GB:.2f} GB a process for weights, gradients and AdamW, beside activations",
        "disk": f"{disk / GB:.2f} GB in {config.output}; {free / GB:.1f} free",
    }
    print("\n".join(f"  {name:<8}{line}" for name, line in lines.items()))
    if run.missing:
        print(f"  {run.missing} of the records that were looked up cannot be used; others replace them.")
    if few := few_steps(run):
        print(f"  {few}")


def few_steps(run) -> str:
    """That a run of few steps, or of warm-up alone, changes little, and what changes more; empty for any other."""
    total, config = run.batches.total_steps, run.config
    lines = []
    if total < FEW_STEPS:
        epochs = max(config.epochs, math.ceil(ENOUGH_STEPS * run.batch / run.batches.records))
        cap = f" --max-steps {ENOUGH_STEPS}" if config.max_steps else ""
        steps = f"{total} step{'s' * (total > 1)}"
        lines = [f"Little will have changed after {steps}; --epochs {epochs}{cap} makes {ENOUGH_STEPS}."]
    if run.warmup >= total:
        lines.append(f"Every step is warm-up: the learning rate only rises. --warmup {total // 10} is enough.")
    return " ".join(lines)


def memory_advice(run) -> str:
    """What to do where the memory of a process does not suffice for a step."""
    config = run.config
    local = run.batch // run.accelerator.num_processes
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


@dataclass
class Step:
    """A step that the device was given: what is noted of it when it is made. `Pace` sets the last three."""

    number: int
    learning_rate: float
    batch: Any
    names: list[str]  # of its report
    numbers: Tensor  # whether it was applied, records replaced, processes asked to stop; its report
    begun: Moment  # when its batch was there, and the step before was made
    made: Moment  # when it is, and the numbers are on the host
    seconds: float = 0.0  # since the step before was made
    took: dict = field(default_factory=dict)  # what is logged of that: at some steps of what the last ones took
    words: str = ""  # what these took, at such a step


class Pace:
    """Notes each step when the next one was given to the device, so that a GPU need not wait for the host; and measures
    what steps take, over the second and third that compiled nothing, then over each tenth of the run.

    Args:
        total: steps of the run.
        batch: pairs of a step, over all processes.
        device: whose memory is measured, if it is a GPU.
        note: takes a made step.
    """

    def __init__(self, total: int, batch: int, device: torch.device, note: Callable[[Step], None]):
        self.total, self.batch, self.device, self.note = total, batch, device, note
        self._previous, self._given = Moment(device), None  # when the last noted step was made; the step to note
        self._took: list[tuple[float, float]] = []  # of the next line: seconds, and those of them that it waited
        self._graphs, self._lines = counters["stats"]["unique_graphs"], 0

    def add(self, step: Step) -> None:
        """Notes the step before this one."""
        self._note()
        self._given = step

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Notes the last step; what is done then is no part of the next."""
        self._note()
        yield
        self._previous = Moment(self.device)

    def _note(self) -> None:
        step, self._given = self._given, None
        if step is not None:
            step.made.wait()
            step.seconds, waited = step.made.since(self._previous), step.begun.since(self._previous)
            step.took, step.words = self._measure(step, waited)
            self._previous = step.made
            self.note(step)

    def _measure(self, step: Step, waited: float) -> tuple[dict, str]:
        """What the step took; if a line is due, what the steps since the last one took, in words too."""
        before, self._graphs = self._graphs, counters["stats"]["unique_graphs"]
        self._took = [*self._took, (step.seconds, waited)] if self._graphs == before else []
        is_due = step.number % max(3, math.ceil(self.total / 10)) == 0 if self._lines else len(self._took) == 3
        if not (is_due and self._took):
            return {"seconds": {"step": round(step.seconds, 4), "waiting": round(waited, 4)}}, ""
        steps = self._took[not self._lines :]  # the first of all warms up
        self._took, self._lines = [], self._lines + 1
        mean, waiting = (sum(column) / len(steps) for column in zip(*steps, strict=True))
        left = mean * (self.total - step.number)
        numbers: dict = {"seconds": {"step": round(mean, 4), "waiting": round(waiting, 4), "left": round(left, 1)}}
        line = f"{mean:.2g} s a step, {pace(self.batch / mean)} pairs a second, {waiting / mean:.0%} of the time "
        line += f"waiting for data; {duration(left)} to the end"
        if self.device.type == "cuda":
            numbers["peak_gb"] = round(torch.cuda.max_memory_allocated(self.device) / GB, 2)
            line += f"; {numbers['peak_gb']} GB of memory at the peak"
        slow = "; more --workers, or small images by `debias-diffusion shards --size`, would be faster"
        return numbers, line + slow * (waiting > _WAITS * mean)


def pace(pairs: float) -> str:
    """A number of pairs a second, which is below 1 on slow machines: "1,024", "0.48"."""
    return f"{pairs:,.0f}" if pairs >= 10 else f"{pairs:.2g}"


def duration(seconds: float) -> str:
    """Seconds in a readable unit: '40 s', '12 min', '5.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# ---- logs


def cut_log(file: Path, step: int) -> None:
    """Removes lines after `step`, which will be written again (all if the run starts again), and unreadable lines,
    which a kill or a damaged disk left."""
    if not file.exists():
        return
    lines = read_file(file).splitlines(keepends=True)
    kept = [line for line in lines if step > 0 and _step_of(line) <= step]
    if kept != lines:
        with atomic_file(file) as temporary:
            temporary.write_bytes(b"".join(kept))


def _step_of(line: bytes) -> float:
    """The step of a line of a log; infinity where it cannot be read."""
    with suppress(ValueError, TypeError, LookupError, RecursionError):
        if type(step := json.loads(line)["step"]) is int and line.endswith(b"}\n"):
            return step
    return math.inf


def make_accelerator(config: RunConfig) -> Accelerator:
    """accelerate's Accelerator with the trackers of `config`, which write to the output folder.

    Raises:
        UserError: a tracker is not installed.
    """
    names = config.trackers
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"The tracker {name!r} is not installed. `pip install {name}`, or leave it out.")
    accelerator = Accelerator(log_with=names or None, project_dir=config.output)
    end_group_at_exit()
    return accelerator


@contextmanager
def tracked(accelerator: Accelerator, config: RunConfig, settings: dict) -> Iterator[None]:
    """Keeps the trackers open; a resumed run continues its curves.

    Raises:
        UserError: one of them cannot be started.
    """
    path = Path(config.output).resolve()
    wandb = {
        "name": path.name,
        "dir": str(path),
        "id": hashlib.sha256(str(path).encode()).hexdigest()[:16],
        "resume": "allow",
    }
    plain = {name: value for name, value in settings.items() if isinstance(value, (int, float, str, bool))}
    with explain_failure(f"The trackers {', '.join(config.trackers)} could not be started"):
        accelerator.init_trackers(_PROJECT, config=plain, init_kwargs={"wandb": wandb})
    try:
        yield
    finally:
        # Not `accelerator.end_training()`, which also ends the process group before the last model is written.
        for tracker in accelerator.trackers:
            tracker.finish()
