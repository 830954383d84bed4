"""The settings of a training run, and the checks that need no data."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..encoders.spec import EncoderSpec, Kind
from ..errors import UserError
from ..limits import (
    FACTOR,
    KEEP,
    SHAREGPT4V_HELD_OUT,
    BelowOne,
    Checked,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Precision,
    Rule,
    Share,
    between,
)
from ..method_settings import DualCaptionSettings, FixClipSettings

if TYPE_CHECKING:
    from ..methods import Method

# A run may resume with other values of these: they change how it runs, but not (beyond rounding) its result.
_WITHOUT_EFFECT = (
    *("output", "workers", "log_every", "checkpoint_every", "keep", "trackers", "max_bad", "check_data"),
    *("chunk", "checkpoint_activations", "compile", "feature_cache", "latent_cache"),
)
_OF_ALL = tuple(part.name for part in fields(DualCaptionSettings))
RECIPE_OPTIONS = tuple(part.name for part in fields(FixClipSettings))  # those of other methods are in `method`
Tracker = Literal["tensorboard", "wandb"]
RunSeed = between(int, 0, 2**32 - 1)  # a step's draws are seeded with it and, in the lower half of 64 bits, its number
_Scale = Annotated[float, Rule("above 0, at most 100", lambda scale: 0 < scale <= 100)]
CHOOSING = "choosing_"  # begins the names of numbers on the pairs that choose the best model


@dataclass(kw_only=True)
class RunConfig(Checked):
    """What every training has.

    Attributes:
        data: Image-caption pairs: a JSON file in ShareGPT4V's layout, a .jsonl file, a folder of WebDataset shards
            (`debias-diffusion shards` writes them), a folder of images with captions beside them, or scenes of the toy
            world (toy/train-2).
        images: Folder that the image paths of a JSON or JSONL file start from; null for all other data.
        output: Folder of the run. A stopped run resumes there when it is started again with the same settings.
        chunk: Pairs whose activations a process holds at once; the gradient is the same. null holds all.
        epochs: Passes over the data.
        max_steps: Stop after this many steps, if the epochs take more.
        learning_rate: Peak learning rate of AdamW, reached after the warm-up; then a cosine to 0.
        weight_decay: On matrices only.
        betas: AdamW's averages.
        eps: AdamW's epsilon.
        precision: fp32, or bf16 or fp16 for mixed precision. auto is bf16 (fp16 where there is none) on a GPU and fp32
            elsewhere.
        checkpoint_activations: Recompute activations in the backward pass instead of keeping them.
        workers: Processes that read the data, for each training process. 0 reads it in the training process. auto
            shares the cores, less one, among the training processes of the machine: 2 to 16 each.
        eval_every: Steps between measurements on the held-out pairs.
        checkpoint_every: Steps between checkpoints.
        keep: How many of the newest checkpoints are kept.
        log_every: Steps between lines in log.jsonl.
        trackers: tensorboard, wandb, or both, beside log.jsonl, which is always written.
        max_bad: Largest share of bad records before the run stops, from 0 to 1. An unreadable image is replaced by
            another pair of the epoch, always the same, which the epoch then has twice; with 0 by none. A stopped run
            may resume with another value.
    """

    # Of the help: options of every training and of some. Without an annotation, so no option.
    GROUPS = {  # noqa: RUF012
        "Optimization": (
            *("batch", "epochs", "max_steps", "learning_rate", "warmup", "weight_decay", "betas", "eps", "seed"),
        ),
        "Speed and memory": (
            *("precision", "chunk", "checkpoint_activations", "compile", "workers", "feature_cache", "latent_cache"),
        ),
        "Validation, checkpoints and logs": (
            *("validation", "keep_best", "eval_every", "checkpoint_every", "keep", "log_every", "trackers"),
        ),
        "Bad records": ("max_bad", "check_data"),
    }
    keep_best = 0  # no option of every run
    LARGEST_BATCH, LONGEST_WARMUP = 256, 200  # of auto

    data: str
    images: str | None = None
    output: str
    validation: NonNegativeInt | Literal["auto"] = "auto"
    batch: PositiveInt | Literal["auto"] = "auto"
    chunk: PositiveInt | None = None
    epochs: PositiveInt
    max_steps: PositiveInt | None = None
    learning_rate: LearningRate = 1e-6
    warmup: NonNegativeInt | Literal["auto"] = "auto"
    weight_decay: NonNegativeFloat = 1e-2
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    precision: Precision = "auto"
    checkpoint_activations: bool = False
    seed: RunSeed = 0
    workers: NonNegativeInt | Literal["auto"] = "auto"
    eval_every: PositiveInt = 500
    checkpoint_every: PositiveInt = 500
    keep: PositiveInt = 2
    log_every: PositiveInt = 10
    trackers: list[Tracker] = field(default_factory=list)
    max_bad: Share = 0.01

    def settings(self) -> dict:
        """All settings that decide the result, as plain JSON values."""
        settings = asdict(self) | {"betas": list(self.betas)}
        return {name: value for name, value in settings.items() if name not in _WITHOUT_EFFECT}

    def held_out_count(self, records: int) -> int:
        """How many pairs are held out; for `auto` never more than a tenth of the data."""
        return min(SHAREGPT4V_HELD_OUT, records // 10) if self.validation == "auto" else self.validation

    def batch_size(self, records: int) -> int:
        """Pairs of a step; for `auto` as many of so few as any usual number of processes can share, but at least 4."""
        if self.batch != "auto":
            return self.batch
        return self.LARGEST_BATCH if records >= self.LARGEST_BATCH else 1 << max(records, 4).bit_length() - 1

    def warmup_steps(self, steps: int) -> int:
        """Steps of warm-up; for `auto` never more than a tenth of all."""
        return min(self.LONGEST_WARMUP, steps // 10) if self.warmup == "auto" else self.warmup


def _as_options(settings: type, base: type) -> Any:
    """A method's settings as options after those of `base`: null keeps the recipe's own value."""
    options = [(part.name, part.type | None, None) for part in fields(settings)]
    return make_dataclass(
        settings.__name__, options, bases=(base,), namespace={"__doc__": settings.__doc__}, kw_only=True
    )


@dataclass(kw_only=True)
class TrainConfig(_as_options(FixClipSettings, _as_options(DualCaptionSettings, RunConfig))):
    """Fine-tune a CLIP two-tower on long captions, so that its text encoder reads all of them.

    Attributes:
        model: Base model: an open_clip name (ViT-B-16, ViT-L-14-quickgelu, ViT-B-16-SigLIP2), an open_clip folder, or
            hf-hub:owner/name.
        pretrained: Weights for a model given by name: an open_clip tag (openai needs a -quickgelu model), a file, which
            may be Long-CLIP's, or none for random weights. Leave it out for a folder or repository.
        text_from: Checkpoint whose text encoder is trained in the place of the base model's, and keeps its own states
            with `--keep-states`: an SDXL checkpoint in one file, a folder, a hub id, or anything else that holds a text
            encoder as wide as the base model's. Image tower and projection are the base model's.
        recipe: debias-clip, debias-clip-sdxl (with keep_states, for encoders that go into SDXL), long-clip,
            smart-clip-sampling or fix-clip. The options that follow, and those of Fix-CLIP, override a part of it.
        import_file: Python file that adds your method to the recipes (docs/extending.md). Its contents are a setting of
            the run.
        method: Settings of a method of your own, as --method.alpha 0.75, or method: {alpha: 0.75} in YAML.
        keep_positions: First positions that are kept when the context length is stretched, and not trained. 0 stretches
            all.
        stretch: How many positions each of the others becomes; 77 positions become 248 with the defaults. A model that
            training has already stretched is not stretched again.
        validation: How many of the first pairs are held out for R@1; the rest are trained on. auto is 1000, and a tenth
            of fewer than 10,000 pairs.
        keep_best: Also keep the best model, in best/, by R@1 on this many pairs after the held-out ones, which are not
            trained on either. 0 keeps none: the result of a run is the model after the last step, in last/.
        batch: Pairs per step, over all processes together. auto is 256; of fewer pairs, the largest power of two.
        warmup: Steps of linear warm-up. auto is 200, at most a tenth of all steps.
        chunk: Pairs whose activations a process holds at once, for one more forward pass: a batch of 2048 in chunks of
            64 gives the gradient of 2048 in the memory of 64. null holds all.
        freeze_image_tower: Train the text tower alone. Image features are computed once and cached on disk.
        feature_cache: Folder of that cache, which runs can share; null is image-features beside the output folder.
        initial_scale: Multiplies the similarities at the start; null keeps the base model's scale. auto is 100 (the
            limit, as in Long-CLIP's code), and the base model's for SigLIP.
        compile: Compile the towers with torch.compile, which takes a minute at each start and a third off every step.
            auto does so on a CUDA GPU with 1,000 steps or more to go, and goes on without where it fails; a run that
            resumes keeps to what it began with. YAML needs quotes around on and off.
        weight_decay: On the parameters that --decay names.
        seed: Of all random draws: random weights, order of samples, short captions.
        check_data: Read all images and captions, report the bad records, and train nothing.
    """

    GROUPS = {
        "Data and model": (
            *("data", "images", "output", "model", "pretrained", "text_from", "keep_positions", "stretch"),
            "initial_scale",
            "freeze_image_tower",
        ),
        "Recipe": ("recipe", "import_file", *_OF_ALL, "method"),
        "Parts of Fix-CLIP, for the recipes fix-clip and long-clip": RECIPE_OPTIONS[len(_OF_ALL) :],
    } | RunConfig.GROUPS

    model: str
    pretrained: str | None = None
    text_from: str | None = None
    recipe: str = "debias-clip"
    import_file: str | None = None
    method: dict[str, Any] | None = None
    keep_positions: NonNegativeInt = KEEP
    stretch: PositiveInt = FACTOR
    keep_best: NonNegativeInt = 0
    freeze_image_tower: bool = False
    feature_cache: str | None = None
    epochs: PositiveInt = 3
    initial_scale: _Scale | Literal["auto"] | None = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    check_data: bool = False

    def __post_init__(self):
        super().__post_init__()
        _ = self.chosen_method, self.base_model  # which raise UserError

    @cached_property
    def base_model(self) -> EncoderSpec:
        """What `model` and `pretrained` name; loads nothing.

        Raises:
            UserError: it is not there, not in open_clip's layout, or has suppressed heads.
        """
        base = EncoderSpec.parse(":".join(filter(None, (self.model, self.pretrained))))
        if base.is_short:
            raise UserError(f"{self.model!r}: what short captions are read with is evaluated alone. Leave short: out.")
        if base.kind is Kind.ABLATION:
            raise ablated(self.model)
        if base.kind is not Kind.OPEN_CLIP:
            raise UserError(
                f"{self.model!r} is not in open_clip's layout, so it cannot be trained. Give an open_clip name or "
                "folder; `debias-diffusion export --to open_clip` makes one of a model with both towers."
            )
        return base

    @cached_property
    def chosen_method(self) -> "Method":
        """The method that `recipe` names, with the settings given. Raises UserError if they cannot be used."""
        from ..methods import find_method, import_methods  # takes seconds, which help need not wait for

        if self.import_file:
            import_methods(os.path.realpath(self.import_file))
        return find_method(self.recipe, method_settings(vars(self)))


def ablated(model: str) -> UserError:
    """The error for a model with suppressed heads."""
    return UserError(
        f"{model!r} has suppressed attention heads, and training would move weights that were judged without them. "
        "Train the model that it was made from, then search again with `python -m research ablate`."
    )


def method_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that change its recipe, from all of its settings."""
    given = {name: settings[name] for name in RECIPE_OPTIONS if settings.get(name) is not None}
    return given | (settings.get("method") or {})
