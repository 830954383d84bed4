"""The training run: set up, print the plan, make the steps, save the model."""

import math
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..data import BadRecord, data_digest, open_data
from ..data.bad_records import FEWEST, BadRecordsFile, check_count, check_share, printable, report_bad
from ..data.dataset import CaptionDataset, Collate
from ..data.workers import load_batches
from ..errors import UserError
from ..files import explain_full_disk
from ..methods import Batch
from ..retrieval import encode_images, encode_texts, recall_at_k
from .batches import GlobalBatches
from .check import check_data, continue_hint, look_for_images
from .checkpoint import TrainState, load_checkpoint, save_checkpoint
from .config import TrainConfig
from .feature_cache import FrozenTower, cached_images
from .folder import NOT_FINITE, RunFolder
from .plan import PROBE, print_plan
from .schedule import learning_rate
from .setup import base_model_digest, held_out_count, load_base_model, make_modules, prepare_backbone, split
from .step import Optimizer, autocast, backward
from .stop import StopRequest
from .trackers import make_accelerator, tracked

PATIENCE = 3  # steps in a row whose loss is not finite before a run stops


def train(config: TrainConfig) -> Path | None:
    """Runs, or resumes, the training that `config` describes.

    Writes to `config.output`: `best/` and `last/`, open_clip folders that `open_clip.create_model("local-dir:...")`
    loads (the best by R@1 on the held-out pairs, and the one after the last step); `log.jsonl`; `settings.json`;
    `checkpoints/` to resume from; and, where there are any, `bad-records.jsonl` and `not-finite.jsonl` (the samples of
    steps that were skipped because their loss or gradient was not finite).

    Returns:
        The folder of the best model (of the last if nothing is held out); None for `check_data` and for a run that was
        stopped.

    Raises:
        UserError: something in `config` or the data cannot be used; says what to do.
    """
    if config.check_data:
        check_data(config, prepare_backbone(load_base_model(config, name_alone=True), config).tokenizer)
        return None
    accelerator = make_accelerator(config)
    folder = RunFolder(config.output)
    with explain_full_disk(), folder.owned(accelerator.is_main_process):
        return _Run(config, accelerator, folder).run()


