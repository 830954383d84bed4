"""What a training method provides, and the batch it gets. `docs/extending.md` adds one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..clip.backbone import Backbone
from ..limits import Checked
from ..text.tokens import CaptionTokenizer, TokenBatch

Key = tuple[int, int, int]  # (epoch, index of the record, position in the epoch)


@dataclass(frozen=True)
class Caption:
    """One tokenized caption, how many PADs stand in front of it, and whether the table for short captions reads it."""

    ids: list[int]
    n_pre: int = 0
    is_short: bool = False


@dataclass(frozen=True)
class Batch:
    """The samples of one step on one process.

    Attributes:
        keys: one per sample.
        sample_ids: of each sample, or of the one that stands in for it.
        images: [batch, 3, height, width] pixels; [batch, embed_dim] image features where `cached_features` is set.
        tokens: the method's captions, one kind after the other: `len(tokens)` is a multiple of the batch, and all rows
            share one prefix.
        bad: the bad records that were replaced.
        views: what `Method.views` drew, stacked: each [batch, ...]. Integers, such as ids, stay on the CPU, where a
            step can read them without a wait for the device.
        cached_features: whether `images` holds features of a frozen image tower instead of pixels.
    """

    keys: list[Key]
    sample_ids: list[str]
    images: Tensor
    tokens: TokenBatch
    bad: list
    views: dict[str, Tensor] = field(default_factory=dict)
    cached_features: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    def to(self, device: torch.device) -> "Batch":
        views = {
            name: view if view.dtype == torch.long else view.to(device, non_blocking=True)
            for name, view in self.views.items()
        }
        images = self.images.to(device, non_blocking=True)
        return replace(self, images=images, tokens=self.tokens.to(device), views=views)

    def pin_memory(self) -> "Batch":
        views = {name: view.pin_memory() for name, view in self.views.items()}
        return replace(self, images=self.images.pin_memory(), tokens=self.tokens.pin_memory(), views=views)

    def chunks(self, size: int) -> "list[Batch]":
        """The batch in chunks of `size` samples; the last may be smaller. `bad` stays with the whole batch."""
        if size >= len(self):
            return [self]
        kinds = len(self.tokens) // len(self)
        rows = [slice(start, min(start + size, len(self))) for start in range(0, len(self), size)]
        return [
            replace(
                self,
                keys=self.keys[part],
                sample_ids=self.sample_ids[part],
                images=self.images[part],
                tokens=self.tokens.select(
                    [kind * len(self) + row for kind in range(kinds) for row in range(part.start, part.stop)]
                ),
                bad=[],
                views={name: view[part] for name, view in self.views.items()},
            )
            for part in rows
        ]


def image_features(backbone: Backbone, batch: Batch) -> Tensor:
    """[batch, embed_dim], encoded now or cached, not normalised."""
    return batch.images if batch.cached_features else backbone.encode_image(batch.images)


def at_least_float(features: Tensor) -> Tensor:
    """Half precisions in float32."""
    return features if features.dtype == torch.float64 else features.float()


@dataclass(frozen=True)
class Method(Checked, ABC):
    """What a model learns from, and which losses it minimises.

    A method is a frozen dataclass: its fields are its settings, checked by their annotations, and `__post_init__`
    raises UserError for values that cannot be used together. `METHODS` has them by the name that `--recipe` takes.

    Four functions have to be written: `captions`, `encode`, `losses` and `describe`. The others have defaults. A
    subclass adds a loss by adding to what `super()` gives, in `modules`, `views`, `encode` and `losses`.
    """

    def check_base(self, base_model: Backbone, keep_positions: int, freeze_image_tower: bool) -> None:
        """Raises UserError when this base model cannot be trained so, which nothing has changed yet.

        Args:
            keep_positions: the run's `--keep-positions`, the first positions that are not stretched.
            freeze_image_tower: the run's `--freeze-image-tower`.
        """

    def modules(self, backbone: Backbone) -> dict[str, nn.Module]:
        """Modules of its own by name, made from the prepared base model with the run's seed.

        Parameters with `requires_grad` are trained and, like buffers, restored when a run resumes. Frozen ones, such as
        those of a reference model, are made anew by this function and take no room in a checkpoint. Nothing of them is
        in the saved model or exported: what belongs there, `prepare` adds to the towers, or `save` writes beside it.
        """
        return {}

    def save(self, folder: Path, modules: Any = None) -> None:
        """Writes what an evaluation needs of `modules` into the folder of a saved model, beside its weights."""

    def views(
        self, image: Tensor, caption: str, tokenizer: CaptionTokenizer, seed: int, epoch: int, sample_id: str
    ) -> dict[str, Tensor]:
        """Whatever else is drawn for one sample, such as masks, crops or noise: tensors of one shape for all samples.

        `encode` gets them on its device, but integers on the CPU.
        A pure function of its arguments; torch's generator must not be used, or workers would change what is drawn.

        Args:
            image: pixels, uint8 [3, height, width]; [embed_dim] features where the image tower is frozen.
        """
        return {}

    @abstractmethod
    def encode(self, backbone: Backbone, batch: Batch, modules: Any = None) -> dict[str, Tensor]:
        """Named features of the batch, each floating point and [batch, ...], with gradients.

        A sample's features depend on that sample alone, because the batch may be one chunk, on one of several
        processes. `losses` gets them gathered, for the global batch. Large states need not be gathered: reduce them
        here to a loss per sample, [batch]. A parameter that `losses` needs is a feature too, expanded to [batch, ...].

        Args:
            modules: what `modules` returned, as an nn.ModuleDict on the device; None if that is empty.
        """

    @abstractmethod
    def losses(
        self, features: dict[str, Tensor], scale: Tensor, bias: Tensor | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(losses, report) of the global batch.

        Args:
            features: what `encode` gave, each [global batch, ...].
            scale: exp(logit_scale), a scalar.
            bias: what SigLIP's loss adds to the scaled similarities; None for CLIP.

        Returns:
            The terms, already weighted, whose sum is minimised; and detached scalars that are only logged.
        """

    @abstractmethod
    def describe(self) -> str:
        """What the model learns from, in a line for the plan and the model card."""

    @property
    def reads_short(self) -> bool:
        """Whether `captions` needs the short caption that a record brings; records without one are then bad."""
        return False

    def rate(self, name: str) -> float:
        """Multiplies the learning rate of a parameter, by its name in the optimizer ("method/..." for `modules`)."""
        return 1.0

    def decays(self, parameter: nn.Parameter) -> bool:
        """Whether weight decay acts on a parameter: on matrices alone, as usual."""
        return parameter.ndim >= 2

    def fit(self, batch: int, embed_dim: int) -> "Method":
        """The method for that batch and features, where nobody has said how many components it takes."""
        return self

    def check(self, batch: int, embed_dim: int) -> None:
        """Raises UserError when the method cannot work with a global batch of `batch` and features of `embed_dim`."""

    def prepare(self, backbone: Backbone) -> "Method":
        """Changes the base model in place before training: its pooling, its attention, parameters added to a tower.

        Whatever changes a tower's output must be in its weights or in `backbone.config`, where digests, caches and
        exports see it; it is saved and exported with the model.

        Returns:
            The method for this model: one that knows sizes which `captions` or `views` needs.
        """
        return self

    @abstractmethod
    def captions(
        self, caption: str, tokenizer: CaptionTokenizer, seed: int, epoch: int, sample_id: str
    ) -> list[Caption]:
        """The captions that one sample is trained on, as many for every sample. A pure function of its arguments.

        A method with `reads_short` also takes the keyword `short`, the short caption of the record.
        """

    def collate(
        self, samples: Sequence[list[Caption]], tokenizer: CaptionTokenizer, before_sot: bool = False
    ) -> TokenBatch:
        """Every sample's `captions` as one batch: all first captions, then all second ones, and so on."""
        rows = [caption for kind in zip(*samples, strict=True) for caption in kind]
        is_short = [row.is_short for row in rows]
        return tokenizer.batch([row.ids for row in rows], [row.n_pre for row in rows], before_sot, is_short)
