"""The training run: set up, say what will happen, make the steps, keep what was learned."""

import math
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..backbones import Backbone, load_backbone
from ..data import Captions, ImageFolder, PackedRecords, Record, read_sharegpt4v
from ..data.dataset import Batch, CaptionDataset, Collate
from ..errors import UserError
from ..files import explain_full_disk, sha256
from ..objectives import check_components
from ..retrieval import encode_pairs, recall_at_k
from .batches import GlobalBatches
from .check import BAD_RECORDS, append_bad, check_data, check_share, look_for_images, report_bad
from .checkpoint import TrainState, load_checkpoint, save_checkpoint
from .config import TrainConfig
from .folder import RunFolder
from .plan import PROBE, print_plan
from .schedule import learning_rate
from .step import MAX_LOGIT_SCALE, Optimizer, autocast, backward
from .stop import StopRequest


def train(config: TrainConfig) -> Path | None:
    """Runs, or continues, the training that `config` describes.

    Leaves in `config.output`: `best/` and `last/`, open_clip folders that `open_clip.create_model("local-dir:...")`
    loads (the best by R@1 on the held-out pairs, and the one after the last step); `log.jsonl`; `settings.json`;
    `bad-records.jsonl` where there are any; `checkpoints/` to continue from.

    Returns:
        The folder of the best model (of the last where nothing is held out); None for `check_data`, and for a run that
        was asked to stop.

    Raises:
        UserError: something in `config` or the data cannot be used; says what to do.
    """
    if config.check_data:
        check_data(config, prepare_backbone(config).tokenizer)
        return None
    accelerator = Accelerator()
    folder = RunFolder(config.output)
    with explain_full_disk(), folder.owned(accelerator.is_main_process):
        return _Run(config, accelerator, folder).run()


def prepare_backbone(config: TrainConfig) -> Backbone:
    """The base model with its window stretched, its scale set, and random weights, if any, from the seed."""
    torch.manual_seed(config.seed)
    backbone = load_backbone(config.model, config.pretrained)
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in backbone.modules()):
        raise UserError(
            f"{config.model!r} has batch normalisation, whose result depends on how a batch is split. Take a ViT."
        )
    if "debias_diffusion" not in backbone.config:
        most = backbone.context_length - 2
        if config.keep_positions > most:
            raise UserError(
                f"keep_positions is {config.keep_positions}, but must be at most {most} for {config.model!r}, which "
                f"has {backbone.context_length} positions."
            )
        backbone.stretch(config.keep_positions, config.stretch)
    if config.initial_scale is not None:
        with torch.no_grad():
            backbone.logit_scale.fill_(min(math.log(config.initial_scale), MAX_LOGIT_SCALE))
    return backbone