class _Run:
    """The state of one run."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator, folder: RunFolder):
        self.config, self.accelerator, self.folder = config, accelerator, folder
        self.main = accelerator.is_main_process
        self.method = config.make_method()
        self.precision = config.resolved_precision(accelerator.device)
        if config.batch % accelerator.num_processes:
            raise UserError(
                f"batch is {config.batch}, but must be a multiple of the {accelerator.num_processes} processes."
            )
        captions, self.images = open_data(config.data, config.images, cache=folder.path)
        self.all_records = captions.records
        # A run keeps the reserve and the held-out pairs it began with: a larger --max-bad must not change the draws.
        begun = folder.settings()
        reserve = begun.get("max_bad", config.max_bad)
        validation = held_out_count(config, len(self.all_records))
        if config.validation == "auto":
            validation = begun.get("validation", validation)
        self.held_out, self.records, spare = split(captions, config, validation, reserve)
        self.missing = look_for_images(self.records, self.images, config.max_bad)
        base_model = load_base_model(config, name_alone=begun.get("pretrained", "") is None)
        base_model_sha256 = base_model_digest(base_model)
        self.backbone = prepare_backbone(base_model, config)
        self.method.check(config.batch, self.backbone.config["model_cfg"]["embed_dim"])
        self.modules = make_modules(self.method, self.backbone, config.seed)
        self.settings = config.settings() | {
            "validation": validation,
            "precision": self.precision,
            "data_sha256": data_digest(config.data, captions),
            "base_model_sha256": base_model_sha256,
            "max_bad": reserve,
        }
        folder.check_settings(self.settings)
        if self.main and not folder.begun:
            report_bad(captions.bad, folder.path)
        everything = len(captions.records) + len(captions.bad)
        check_share(captions.bad, everything, config.max_bad, continue_hint(config))
        self.backbone.to(accelerator.device).train()
        if self.modules is not None:
            self.modules.to(accelerator.device)
        self.optimizer = Optimizer(
            self.backbone, config.weight_decay, config.betas, config.eps, self.precision, self.modules
        )
        self.batches = GlobalBatches(
            len(self.records), config.batch, config.epochs, config.seed, config.max_steps, spare
        )
        self.bad_records = BadRecordsFile(folder.path)
        self.collate = Collate(self.backbone.tokenizer, self.method, config.freeze_image_tower)

    def run(self) -> Path | None:
        request = StopRequest(self.accelerator)
        with request.listening():
            if self.config.freeze_image_tower:
                self._compute_image_features(request)
                if request.asked():
                    self._say("Stopped while image features were computed. The same command continues from there.")
                    return None
            self.dataset = CaptionDataset(
                self.records,
                self.images,
                _unchanged if self.config.freeze_image_tower else self.backbone.read_pixels,
                self.backbone.tokenizer,
                self.method,
                self.config.seed,
                self.batches.reserve,
            )
            return self._train(request)

    def _compute_image_features(self, request: StopRequest) -> None:
        """Computes the features that the cache lacks; from then on images are features, and the image tower rests."""
        config, visual = self.config, self.backbone.model.visual.eval()
        self.images, bad = cached_images(
            FrozenTower(self.backbone, self.accelerator, self.precision),
            self.all_records,
            self.images,
            config.feature_folder(),
            batch=min(64, config.batch),
            workers=config.workers,
            stop=lambda: request.here,
        )
        if self.main:
            report_bad(bad, self.folder.path)
        check_share(bad, len(self.all_records), config.max_bad, continue_hint(config))
        visual.to("cpu")

    def _train(self, request: StopRequest) -> Path | None:
        config, total = self.config, self.batches.total_steps
        state = load_checkpoint(self.folder.checkpoints, self.backbone, self.optimizer, self.modules)
        if self.main:
            if state.step < total:
                self._print_plan(state.step)
            self.folder.claim(self.settings)
            self.folder.cut_log(state.step)
        bar = tqdm(total=total, initial=state.step, desc="training", unit=" steps", disable=not self.main)
        with tracked(self.accelerator, config, self.settings), bar:
            if state.step == 0:
                self._measure_recall(state)
            with load_batches(self._loader(state.step)) as batches:
                started = time.perf_counter()
                for batch in batches:
                    self._step(batch, state, bar, started)
                    last = state.step == total
                    if state.step % config.eval_every == 0 or last:
                        self._measure_recall(state)
                    stop = request.asked() and not last
                    if state.step % config.checkpoint_every == 0 or last or stop:
                        self._checkpoint(state)
                    if stop:
                        self._say(f"Stopped after step {state.step} of {total}. The same command continues from there.")
                        return None
                    started = time.perf_counter()
        return self._finish(state)

    def _print_plan(self, start: int) -> None:
        probe = self.collate([self.dataset[(0, index, index)] for index in range(PROBE)])
        print_plan(
            self.config,
            self.method,
            self.backbone,
            self.modules,
            probe,
            self.accelerator,
            self.precision,
            batches=self.batches,
            held_out=len(self.held_out),
            start=start,
        )
        if self.missing:
            print(f"  {self.missing} of the images that were looked up are missing; the reserve replaces them.")

    def _loader(self, start: int) -> DataLoader:
        accelerator = self.accelerator
        return DataLoader(
            self.dataset,
            batch_sampler=self.batches.iterate(start, accelerator.process_index, accelerator.num_processes),
            collate_fn=self.collate,
            num_workers=self.config.workers,
            pin_memory=accelerator.device.type == "cuda",
        )

    def _step(self, batch: Batch, state: TrainState, bar: tqdm, started: float) -> None:
        """One step; `started` is when this process began to wait for the batch."""
        config, accelerator = self.config, self.accelerator
        # Only a model that drops patches draws random numbers in a step; a resumed run must draw the same.
        torch.manual_seed((config.seed << 32) + state.step * accelerator.num_processes + accelerator.process_index)
        rate = learning_rate(state.step, self.batches.total_steps, config.learning_rate, config.warmup)
        scaler = self.optimizer.scaler
        report = backward(
            self.backbone, self.method, batch, accelerator, self.precision, config.chunk, scaler, self.modules
        )
        # Gradients overflow now and then in fp16; the scaler skips such a step.
        checked = ("loss",) if scaler else ("loss", "gradient_norm")
        finite = all(math.isfinite(report.get(name, 0.0)) for name in checked)
        state.step += 1
        if finite:
            self.optimizer.step(rate)
            state.not_finite = 0
        else:
            self._skip(batch, state, report)
        self._count_replaced(batch, state)
        bar.update()
        speed = config.batch / (time.perf_counter() - started)
        best = f"{state.best_r1:.1f}" if state.best_r1 >= 0 else "-"
        bar.set_postfix(loss=f"{report['loss']:.4f}", pairs_per_s=f"{speed:.0f}", best_r1=best)
        if self.main and finite and (state.step % config.log_every == 0 or state.step == self.batches.total_steps):
            epoch = round(state.step * config.batch / self.batches.samples_per_epoch, 4)
            numbers = {name: value for name, value in report.items() if math.isfinite(value)}  # fp16 may overflow
            line = {"step": state.step, "epoch": epoch, **numbers, "learning_rate": rate}
            self._log(line | {"samples_per_second": round(speed, 2)})

    def _skip(self, batch: Batch, state: TrainState, report: dict[str, float]) -> None:
        """Logs the samples of a step that is not finite. Raises UserError after too many such steps in a row."""
        self.optimizer.clear()
        state.not_finite += 1
        samples = gather_object(batch.sample_ids)
        number = "loss" if not math.isfinite(report["loss"]) else "gradient"
        if self.main:
            self.folder.log_not_finite({"step": state.step, "not_finite": number, "samples": samples})
        skipped = f"The {number} of step {state.step} is not finite; the step was not applied"
        if state.not_finite == PATIENCE:
            raise UserError(
                f"{skipped}, like the {PATIENCE - 1} before it. The last checkpoint is unharmed, and the samples are "
                f"named in {str(self.folder.path / NOT_FINITE)!r}. Look at them, or start again with a lower "
                "--learning-rate or another --precision."
            )
        self._say(f"{skipped}. Its samples are named in {self.folder.path / NOT_FINITE}.")

    def _count_replaced(self, batch: Batch, state: TrainState) -> None:
        """Logs the bad records of the batch. Raises UserError when they become too many."""
        count = len(batch.bad)
        if count:
            self.bad_records.add(batch.bad)
            first = batch.bad[0]
            tqdm.write(f"replaced {printable(first.where)}: {first.kind} (all in {self.bad_records.path})")
        if self.accelerator.num_processes > 1:
            device = self.accelerator.device
            count = int(self.accelerator.reduce(torch.tensor(count, device=device), reduction="sum").item())
        state.replaced += count
        if count:
            # The share of a few samples says nothing about the rest.
            seen = max(state.step * self.config.batch, min(FEWEST, len(self.records)))
            check_count(state.replaced, seen, self.config.max_bad, continue_hint(self.config))

    def _measure_recall(self, state: TrainState) -> None:
        """R@1 on the held-out pairs; saves the model if it is better than all before.

        The base model is measured too, but not saved: it is no result of this run.
        """
        if self.main and self.held_out:
            self.backbone.eval()
            image, text, bad = self._encode_held_out()
            self.backbone.train()
            if state.step == 0 and not self.config.freeze_image_tower:  # else they were reported with all others
                report_bad(bad, self.folder.path)
            recalls = recall_at_k(image, text, ks=(1,))
            t2i, i2t = recalls["text_to_image"]["R@1"], recalls["image_to_text"]["R@1"]
            scores = {"step": state.step, "t2i_r1": t2i, "i2t_r1": i2t, "pairs": len(image), "left_out": len(bad)}
            self._log(scores)
            both = f"{t2i:.1f} text to image, {i2t:.1f} image to text"
            self._say(f"step {state.step}: R@1 on {len(image)} held-out pairs: {both}")
            if state.step > 0 and (t2i + i2t) / 2 > state.best_r1:
                state.best_r1, state.best_step = (t2i + i2t) / 2, state.step
                self.folder.save_model(self.folder.best, self.backbone, scores)
        self.accelerator.wait_for_everyone()

    def _encode_held_out(self) -> tuple[torch.Tensor, torch.Tensor, list[BadRecord]]:
        device, batch_size = self.accelerator.device, min(64, self.config.batch)
        with autocast(self.precision, device):
            image, good, bad = encode_images(
                self.backbone,
                self.held_out,
                self.images,
                batch_size,
                device,
                progress=False,
                read=self.dataset.preprocess,
                encode=_unchanged if self.config.freeze_image_tower else None,
            )
            captions = [self.held_out[index].caption for index in good]
            return image, encode_texts(self.backbone, captions, batch_size, device, progress=False), bad

    def _checkpoint(self, state: TrainState) -> None:
        if self.main:
            keep = self.config.keep
            save_checkpoint(self.folder.checkpoints, self.backbone, self.optimizer, state, keep, self.modules)
        self.accelerator.wait_for_everyone()

    def _finish(self, state: TrainState) -> Path:
        folder, result = self.folder, self.folder.best if self.held_out else self.folder.last
        if self.main:
            folder.save_model(folder.last, self.backbone, {"step": state.step})
        rest = f", and the last {self.batches.remainder} pairs filled no step" if self.batches.remainder else ""
        self._say(f"Done: {state.step} steps; {state.replaced} unreadable records were replaced{rest}.")
        if self.held_out:
            self._say(f"Best R@1, mean of both directions: {state.best_r1:.1f} at step {state.best_step}.")
        if self.backbone.family.causal:  # diffusers' pipelines read CLIP's text encoders, not SigLIP's
            self._say(f"Next: debias-diffusion export --model {folder.path} --output {folder.path / 'export'}")
        self.accelerator.wait_for_everyone()
        return result

    def _log(self, line: dict) -> None:
        """A line in log.jsonl, and its numbers in the trackers."""
        self.folder.log(line)
        numbers = {name: value for name, value in line.items() if name != "step"}
        self.accelerator.log(numbers, step=line["step"])

    def _say(self, line: str) -> None:
        if self.main:
            tqdm.write(line)


def _unchanged(features: torch.Tensor) -> torch.Tensor:
    return features
