"""What a training run is told, and the checks that need no data."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Literal

from ..captions import SAMPLERS
from ..errors import UserError, near_matches
from ..positions import FACTOR, KEEP
from ..recipes import PADDINGS, Recipe, find_recipe

# A run may be continued with other values of these: they change how it runs, not what comes out.
_WITHOUT_EFFECT = ("output", "workers", "log_every", "checkpoint_every", "check_data")


@dataclass
class TrainConfig:
    """Fine-tune a CLIP two-tower on long captions, so that its text encoder reads all of them.

    Attributes:
        data: JSON file in ShareGPT4V's layout.
        images: Folder that the data file's image paths start from.
        output: Folder of the run. A run that was stopped continues there when started again with the same settings.
        model: Base model: an open_clip name (ViT-B-16, ViT-L-14-quickgelu), an open_clip folder, or hf-hub:owner/name.
        pretrained: Weights for a model given by name: an open_clip tag (openai needs a -quickgelu model) or a file.
            The default, null, is random weights.
        recipe: debias-clip or long-clip. The five settings that follow override a part of it.
        sampling: Sentences of the short caption: random (a random subset without the summary) or summary.
        padding: Pads before the short caption: random or none.
        short_weight: w of the loss w * short + (1 - w) * long, from 0 to 1.
        components: Principal components of the images that short captions are compared with; less than the batch
            less one.
        label_smoothing: From 0 to below 1.
        keep_positions: First positions that stay as they are when the window is stretched, and in training.
        stretch: How many positions each of the others becomes; 77 positions become 248 with the defaults. A model
            that training has already stretched is left as it is.
        validation: The first so many pairs are held out for R@1, the rest are trained on.
        batch: Pairs a step, over all processes together.
        epochs: Passes over the data.
        max_steps: Stop after so many steps, if the epochs are not over before.
        learning_rate: Peak learning rate of AdamW, reached after the warm-up; then a cosine to 0.
        warmup: Steps of linear warm-up.
        weight_decay: On matrices only.
        betas: AdamW's averages.
        eps: AdamW's epsilon.
        initial_scale: What similarities are multiplied with at the start (Long-CLIP's code: 100, which is also the
            limit). null keeps the model's own.
        precision: fp32, or bf16 for mixed precision.
        seed: Of everything drawn: random weights, order of samples, short captions.
        workers: Processes that read images, for each training process. 0 reads them in the training process.
        eval_every: Steps between measurements of R@1 on the held-out pairs.
        checkpoint_every: Steps between checkpoints.
        log_every: Steps between lines in log.jsonl.
        max_bad: Largest share of records that may be unusable before the run stops, from 0 to 1.
        check_data: Read all images and captions, report what is wrong with them, and train nothing.
    """

    data: str
    images: str
    output: str
    model: str
    pretrained: str | None = None
    recipe: str = "debias-clip"
    sampling: str | None = None
    padding: str | None = None
    short_weight: float | None = None
    components: int | None = None
    label_smoothing: float | None = None
    keep_positions: int = KEEP
    stretch: int = FACTOR
    validation: int = 1000
    batch: int = 256
    epochs: int = 3
    max_steps: int | None = None
    learning_rate: float = 1e-6
    warmup: int = 200
    weight_decay: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    initial_scale: float | None = 100.0
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    workers: int = 2
    eval_every: int = 500
    checkpoint_every: int = 500
    log_every: int = 10
    max_bad: float = 0.01
    check_data: bool = False

    def __post_init__(self):
        for name in ("batch", "epochs", "stretch", "eval_every", "checkpoint_every", "log_every"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("validation", "warmup", "weight_decay", "workers", "keep_positions"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("max_steps", self.max_steps is None or self.max_steps >= 1, "at least 1, or null")
        self._require("learning_rate", self.learning_rate > 0 and math.isfinite(self.learning_rate), "above 0")
        self._require("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)")
        self._require(
            "initial_scale", self.initial_scale is None or 0 < self.initial_scale <= 100, "in (0, 100], or null"
        )
        self._require("max_bad", 0 <= self.max_bad <= 1, "in [0, 1]")
        self._choose("sampling", SAMPLERS)
        self._choose("padding", PADDINGS)
        self.make_recipe()

    def _require(self, name: str, fits: bool, rule: str) -> None:
        if not fits:
            raise UserError(f"{name} is {getattr(self, name)!r}, but must be {rule}.")

    def _choose(self, name: str, allowed: dict) -> None:
        value = getattr(self, name)
        if value is not None and value not in allowed:
            raise UserError(
                f"Unknown {name} {value!r}.{near_matches(value, allowed)} Choose one of: {', '.join(allowed)}."
            )

    def make_recipe(self) -> Recipe:
        """The named recipe with this configuration's overrides."""
        names = ("sampling", "padding", "short_weight", "components", "label_smoothing")
        overrides = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(find_recipe(self.recipe), **overrides)

    def settings(self) -> dict:
        """All that decides what comes out, as plain JSON values."""
        settings = asdict(self) | {"betas": list(self.betas)}
        return {name: value for name, value in settings.items() if name not in _WITHOUT_EFFECT}
