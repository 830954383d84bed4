"""The losses: symmetric InfoNCE or pairwise sigmoid, image features rebuilt from principal components, both together.

All of them take features of the GLOBAL batch. A term whose name ends in `_loss` is part of the total; everything else
in a report is only logged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import UserError
from .base import Losses, Term

# Rows of similarities held at once; in larger batches they are recomputed in the backward pass.
_BLOCK = 1024


def contrastive_loss(
    image_features: Tensor, text_features: Tensor, scale: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Symmetric InfoNCE (CLIP; the paper's L^s and L^l).

    The mean of the cross-entropies over rows (image to text) and columns (text to image) of
    `scale * image_features @ text_features.T`, where row i belongs to column i. Memory grows with the batch, not with
    its square.

    Args:
        image_features: [batch, dim], used as they are: normalise them before.
        text_features: [batch, dim], likewise.
        scale: multiplies the similarities: a scale, not a temperature, and not its log.
        label_smoothing: the share of each label that is spread over the whole batch, in [0, 1).
    """

    def cross_entropies(rows: Tensor, columns: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scale * rows @ columns.T, labels, label_smoothing=label_smoothing, reduction="sum")

    batch = len(image_features)
    if batch <= _BLOCK:  # both directions from one product
        logits = scale * image_features @ text_features.T
        labels = torch.arange(batch, device=logits.device)
        i2t = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
        t2i = F.cross_entropy(logits.T, labels, label_smoothing=label_smoothing)
        return (i2t + t2i) / 2
    i2t = _sum_over_blocks(cross_entropies, image_features, text_features)
    t2i = _sum_over_blocks(cross_entropies, text_features, image_features)
    return (i2t + t2i) / (2 * batch)


def sigmoid_loss(image_features: Tensor, text_features: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """The pairwise sigmoid loss (SigLIP, Zhai et al. 2023, section 3.2).

    Every image and text is a yes-or-no question: `-log sigmoid(z_ij * (scale * image_i @ text_j + bias))` with
    z_ij = 1 for a pair and -1 otherwise, summed over all and divided by the batch.

    Args:
        image_features, text_features, scale: as for `contrastive_loss`.
        bias: a scalar, negative where most pairs do not belong together; SigLIP starts at -10.
    """

    def log_sigmoids(rows: Tensor, columns: Tensor, labels: Tensor) -> Tensor:
        logits = scale * rows @ columns.T + bias
        signs = 2 * F.one_hot(labels, len(columns)).to(logits.dtype) - 1
        return -F.logsigmoid(signs * logits).sum()

    return _sum_over_blocks(log_sigmoids, image_features, text_features) / len(image_features)


def _sum_over_blocks(term: Callable[[Tensor, Tensor, Tensor], Tensor], rows: Tensor, columns: Tensor) -> Tensor:
    """The sum of `term(block of rows, columns, the column of each row's pair)` over all blocks."""
    labels = torch.arange(len(rows), device=rows.device)
    if len(rows) <= _BLOCK:
        return term(rows, columns, labels)
    blocks = zip(rows.split(_BLOCK), labels.split(_BLOCK), strict=True)
    sums = [checkpoint(term, block, columns, matching, use_reentrant=False) for block, matching in blocks]
    return torch.stack(sums).sum()


def check_components(components: int, batch: int, dim: int) -> None:
    """Raises UserError unless `components` < min(batch - 1, dim): otherwise rebuilding changes nothing."""
    if not 1 <= components < min(batch - 1, dim):
        raise UserError(
            f"components is {components}, but must be at least 1 and less than {min(batch - 1, dim)}, the smaller of "
            f"the global batch, or a part of it, less one ({batch - 1}) and the features' dimension ({dim}). Take a "
            "larger batch or fewer components."
        )


def rebuild_from_components(features: Tensor, components: int) -> Tensor:
    """The part of each feature vector that the batch's first principal components span (Long-CLIP, section 3.2).

    The mean is subtracted, the rest projected on the `components` directions of largest variance, the mean added back.
    Gradients pass through the mean and the projected features, not through the choice of directions: differentiating a
    decomposition is what makes SVD-based trainers diverge. Nothing is normalised.

    Args:
        features: [batch, dim]; half precisions are computed in float32.

    Returns:
        [batch, dim] in the dtype computed in.
    """
    check_components(components, *features.shape)
    with torch.autocast(features.device.type, enabled=False):
        features = features if features.dtype == torch.float64 else features.float()
        mean = features.mean(dim=0, keepdim=True)
        centred = features - mean
        # [dim, components]
        basis = _principal_directions(centred.detach(), components)
        return mean + centred @ basis @ basis.T


@torch.no_grad()
def _principal_directions(centred: Tensor, components: int) -> Tensor:
    """Orthonormal [dim, components], from the Gram matrix of the smaller side."""
    batch, dim = centred.shape
    # A feature that is not finite must make the loss not finite, and not the decomposition fail.
    centred = centred.where(centred.isfinite(), 0)
    if dim <= batch:
        return torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -components:]
    left = torch.linalg.eigh(centred @ centred.T).eigenvectors[:, -components:]
    # QR instead of dividing by the singular values: some are zero where images repeat.
    return torch.linalg.qr(centred.T @ left).Q


