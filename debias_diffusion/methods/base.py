"""What a training method is: captions, features of both towers, and a list of loss terms."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..clip.backbone import Backbone
from ..data.batch import Batch, Caption
from ..limits import Checked
from ..text.tokens import CaptionTokenizer, TokenBatch

Losses = tuple[dict[str, Tensor], dict[str, Tensor]]  # the terms whose sum is minimised; and what is only logged


def image_features(backbone: Backbone, batch: Batch) -> Tensor:
    """[batch, embed_dim], encoded now or cached, not normalised."""
    return batch.images if batch.cached_features else backbone.encode_image(batch.images)


def at_least_float(features: Tensor) -> Tensor:
    """Half precisions in float32."""
    return features if features.dtype == torch.float64 else features.float()


class Term:
    """One loss of a method. All functions but `losses` have defaults.

    Chunks of a batch and several processes give the gradient of the whole batch, because `encode` sees one chunk and
    `losses` sees the features of all.
    """

    def check_base(self, base_model: Backbone) -> None:
        """Raises UserError when this base model cannot be trained with the term."""

    def modules(self, backbone: Backbone) -> dict[str, nn.Module]:
        """Modules of its own by name, made from the prepared base model with the run's seed.

        Parameters with `requires_grad` are trained and, like buffers, restored when a run resumes. Frozen ones, such as
        those of a reference model, are made anew by this function and take no room in a checkpoint. Nothing of them is
        in the saved model or exported: what belongs there, `Method.prepare` adds to the towers, or `Method.save` writes
        beside it.
        """
        return {}

    def views(
        self, image: Tensor, caption: str, tokenizer: CaptionTokenizer, seed: int, epoch: int, sample_id: str
    ) -> dict[str, Tensor]:
        """Whatever else is drawn for one sample, such as masks, crops or noise: tensors of one shape for all samples.

        `encode` finds them in `batch.views`, on its device, but integers on the CPU. A pure function of its arguments:
        torch's generator must not be used, or workers would change what is drawn.

        Args:
            image: pixels, uint8 [3, height, width]; [embed_dim] features where the image tower is frozen.
        """
        return {}

    def encode(
        self, backbone: Backbone, batch: Batch, features: Mapping[str, Tensor], modules: Any = None
    ) -> dict[str, Tensor]:
        """Further features of the batch, each floating point and [batch, ...], with gradients.

        A sample's features depend on that sample alone. Large states need not be gathered: reduce them here to a loss
        per sample, [batch]. A parameter that `losses` needs is a feature too, expanded to [batch, ...].

        Args:
            features: what the method and the terms before this one have encoded.
            modules: what all `modules` returned, as an nn.ModuleDict on the device; None if that is empty.
        """
        return {}

    def losses(self, features: Mapping[str, Tensor], scale: Tensor, bias: Tensor | None = None) -> Losses:
        """(losses, report) of the global batch.

        Args:
            features: of the method and all terms, each [global batch, ...].
            scale: exp(logit_scale), a scalar.
            bias: what SigLIP's loss adds to the scaled similarities; None for CLIP.

        Returns:
            Losses by names that end in "_loss", already weighted, whose sum is minimised; and detached scalars that are
            only logged.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """What it adds to the method's line in the plan and the model card; nothing by default."""
        return ""


@dataclass(frozen=True)
class Method(Checked, ABC):
    """What a model learns from, and which losses it minimises.

    A method is a frozen dataclass: its fields are its settings, checked by their annotations, and `__post_init__`
    raises UserError for values that cannot be used together. `METHODS` has them by the name that `--recipe` takes.

    `captions`, `encode`, `terms` and `describe` have to be written. The others have defaults.
    """

    @abstractmethod
    def captions(
        self, caption: str, tokenizer: CaptionTokenizer, seed: int, epoch: int, sample_id: str, short: str | None = None
    ) -> list[Caption]:
        """The captions that one sample is trained on, as many for every sample. A pure function of its arguments.

        Args:
            short: the short caption that the record brings, if it does.
        """

    @abstractmethod
    def encode(self, backbone: Backbone, batch: Batch, modules: Any = None) -> dict[str, Tensor]:
        """The features of images and captions that the terms compare, under the rules of `Term.encode`."""

    @property
    @abstractmethod
    def terms(self) -> Sequence[Term]:
        """The losses."""

    @abstractmethod
    def describe(self) -> str:
        """What the model learns from, in a line for the plan and the model card."""

    @property
    def reads_short(self) -> bool:
        """Whether `captions` needs the short caption that a record brings; records without one are then bad."""
        return False

    @property
    def decay(self) -> Literal["matrices", "all"]:
        """The parameters that weight decay acts on."""
        return "matrices"

    @property
    def rates(self) -> Mapping[str, float]:
        """What multiplies the learning rate of some parameters, by how their names in the optimizer begin: "method/"
        for those of `modules`."""
        return {}

    def check_base(self, base_model: Backbone, keep_positions: int, freeze_image_tower: bool) -> None:
        """Raises UserError when this base model cannot be trained so, which nothing has changed yet.

        Args:
            keep_positions: the run's `--keep-positions`, the first positions that are not stretched.
            freeze_image_tower: the run's `--freeze-image-tower`.
        """
        for term in self.terms:
            term.check_base(base_model)

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

    def modules(self, backbone: Backbone) -> dict[str, nn.Module]:
        """Of the terms, and of the method itself: see `Term.modules`."""
        return {name: module for term in self.terms for name, module in term.modules(backbone).items()}

    def save(self, folder: Path, modules: Any = None) -> None:
        """Writes what an evaluation needs of `modules` into the folder of a saved model, beside its weights."""

    def views(self, image: Tensor, *sample: Any) -> dict[str, Tensor]:
        """What the terms draw for one sample, and the method itself: see `Term.views`."""
        return {name: view for term in self.terms for name, view in term.views(image, *sample).items()}

    def collate(
        self, samples: Sequence[list[Caption]], tokenizer: CaptionTokenizer, before_sot: bool = False
    ) -> TokenBatch:
        """Every sample's `captions` as one batch: all first captions, then all second ones, and so on."""
        rows = [caption for kind in zip(*samples, strict=True) for caption in kind]
        is_short = [row.is_short for row in rows]
        return tokenizer.batch([row.ids for row in rows], [row.n_pre for row in rows], before_sot, is_short)

    def features(self, backbone: Backbone, batch: Batch, modules: Any = None) -> dict[str, Tensor]:
        """What `encode` and then each term encodes of a batch, which may be a chunk of one."""
        features = self.encode(backbone, batch, modules)
        for term in self.terms:
            features |= term.encode(backbone, batch, features, modules)
        return features

    def losses(self, features: Mapping[str, Tensor], scale: Tensor, bias: Tensor | None = None) -> Losses:
        """(losses, report) of all terms: see `Term.losses`."""
        losses, report = {}, {}
        for term in self.terms:
            term_losses, term_report = term.losses(features, scale, bias)
            losses |= term_losses
            report |= term_report
        return losses, report
