"""The training of a two-tower: what the loop is given, and what is measured and saved."""

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch import nn

from ..clip.backbone import Backbone
from ..clip.packing import arranged
from ..data.bad_records import report_bad
from ..data.batch import Batch
from ..data.check import check_data
from ..data.records import Record
from ..data.retrieval import embed_texts, encode_images, none_readable, recall_at_k
from ..data.seen import Seen, read_seen
from ..devices import autocast
from ..encoders.spec import EncoderSpec
from ..errors import UserError, reason
from ..files import sha256
from ..methods import KeepStates, Method
from .batches import CaptionDataset, collate
from .checkpoints import BEST, LAST, TrainState, save_model
from .config import CHOOSING, TrainConfig, ablated
from .feature_cache import cached_images, frozen_tower
from .loop import Run
from .optimizer import MAX_LOGIT_SCALE, Optimizer
from .step import backward, pack
from .text_from import take_text_tower

_COMPARED = 256  # held-out pairs on which a checkpoint's text encoder is compared with the base model's
COMPILED_STEPS = 1000  # as few repay a minute of compilation


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
        backbone, method = prepare_backbone(load_base_model(config), config)
        settings = method.reads_short, config.max_bad, config.workers
        return check_data(config.data, config.images, config.output, backbone.tokenizer, *settings)
    return _Training(config).run()


