"""The loop of every resumable run: steps in order, checkpoints, stopping between steps, bad records, the log."""

import json
import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from ..data.bad_records import (
    BAD_RECORDS,
    FEWEST,
    BadRecord,
    add_bad,
    check_share,
    continue_hint,
    look_up,
    printable,
    report_bad,
)
from ..data.seen import Seen, add_seen
from ..data.sources import data_digest, open_data
from ..data.workers import count_workers, load_batches
from ..devices import explain_memory, pick_precision, to_device
from ..errors import UserError
from ..files import append
from ..jobs import Job
from .batches import GlobalBatches
from .checkpoints import TrainState, load_checkpoint, save_checkpoint
from .config import RunConfig
from .optimizer import AdamW, learning_rate
from .progress import (
    LOG,
    NOT_FINITE,
    Moment,
    Pace,
    Step,
    cut_log,
    few_steps,
    make_accelerator,
    memory_advice,
    pace,
    print_plan,
    tracked,
)

_SAME_REQUEST = 2.0  # seconds within which a launcher forwards a ctrl-C that its processes have already received
PATIENCE = 3  # steps in a row whose loss is not finite before a run stops
# Settings that say where something lies: what lies there is compared by its contents.
_PLACES = ("data", "images", "model", "pretrained", "text_from", "base", "encoder", "encoder_2")


class StopRequest:
    """Whether SIGTERM (Slurm, spot machines) or ctrl-C has asked a run to stop.

    The current step is finished first, so that a checkpoint is of a complete step. A second ctrl-C stops at once; a
    second SIGTERM does not, because schedulers repeat it and launchers forward it.

    Attributes:
        heard: whether the numbers of a step said that any process was asked.
    """

    def __init__(self):
        self.heard = False
        self._asked_at: float | None = None

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        previous = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _ask(self, signum, frame) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif signum == signal.SIGINT and now - self._asked_at > _SAME_REQUEST:
            raise KeyboardInterrupt

    @property
    def here(self) -> bool:
        """Whether this process was asked."""
        return self._asked_at is not None