def _rebuild_parts(features: Tensor, components: int, parts: int) -> Tensor:
    """`rebuild_from_components` of each of so many equal parts of a batch."""
    if parts == 1:  # without a step in between, so that gradients are rounded as ever
        return rebuild_from_components(features, components)
    return torch.cat([rebuild_from_components(part, components) for part in features.chunk(parts)])


@dataclass(frozen=True)
class DualCaptionLoss(Term):
    """L = w * L_short + (1 - w) * L_long (DeBias-CLIP, Algorithm 1, lines 14 to 16).

    L_long compares the images with their long captions; L_short compares the images rebuilt from their first principal
    components with the short captions. Symmetric InfoNCE, or with a bias the pairwise sigmoid loss, which has no label
    smoothing.

    It reads the features "image", "long_text" and "short_text", each [global batch, embed_dim], not normalised; a
    caption that is not among them has no loss. "short_image" is the view of the images that short captions are compared
    with; without it, the images themselves.

    Attributes:
        short_weight: w, in [0, 1].
        components: of the image features that L_short sees; 0 takes the features themselves.
        component_parts: the batch is cut into so many equal parts, and each is rebuilt from its own components, as by
            Long-CLIP's code, which decomposes the features of each process before it gathers them.

    Example:
        >>> features = {name: torch.randn(8, 16) for name in ("image", "long_text", "short_text")}
        >>> losses, report = DualCaptionLoss(0.1, components=4).losses(features, torch.tensor(10.0))
        >>> sorted(losses)
        ['long_loss', 'short_loss']
    """

    short_weight: float
    components: int
    label_smoothing: float = 0.0
    component_parts: int = 1

    def losses(self, features: Mapping[str, Tensor], scale: Tensor, bias: Tensor | None = None) -> Losses:
        def loss(image: Tensor, text: Tensor) -> Tensor:
            if bias is None:
                return contrastive_loss(image, text, scale, self.label_smoothing)
            return sigmoid_loss(image, text, scale, bias)

        image, terms = F.normalize(features["image"], dim=-1), {}
        if "short_text" in features:
            view = F.normalize(features["short_image"], dim=-1) if "short_image" in features else image
            rebuilt = _rebuild_parts(view, self.components, self.component_parts) if self.components else view
            terms["short"] = (self.short_weight, loss(rebuilt, F.normalize(features["short_text"], dim=-1)))
        if "long_text" in features:
            terms["long"] = (1 - self.short_weight, loss(image, F.normalize(features["long_text"], dim=-1)))
        losses = {f"{name}_loss": weight * value for name, (weight, value) in terms.items()}
        report = {name: value.detach() for name, (_, value) in terms.items()} | {"logit_scale": scale.detach()}
        return losses, report | ({} if bias is None else {"logit_bias": bias.detach()})