class _Training(Run):
    """A run that trains a two-tower with a method."""

    def __init__(self, config: TrainConfig):
        self.reads_short = config.chosen_method.reads_short
        super().__init__(config)
        base_model = load_base_model(config)
        self.seen_before: list[Seen] = [read_seen(config.base_model)]
        if config.text_from:
            self._take_text_tower(base_model)
        # A resumed run needs more of it than its checkpoint holds: the kept positions, the features of a frozen image
        # tower, the preprocessing. Random weights are the seed's.
        random = f"random weights of {config.model}"
        self.inputs["base model"] = random if base_model.random_weights else base_model.digest()
        if config.import_file:
            self.inputs["import file"] = sha256(config.import_file)
        self.backbone, self.method = prepare_backbone(base_model, config)
        sizes = self.batch, self.backbone.config["model_cfg"]["embed_dim"]
        if config.components is None and (fitted := self.method.fit(*sizes)) is not self.method:
            self.method, self.settings["components"] = fitted, fitted.components
        self.method.check(*sizes)
        torch.manual_seed(config.seed)  # the method's modules are the same on every process and in every run
        self.model, modules = self.backbone.model, self.method.modules(self.backbone)
        self.modules = nn.ModuleDict(modules).to(self.accelerator.device) if modules else None
        self.write_modules = partial(self.method.save, modules=self.modules)
        self.backbone.to(self.accelerator.device).train()
        settings = config.weight_decay, config.betas, config.eps, self.precision, self.method.rates, self.method.decay
        self.optimizer = Optimizer(self.backbone, *settings, modules=self.modules)
        given = {"method": self.method, "cached_features": config.freeze_image_tower}
        if self.backbone.family.causal and not config.chunk:  # a chunk has a layout of its own
            is_ragged = self.accelerator.device.type == "cuda" and self.precision != "fp32"
            given["arrange"] = partial(arranged, is_ragged=is_ragged)
        self.collate = partial(collate, tokenizer=self.backbone.tokenizer, **given)

    def _take_text_tower(self, backbone: Backbone) -> None:
        """Gives the base model the text encoder of `text_from`, and says what that does to its recall."""
        spec = EncoderSpec.parse(self.config.text_from)
        keeps_states = any(isinstance(term, KeepStates) for term in self.config.chosen_method.terms)
        self.seen_before.append(read_seen(spec))
        records, device, recalls = self.held_out[:_COMPARED], self.accelerator.device, []
        images, good, _ = encode_images(backbone.to(device), records, self.images, 64, device, progress=False)
        captions = [records[index].caption for index in good]
        for take in (lambda: None, lambda: take_text_tower(backbone, spec, keeps_states)):
            take()
            texts = embed_texts(backbone.to(device), captions, 64, device, progress=False)
            recalls.append(recall_at_k(images, texts, ks=(1,))["text_to_image"]["R@1"] if good else 0.0)
        before, after = recalls
        self.say(
            f"R@1 on {len(good)} held-out pairs: {before:.1f} with the base model's text encoder, {after:.1f} with the "
            f"one of {self.config.text_from}"
        )
        if after < before / 2:
            self.say(
                "The checkpoint's encoder no longer fits the base model's images. With --freeze-image-tower it learns "
                "to fit them; without, the image tower follows it."
            )

    def prepare(self) -> None:
        """With a frozen image tower, whose features are then the images, and which rests from then on."""
        config, preprocess = self.config, self.backbone.read_pixels
        if config.freeze_image_tower:
            visual, preprocess = self.backbone.model.visual.eval(), nn.Identity()
            tower = frozen_tower(self.backbone, self.accelerator, self.precision)
            folder = config.feature_cache or self.folder.parent / "image-features"
            settings = folder, min(64, self.batch), max(1, self.workers)
            self.images, bad = cached_images(tower, self.all_records, self.images, *settings)
            self.check_bad(bad, len(self.all_records))
            visual.to("cpu")
        stand_ins = self.batches.permutation if config.max_bad else None
        parts = config.seed, stand_ins, self.backbone.tokenizer, self.method
        self.dataset = CaptionDataset(self.records, self.images, preprocess, *parts, reads_short=self.reads_short)

    def begin(self, state: TrainState) -> None:
        """Decides whether the steps run compiled, as those before did. Raises UserError if other is asked for now."""
        before, left = state.compiled, self.batches.total_steps - state.step
        auto = self.accelerator.device.type == "cuda" and left >= COMPILED_STEPS if before is None else before
        state.compiled = {"on": True, "off": False}.get(self.config.compile, auto)
        if before not in (None, state.compiled):
            raise UserError(
                f"compile is {self.config.compile}, but the steps so far ran {'' if before else 'un'}compiled. Leave "
                "it out, or give a new --output."
            )
        self.state, self._may_fail = state, self.config.compile == "auto" and before is None
        self._must_compile = state.compiled

    def backward(self, batch: Batch) -> dict[str, torch.Tensor]:
        if self._must_compile:
            self._compile(batch)
        settings = self.accelerator, self.precision, self.config.chunk, self.optimizer.scaler, self.modules
        with torch.compiler.set_stance("default" if self.state.compiled else "force_eager"):
            return backward(self.backbone, self.method, batch, *settings)

    def _compile(self, batch: Batch) -> None:
        """Compiles the towers with what the first step needs; where any process cannot, none does.

        Raises:
            UserError: it cannot, and the steps before were compiled, or compile is on.
        """
        started, seed, device, error = time.perf_counter(), torch.initial_seed(), self.accelerator.device, ""
        self.backbone.compile()
        try:
            chunk = batch.chunks(self.config.chunk or len(batch))[0].to(device)
            with autocast(self.precision, device):
                features = pack(self.method.features(self.backbone, chunk, self.modules))
            features.float().sum().backward()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:  # torch's own, of Triton or of a C compiler
            error = reason(problem)
        finally:
            self.optimizer.clear()
            torch.manual_seed(seed)
        errors = [error for error in gather_object([error]) if error]
        if errors and not self._may_fail:
            raise UserError(
                f"The towers cannot be compiled here: {errors[0]}. Mend that, or begin anew with --compile off in a "
                "new --output."
            )
        self.state.compiled, self._must_compile = not errors, False
        seconds = f"{time.perf_counter() - started:.0f} s"
        self.say(f"Not compiled: {errors[0]}" if errors else f"The towers were compiled in {seconds}.")

    def describe(self) -> dict[str, str]:
        config, backbone = self.config, self.backbone
        stretched = backbone.config["debias_diffusion"]
        origin = "RANDOM" if backbone.random_weights else config.pretrained or "its own"
        text = f", the text encoder of {config.text_from}" if config.text_from else ""
        is_fitted = self.settings["components"] != config.components
        fitted = "; as many components as the batch allows (--components)" if is_fitted else ""
        return {
            "model": f"{config.model}, {origin} weights{text}; context length {backbone.context_length}: the first "
            f"{stretched['keep']} positions kept, the others times {stretched['factor']}; {backbone.loss} loss",
            "recipe": f"{config.recipe}: {self.method.describe()}{fitted}",
            "trained": "text tower, with cached image features" if config.freeze_image_tower else "both towers",
        }

    def measure(self, state: TrainState) -> None:
        """R@1 on the held-out pairs, which decides nothing, and with `keep_best` on the pairs that choose.

        The base model is measured too, but never the best: it is no result of this run.
        """
        self.backbone.eval()
        if self.held_out:
            self._measure_on(self.held_out, state, "", "held-out pairs")
        if self.choosing:
            scores = self._measure_on(self.choosing, state, CHOOSING, "pairs that choose the best")
            mean = (scores[f"{CHOOSING}t2i_r1"] + scores[f"{CHOOSING}i2t_r1"]) / 2
            if state.step > 0 and mean > state.best_r1:
                state.best_r1, state.best_step = mean, state.step
                save_model(self.job, BEST, self.backbone, scores, self.seen(len(self.held_out)), self.write_modules)
        self.backbone.train()

    def _measure_on(self, records: Sequence[Record], state: TrainState, prefix: str, name: str) -> dict[str, float]:
        """R@1 in percent, logged and printed; `prefix` begins the names of the numbers."""
        device, batch_size, frozen = self.accelerator.device, min(64, self.batch), self.config.freeze_image_tower
        # Another number of images would compile anew.
        with autocast(self.precision, device), torch.compiler.set_stance("force_eager"):
            image, good, bad = encode_images(
                *(self.backbone, records, self.images, batch_size, device),
                progress=False,
                read=self.dataset.preprocess,
                encode=nn.Identity() if frozen else None,
            )
            if not good:
                raise none_readable(records, self.images, bad)
            captions = [records[index].caption for index in good]
            text = embed_texts(self.backbone, captions, batch_size, device, progress=False)
        if state.step == 0 and not frozen:  # else they were reported with all others
            report_bad(bad, self.folder)
        recalls = recall_at_k(image, text, ks=(1,))
        t2i, i2t = recalls["text_to_image"]["R@1"], recalls["image_to_text"]["R@1"]
        scores = {"t2i_r1": t2i, "i2t_r1": i2t, "pairs": len(image), "left_out": len(bad)}
        line = {"step": state.step} | {prefix + key: value for key, value in scores.items()}
        self.log(line)
        self.say(f"step {state.step}: R@1 on {len(image)} {name}: {t2i:.1f} text to image, {i2t:.1f} image to text")
        return line

    def finish(self, state: TrainState) -> Path:
        folder = self.folder
        if self.main:
            save_model(self.job, LAST, self.backbone, {"step": state.step}, self.seen(), self.write_modules)
        rest = f", and the last {self.batches.remainder} pairs filled no step" if self.batches.remainder else ""
        self.say_done(state, rest)
        if self.choosing:
            self.say(
                f"Best R@1 on the pairs that choose, mean of both directions: {state.best_r1:.1f} at step "
                f"{state.best_step}. That model is in {folder / BEST}; the result of the run is the last one, in "
                f"{folder / LAST}."
            )
        if self.backbone.family.causal:  # diffusers' pipelines read CLIP's text encoders, not SigLIP's
            self.say(f"Next: debias-diffusion export --model {folder} --output {folder.parent / 'encoder'}")
        return folder / LAST