class _Run:
    """One run: everything that lives as long as it does."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator, folder: RunFolder):
        self.config, self.accelerator, self.folder = config, accelerator, folder
        self.main = accelerator.is_main_process
        self.recipe = config.make_recipe()
        if config.batch % accelerator.num_processes:
            raise UserError(
                f"batch is {config.batch}, but must be a multiple of the {accelerator.num_processes} processes."
            )
        captions = read_sharegpt4v(config.data)
        self.images = ImageFolder(config.images)
        self.held_out, records = _split(captions, config)
        self.records = PackedRecords(records)
        self.missing = look_for_images(self.records, self.images, config.max_bad)
        self.backbone = prepare_backbone(config)
        check_components(self.recipe.components, config.batch, self.backbone.config["model_cfg"]["embed_dim"])
        self.settings = config.settings() | {"data_sha256": sha256(config.data)}
        folder.check_settings(self.settings)
        if self.main and not folder.begun:
            report_bad(captions.bad, folder.path)
        check_share(len(captions.bad), len(captions.records) + len(captions.bad), config)
        self.backbone.to(accelerator.device).train()
        self.optimizer = Optimizer(self.backbone, config.weight_decay, config.betas, config.eps)
        self.batches = GlobalBatches(len(self.records), config.batch, config.epochs, config.seed, config.max_steps)
        self.dataset = CaptionDataset(
            self.records, self.images, self.backbone.preprocess, self.backbone.tokenizer, self.recipe, config.seed
        )
        self.collate = Collate(self.backbone.tokenizer)

    def run(self) -> Path | None:
        config, total = self.config, self.batches.total_steps
        state = load_checkpoint(self.folder.checkpoints, self.backbone, self.optimizer)
        if self.main:
            if state.step < total:
                self._print_plan(state.step)
            self.folder.claim(self.settings)
            self.folder.cut_log(state.step)
        request = StopRequest(self.accelerator)
        bar = tqdm(total=total, initial=state.step, desc="training", unit=" steps", disable=not self.main)
        with request.listening(), bar:
            if state.step == 0:
                self._measure_recall(state)
            for batch in self._loader(state.step):
                self._step(batch, state, bar)
                last = state.step == total
                if state.step % config.eval_every == 0 or last:
                    self._measure_recall(state)
                stop = request.asked() and not last
                if state.step % config.checkpoint_every == 0 or last or stop:
                    self._checkpoint(state)
                if stop:
                    self._say(f"Stopped after step {state.step} of {total}. The same command continues from there.")
                    return None
        return self._finish(state)

    def _print_plan(self, start: int) -> None:
        probe = self.collate([self.dataset[(0, index)] for index in range(PROBE)])
        print_plan(
            self.config,
            self.recipe,
            self.backbone,
            probe,
            self.accelerator,
            records=len(self.records),
            held_out=len(self.held_out),
            start=start,
            total=self.batches.total_steps,
        )
        if self.missing:
            print(f"  {self.missing} of the images looked for are missing; others will take their turn.")

    def _loader(self, start: int) -> DataLoader:
        accelerator = self.accelerator
        return DataLoader(
            self.dataset,
            batch_sampler=self.batches.iterate(start, accelerator.process_index, accelerator.num_processes),
            collate_fn=self.collate,
            num_workers=self.config.workers,
            pin_memory=accelerator.device.type == "cuda",
        )

    def _step(self, batch: Batch, state: TrainState, bar: tqdm) -> None:
        config, accelerator, started = self.config, self.accelerator, time.perf_counter()
        # A step draws random numbers only where the model drops patches; then a resumed run draws the same.
        torch.manual_seed((config.seed << 32) + state.step * accelerator.num_processes + accelerator.process_index)
        rate = learning_rate(state.step, self.batches.total_steps, config.learning_rate, config.warmup)
        report = backward(self.backbone, self.recipe, batch.to(accelerator.device), accelerator, config.precision)
        if not math.isfinite(report["loss"]):
            raise UserError(
                f"The loss of step {state.step + 1} is {report['loss']}. The step was not applied, and the last "
                "checkpoint is unharmed. Lower --learning-rate, or look at the data."
            )
        self.optimizer.step(rate)
        state.step += 1
        self._count_replaced(batch, state)
        bar.update()
        bar.set_postfix(loss=f"{report['loss']:.4f}", best_r1=f"{state.best_r1:.1f}" if state.best_r1 >= 0 else "-")
        if self.main and (state.step % config.log_every == 0 or state.step == self.batches.total_steps):
            speed = round(config.batch / (time.perf_counter() - started), 2)
            epoch = round(state.step * config.batch / len(self.records), 4)
            line = {"step": state.step, "epoch": epoch, **report, "learning_rate": rate, "samples_per_second": speed}
            self.folder.log(line)

    def _count_replaced(self, batch: Batch, state: TrainState) -> None:
        """Names the records that were unreadable; stops the run when they become too many."""
        count = len(batch.bad)
        if count:
            append_bad(batch.bad, self.folder.path)
            first = batch.bad[0]
            tqdm.write(f"replaced {first.where}: {first.kind} (all in {self.folder.path / BAD_RECORDS})")
        if self.accelerator.num_processes > 1:
            device = self.accelerator.device
            count = int(self.accelerator.reduce(torch.tensor(count, device=device), reduction="sum").item())
        state.replaced += count
        seen = state.step * self.config.batch
        # A few faults among the first samples say nothing about the share yet.
        if count and state.replaced > max(10, self.config.max_bad * seen):
            check_share(state.replaced, seen, self.config)

    def _measure_recall(self, state: TrainState) -> None:
        """R@1 on the held-out pairs; keeps the model if it is the best so far, the earlier of equals.

        The base model is measured too, but not kept: it is no result of this run.
        """
        if self.main and self.held_out:
            device, batch_size = self.accelerator.device, min(64, self.config.batch)
            self.backbone.eval()
            with autocast(self.config.precision, device):
                image, text, bad = encode_pairs(
                    self.backbone, self.held_out, self.images, batch_size, device, progress=False
                )
            self.backbone.train()
            if state.step == 0:
                report_bad(bad, self.folder.path)
            recalls = recall_at_k(image, text, ks=(1,))
            t2i, i2t = recalls["text_to_image"]["R@1"], recalls["image_to_text"]["R@1"]
            scores = {"step": state.step, "t2i_r1": t2i, "i2t_r1": i2t, "pairs": len(image), "left_out": len(bad)}
            self.folder.log(scores)
            both = f"{t2i:.1f} text to image, {i2t:.1f} image to text"
            self._say(f"step {state.step}: R@1 on {len(image)} held-out pairs: {both}")
            if state.step > 0 and (t2i + i2t) / 2 > state.best_r1:
                state.best_r1, state.best_step = (t2i + i2t) / 2, state.step
                self.folder.save_model(self.folder.best, self.backbone, scores)
        self.accelerator.wait_for_everyone()

    def _checkpoint(self, state: TrainState) -> None:
        if self.main:
            save_checkpoint(self.folder.checkpoints, self.backbone, self.optimizer, state)
        self.accelerator.wait_for_everyone()

    def _finish(self, state: TrainState) -> Path:
        folder, result = self.folder, self.folder.best if self.held_out else self.folder.last
        if self.main:
            folder.save_model(folder.last, self.backbone, {"step": state.step})
        self._say(f"Done: {state.step} steps; {state.replaced} unreadable records were replaced.")
        if self.held_out:
            self._say(f"Best R@1, mean of both directions: {state.best_r1:.1f} at step {state.best_step}.")
        self._say(f"Next: debias-diffusion export --model {folder.path} --output {folder.path / 'export'}")
        self.accelerator.wait_for_everyone()
        return result

    def _say(self, line: str) -> None:
        if self.main:
            tqdm.write(line)


def _split(captions: Captions, config: TrainConfig) -> tuple[list[Record], list[Record]]:
    """(held out, trained on). Raises UserError when too few remain for a batch."""
    records, validation = captions.records, config.validation
    left = max(0, len(records) - validation)
    if left < config.batch:
        raise UserError(
            f"{len(records)} usable pairs less {validation} held out leave {left} to train on, fewer than "
            f"a batch of {config.batch}. Lower --validation or --batch, or give more pairs."
        )
    return records[:validation], records[validation:]