class Run(ABC):
    """The state of one run in its folder.

    A subclass sets, in `__init__` and `prepare`, the attributes that this class leaves open, and writes `prepare`,
    `backward`, `measure`, `describe` and `finish`.

    Attributes:
        batch, warmup, workers, precision: what is `auto` in `config`, in numbers or as "fp32", "bf16" or "fp16".
        main: whether this is the main process, which prints and writes.
        all_records: the usable ones; `held_out` is measured on, `choosing` chooses the best model, `records` is trained
            on.
        images: where their images come from, or a cache of their features.
        missing: how many of the records that were looked up cannot be used.
        job: what lies in the output, while `run` runs.
        settings: everything that decides the result; a subclass adds the rest.
        inputs: digests of data and models; likewise.
        seen_before: the records of the models that the run begins with.
        model: what is trained and what a checkpoint holds.
        modules: further modules that are trained, or None.
        frozen: weights on the device that are neither.
        optimizer: of both.
        dataset: samples by key.
        collate: samples to a batch, with attributes `bad` and `sample_ids`.
    """

    command = "train"
    title = "training"  # of the progress bar
    job: Job
    reads_short = False  # whether a record without a short caption is bad
    seen_before: Sequence[Seen] = ()
    model: nn.Module
    modules: nn.Module | None = None
    frozen: Sequence[Tensor] = ()
    optimizer: AdamW
    dataset: Dataset
    collate: Callable

    def __init__(self, config: RunConfig):
        self.config, self.folder = config, Path(config.output)
        accelerator = self.accelerator = make_accelerator(config)
        self.main = accelerator.is_main_process
        self.captions, self.images = open_data(config.data, config.images)
        records = self.all_records = self.captions.records
        validation = config.held_out_count(len(records))
        first = validation + config.keep_best
        self.batch = batch = config.batch_size(len(records) - first)
        if batch % accelerator.num_processes:
            raise UserError(f"batch is {batch}, but must be a multiple of the {accelerator.num_processes} processes.")
        if len(records) - first < batch:
            raise UserError(
                f"{len(records)} usable pairs less {first} held out leave {max(0, len(records) - first)} to train on, "
                f"fewer than a batch of {batch}. Lower --validation, --keep-best or --batch, or give more pairs."
            )
        self.held_out, self.choosing, self.records = records[:validation], records[validation:first], records[first:]
        self.missing = look_up(self.records, self.images, config.max_bad, self.reads_short)
        self.inputs = {"data": data_digest(config.data, self.captions)}
        self.batches = GlobalBatches(len(self.records), batch, config.epochs, config.seed, config.max_steps)
        self.warmup, self.workers = config.warmup_steps(self.batches.total_steps), count_workers(config.workers)
        self.precision = pick_precision(config.precision, accelerator.device)
        numbers = {"validation": validation, "batch": batch, "warmup": self.warmup, "precision": self.precision}
        self.settings = config.settings() | numbers

    @abstractmethod
    def prepare(self) -> None:
        """Sets `dataset`. Features that are computed before the first step are computed here."""

    def begin(self, state: TrainState) -> None:  # noqa: B027
        """Called on every process before the steps that are left."""

    @abstractmethod
    def backward(self, batch) -> dict[str, Tensor]:
        """Leaves the gradients of the global batch's loss in the parameters, on every process.

        Returns:
            "loss", "gradient_norm" and what else is logged, scalars of the device, on every process the same.
        """

    @abstractmethod
    def measure(self, state: TrainState) -> None:
        """Measures the model between two steps; called in the main process."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """The first lines of the plan, by what they are about."""

    @abstractmethod
    def finish(self, state: TrainState) -> Path:
        """Writes the models after the last step, and says what comes next. Returns where they are."""

    def run(self) -> Path | None:
        """Makes the steps that are left, and what follows. None if the run was asked to stop before the last.

        Raises:
            UserError: the folder belongs to a run with other settings, too many records are bad, or the memory does not
                suffice.
        """
        job = nullcontext(Job.read(self.folder))  # of processes that only read
        if self.main:
            job = Job.open(self.folder, self.command, self.settings, self.inputs, may_change=_PLACES)
        with job as self.job:
            bad = self.captions.bad
            self.check_bad(bad, len(self.all_records) + len(bad), is_reported=bool(self.job.names()))
            self.prepare()
            with StopRequest().listening() as request:
                state = self.make_steps(request)
                result = state and self.finish(state)
                self.accelerator.wait_for_everyone()
                return result

    def check_bad(self, bad: Sequence[BadRecord], count: int, is_reported: bool = False) -> None:
        """Reports the bad ones of `count` records. Raises UserError if they are too many."""
        if self.main and not is_reported:
            report_bad(bad, self.folder)
        check_share(bad, count, self.config.max_bad, continue_hint(self.config.output, bad))

    def make_steps(self, request: StopRequest) -> TrainState | None:
        """Makes the steps that are left. None if the run was asked to stop before the last."""
        config, accelerator, total = self.config, self.accelerator, self.batches.total_steps
        state = load_checkpoint(self.job, self.model, self.optimizer, self.modules)
        if self.main:
            if state.step < total:
                print_plan(self, state.step)
            for log in (LOG, NOT_FINITE):
                cut_log(self.folder / log, state.step)
        loader = DataLoader(
            self.dataset,
            batch_sampler=self.batches.iterate(state.step, accelerator.process_index, accelerator.num_processes),
            collate_fn=self.collate,
            num_workers=self.workers,
            pin_memory=accelerator.device.type == "cuda",
        )
        with tracked(accelerator, config, self.settings):
            if state.step == 0 and self.main:
                self.measure(state)
            self.begin(state)
            with (
                explain_memory(accelerator.device, memory_advice(self)),
                load_batches(loader) as batches,
                tqdm(total=total, initial=state.step, desc=self.title, unit=" steps", disable=not self.main) as bar,
            ):
                pace = Pace(total, self.batch, accelerator.device, partial(self._note, state, bar, request))
                for batch in batches:
                    pace.add(self._start(batch, state, request))
                    is_last = state.step == total
                    stop = (request.heard or (request.here and accelerator.num_processes == 1)) and not is_last
                    measures = state.step % config.eval_every == 0 or is_last
                    saves = state.step % config.checkpoint_every == 0 or is_last or stop
                    if measures or saves:
                        with pace.pause():
                            if measures and self.main:
                                self.measure(state)
                            if saves and self.main:
                                save_checkpoint(self.job, self.model, self.optimizer, state, config.keep, self.modules)
                            accelerator.wait_for_everyone()
                    if stop:
                        self.say(f"Stopped after step {state.step} of {total}. The same command continues from there.")
                        return None
        return state

    def _start(self, batch, state: TrainState, request: StopRequest) -> Step:
        """Gives the device the next step, and waits for no number of it."""
        config, device = self.config, self.accelerator.device
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        begun = Moment(device)
        # Only a model that drops patches draws random numbers in a step; a resumed run must draw the same.
        torch.manual_seed((config.seed << 32) + state.step * world + rank)
        rate = learning_rate(state.step, self.batches.total_steps, config.learning_rate, self.warmup)
        report = self.backward(batch)
        is_applied = self.optimizer.step(rate, report)
        state.step += 1
        counts = to_device(torch.tensor([len(batch.bad), request.here]), device)
        numbers = torch.stack([is_applied, *self.accelerator.reduce(counts, reduction="sum"), *report.values()])
        numbers = numbers.to("cpu", non_blocking=numbers.is_cuda)  # into pinned memory
        return Step(state.step, rate, batch, list(report), numbers, begun, Moment(device))

    def _note(self, state: TrainState, bar: tqdm, request: StopRequest, step: Step) -> None:
        """Logs and shows the numbers of a step; see `Pace`."""
        is_applied, replaced, is_asked, *values = step.numbers.tolist()
        report = dict(zip(step.names, values, strict=True))
        request.heard |= is_asked > 0
        if is_applied:
            state.not_finite = 0
        else:
            self._note_skipped(step, state, report)
        self._note_replaced(step, state, int(replaced))
        speed = self.batch / step.seconds
        bar.update()
        bar.set_postfix(loss=f"{report['loss']:.4f}", pairs_per_s=pace(speed))
        if step.words:
            self.say(f"step {step.number}: {step.words}")
        is_due = step.number % self.config.log_every == 0 or step.number == self.batches.total_steps or step.words
        if self.main and is_applied and is_due:
            numbers = {name: value for name, value in report.items() if math.isfinite(value)}
            epoch = round(step.number * self.batch / self.batches.records, 4)
            line = {"step": step.number, "epoch": epoch, **numbers, "learning_rate": step.learning_rate}
            self.log(line | {"samples_per_second": round(speed, 2)} | step.took)

    def _note_skipped(self, step: Step, state: TrainState, report: dict[str, float]) -> None:
        """Logs the samples of a step that is not finite. Raises UserError after too many such steps in a row."""
        state.not_finite += 1
        samples = gather_object(step.batch.sample_ids)
        number = "loss" if not math.isfinite(report["loss"]) else "gradient"
        if self.main:
            line = {"step": step.number, "not_finite": number, "samples": samples}
            append(self.folder / NOT_FINITE, json.dumps(line))
            append(self.folder / LOG, json.dumps(line | {"samples": len(samples)}))
        skipped = f"The {number} of step {step.number} is not finite; the step was not applied"
        if state.not_finite == PATIENCE:
            raise UserError(
                f"{skipped}, like the {PATIENCE - 1} before it. The last checkpoint is unharmed, and the samples are "
                f"named in {str(self.folder / NOT_FINITE)!r}. Look at them, or start again with a lower "
                "--learning-rate or another --precision."
            )
        self.say(f"{skipped}. Its samples are named in {self.folder / NOT_FINITE}.")

    def _note_replaced(self, step: Step, state: TrainState, count: int) -> None:
        """Logs the bad records of this process's batch, of `count` in all. Raises UserError when there are too many."""
        if bad := step.batch.bad:
            add_bad(bad, self.folder)
            tqdm.write(f"replaced {printable(bad[0].where)}: {bad[0].kind} (all in {self.folder / BAD_RECORDS})")
        state.replaced += count
        if count:
            # The share of a few samples says nothing about the rest.
            seen = max(step.number * self.batch, min(FEWEST, len(self.records)))
            check_share(bad, seen, self.config.max_bad, continue_hint(self.config.output, bad), state.replaced)

    def seen(self, first: int | None = None) -> Seen:
        """The record of a model that the pairs from `first` on have trained or chosen; None: from `records` on."""
        count = len(self.all_records)
        first = count - len(self.records) if first is None else first
        return add_seen(self.seen_before, self.inputs["data"], range(first, count))

    def say_done(self, state: TrainState, rest: str = "") -> None:
        few = few_steps(self)
        few = f" {few} Give it another --output." if few else ""
        self.say(f"Done: {state.step} steps; {state.replaced} unreadable records were replaced{rest}.{few}")

    def log(self, line: dict) -> None:
        """A line in log.jsonl, and its numbers in the trackers."""
        append(self.folder / LOG, json.dumps(line))
        numbers = {name: value for name, value in line.items() if name not in ("step", "seconds")}
        self.accelerator.log(numbers, step=line["step"])

    def say(self, line: str) -> None:
        if self.main:
            tqdm.write(line)