def load_base_model(config: TrainConfig) -> Backbone:
    """The base model unchanged; random weights come from the seed.

    Raises:
        UserError: the model cannot be used, has suppressed heads, or no weights are named.
    """
    base = config.base_model
    torch.manual_seed(config.seed)
    backbone = base.load_two_tower(random_weights=True)
    if backbone.image_attention or backbone.text_attention:
        raise ablated(config.model)
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in backbone.modules()):
        raise UserError(
            f"{config.model!r} has batch normalisation, whose result depends on how a batch is split. Take a ViT."
        )
    return backbone


def prepare_backbone(backbone: Backbone, config: TrainConfig) -> tuple[Backbone, Method]:
    """The base model with its context length stretched, changed as the method wants it, its scale set, in place; and
    the method for it.

    Raises:
        UserError: the method or an option cannot be used with this model.
    """
    method = config.chosen_method
    method.check_base(backbone, config.keep_positions, config.freeze_image_tower)
    if "keep" not in backbone.config.get("debias_diffusion", {}):
        try:
            backbone.stretch(config.keep_positions, config.stretch)
        except ValueError as error:
            raise UserError(f"{config.model!r} cannot be stretched: {error}.") from error
    torch.manual_seed(config.seed)
    method = method.prepare(backbone)
    is_sigmoid = backbone.loss == "sigmoid"
    if is_sigmoid and config.label_smoothing is not None:
        raise UserError(
            f"label_smoothing is {config.label_smoothing}, but the sigmoid loss of {config.model!r} has no labels to "
            "smooth. Leave it out."
        )
    scale = (None if is_sigmoid else 100.0) if config.initial_scale == "auto" else config.initial_scale
    if scale is not None:
        backbone.logit_scale.data.fill_(min(math.log(scale), MAX_LOGIT_SCALE))
    if config.freeze_image_tower:
        backbone.model.visual.requires_grad_(False)
    if config.checkpoint_activations:
        backbone.checkpoint_activations()
    return backbone, method
