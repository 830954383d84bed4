"""The training run: set up, print the plan, make the steps, save the model."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from ..data.bad_records import report_bad
from ..data.dataset import CaptionDataset, collate
from ..data.records import Record
from ..data.retrieval import encode_images, encode_texts, recall_at_k
from ..data.seen import read_seen
from ..devices import autocast
from ..files import explain_full_disk, sha256
from ..methods import Batch
from .check import check_data, look_for_short_captions
from .checkpoints import BEST, LAST, TrainState, save_model
from .config import CHOOSING, TrainConfig
from .feature_cache import FrozenTower, cached_images
from .logs import make_accelerator
from .optimizer import Optimizer
from .plan import PROBE, print_plan
from .run import Run
from .setup import load_base_model, load_base_tokenizer, prepare_backbone
from .step import backward
from .stop import StopRequest


def train(config: TrainConfig) -> Path | None:
    """Runs, or resumes, the training that `config` describes.

    Writes to `config.output`: `last/`, the model after the last step, an open_clip folder that
    `open_clip.create_model("local-dir:...")` loads; with `keep_best` also `best/`, the best model by R@1 on pairs held
    out for that; `log.jsonl`; `checkpoint-...` to resume from; and, where there are any, `bad-records.jsonl` and
    `not-finite.jsonl` (the samples of steps that were skipped because their loss or gradient
    was not finite).

    Returns:
        The folder of the model after the last step; None for `check_data` and for a run that was stopped.

    Raises:
        UserError: something in `config` or the data cannot be used; says what to do.
    """
    if config.check_data:
        check_data(config, load_base_tokenizer(config))
        return None
    accelerator = make_accelerator(config)
    with explain_full_disk():
        return _Training(config, accelerator).run()


class _Training(Run):
    """A run that trains a two-tower with a method."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator):
        self.method = config.make_method()
        super().__init__(config, accelerator)
        config = self.config
        if self.method.reads_short:
            look_for_short_captions(self.records, config.max_bad)
        base_model = load_base_model(config)
        self.seen_before = [read_seen(config.base_model())]
        # A resumed run needs more of it than its checkpoint holds: the kept positions, the features of a frozen image
        # tower, the preprocessing. Random weights are the seed's.
        random = f"random weights of {config.model}"
        self.inputs["base model"] = random if base_model.random_weights else base_model.digest()
        if config.import_file:
            self.inputs["import file"] = sha256(config.import_file)
        self.backbone = prepare_backbone(base_model, config)
        self.method = self.method.bind(self.backbone)
        sizes = config.batch, self.backbone.config["model_cfg"]["embed_dim"]
        if config.components is None and (fitted := self.method.fit(*sizes)) is not self.method:
            self.method, self.settings["components"] = fitted, fitted.components
        self.method.check(*sizes)
        torch.manual_seed(config.seed)  # the method's modules are the same on every process and in every run
        self.model, modules = self.backbone.model, self.method.modules(self.backbone)
        self.modules = nn.ModuleDict(modules).to(accelerator.device) if modules else None
        self.backbone.to(accelerator.device).train()
        settings = config.weight_decay, config.betas, config.eps, self.precision, self.method.rate
        self.optimizer = Optimizer(self.backbone, *settings, modules=self.modules)
        self.collate = partial(
            collate, tokenizer=self.backbone.tokenizer, recipe=self.method, cached_features=config.freeze_image_tower
        )

    def run(self) -> Path | None:
        request = StopRequest(self.accelerator)
        with request.listening(), self.opened():
            if self.config.freeze_image_tower:
                self._compute_image_features(request)
                if request.asked():
                    self.say("Stopped while image features were computed. The same command continues from there.")
                    return None
            self.dataset = CaptionDataset(
                self.records,
                self.images,
                _unchanged if self.config.freeze_image_tower else self.backbone.read_pixels,
                self.config.seed,
                self.batches.stand_ins if self.config.max_bad else None,
                self.backbone.tokenizer,
                self.method,
            )
            state = self.make_steps(request)
            return state and self._finish(state)

    def _compute_image_features(self, request: StopRequest) -> None:
        """Computes the features that the cache lacks; from then on images are features, and the image tower rests."""
        config, visual = self.config, self.backbone.model.visual.eval()
        self.images, bad = cached_images(
            FrozenTower(self.backbone, self.accelerator, self.precision),
            self.all_records,
            self.images,
            config.feature_cache or self.folder.parent / "image-features",
            batch=min(64, config.batch),
            workers=config.workers,
            stop=lambda: request.here,
        )
        self.report_unreadable(bad, len(self.all_records))
        visual.to("cpu")

    def backward(self, batch: Batch) -> dict[str, float]:
        settings = self.accelerator, self.precision, self.config.chunk, self.optimizer.scaler, self.modules
        return backward(self.backbone, self.method, batch, *settings)

    def print_plan(self, start: int) -> None:
        probe = self.collate([self.dataset[(0, index, index)] for index in range(min(PROBE, len(self.records)))])
        print_plan(self, probe, start)

    def measure(self, state: TrainState) -> None:
        """R@1 on the held-out pairs, which decides nothing, and with `keep_best` on the pairs that choose.

        The base model is measured too, but never the best: it is no result of this run.
        """
        if self.main:
            self.backbone.eval()
            if self.held_out:
                self._measure_on(self.held_out, state, "", "held-out pairs")
            if self.choosing:
                scores = self._measure_on(self.choosing, state, CHOOSING, "pairs that choose the best")
                mean = (scores[f"{CHOOSING}t2i_r1"] + scores[f"{CHOOSING}i2t_r1"]) / 2
                if state.step > 0 and mean > state.best_r1:
                    state.best_r1, state.best_step = mean, state.step
                    save_model(self.job, BEST, self.backbone, scores, self.seen(len(self.held_out)))
            self.backbone.train()
        self.accelerator.wait_for_everyone()

    def _measure_on(self, records: Sequence[Record], state: TrainState, prefix: str, name: str) -> dict[str, float]:
        """R@1 in percent, logged and printed; `prefix` begins the names of the numbers."""
        device, batch_size, frozen = self.accelerator.device, min(64, self.config.batch), self.config.freeze_image_tower
        with autocast(self.precision, device):
            image, good, bad = encode_images(
                *(self.backbone, records, self.images, batch_size, device),
                progress=False,
                read=self.dataset.preprocess,
                encode=_unchanged if frozen else None,
            )
            captions = [records[index].caption for index in good]
            text = encode_texts(self.backbone, captions, batch_size, device, progress=False)
        if state.step == 0 and not frozen:  # else they were reported with all others
            report_bad(bad, self.folder)
        recalls = recall_at_k(image, text, ks=(1,))
        t2i, i2t = recalls["text_to_image"]["R@1"], recalls["image_to_text"]["R@1"]
        scores = {"t2i_r1": t2i, "i2t_r1": i2t, "pairs": len(image), "left_out": len(bad)}
        line = {"step": state.step} | {prefix + key: value for key, value in scores.items()}
        self.log(line)
        self.say(f"step {state.step}: R@1 on {len(image)} {name}: {t2i:.1f} text to image, {i2t:.1f} image to text")
        return line

    def _finish(self, state: TrainState) -> Path:
        folder = self.folder
        if self.main:
            save_model(self.job, LAST, self.backbone, {"step": state.step}, self.seen())
        rest = f", and the last {self.batches.remainder} pairs filled no step" if self.batches.remainder else ""
        self.say_done(state, rest)
        if self.choosing:
            self.say(
                f"Best R@1 on the pairs that choose, mean of both directions: {state.best_r1:.1f} at step "
                f"{state.best_step}. That model is in {folder / BEST}; the result of the run is the last one, in "
                f"{folder / LAST}."
            )
        if self.backbone.family.causal:  # diffusers' pipelines read CLIP's text encoders, not SigLIP's
            self.say(f"Next: debias-diffusion export --model {folder} --output {folder / 'export'}")
        self.accelerator.wait_for_everyone()
        return folder / LAST


def _unchanged(features: torch.Tensor) -> torch.Tensor:
    return features
