"""The losses: symmetric InfoNCE, image features rebuilt from their principal components, and the two together.

All of them take features of the GLOBAL batch. A term whose name ends in `_loss` is part of the total; everything else
in a report is only logged.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .errors import UserError


@dataclass(frozen=True)
class Features:
    """What one step compares; each [global batch, embed_dim], not normalised."""

    image: torch.Tensor
    long_text: torch.Tensor
    short_text: torch.Tensor


def contrastive_loss(
    image_features: torch.Tensor, text_features: torch.Tensor, scale: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Symmetric InfoNCE (CLIP; the paper's L^s and L^l).

    The mean of the cross-entropies over rows (image to text) and columns (text to image) of
    `scale * image_features @ text_features.T`, where row i belongs to column i.

    Args:
        image_features: [batch, dim], used as they are: normalise them before.
        text_features: [batch, dim], likewise.
        scale: what the similarities are multiplied with: a scale, not a temperature, and not its log.
        label_smoothing: in [0, 1): the share of each label that is spread over the whole batch.
    """
    logits = scale * image_features @ text_features.T
    labels = torch.arange(len(logits), device=logits.device)
    i2t = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    t2i = F.cross_entropy(logits.T, labels, label_smoothing=label_smoothing)
    return (i2t + t2i) / 2


def check_components(components: int, batch: int, dim: int) -> None:
    """Raises UserError unless `components` < min(batch - 1, dim): otherwise rebuilding changes nothing."""
    if not 1 <= components < min(batch - 1, dim):
        raise UserError(
            f"components is {components}, but must be at least 1 and less than {min(batch - 1, dim)}, the smaller of "
            f"the global batch less one ({batch - 1}) and the features' dimension ({dim}). Take a larger batch or "
            "fewer components."
        )


def rebuild_from_components(features: torch.Tensor, components: int) -> torch.Tensor:
    """The part of each feature vector that the batch's first principal components span (Long-CLIP, section 3.2).

    The mean is taken off, the rest projected on the `components` directions of largest variance, the mean added back.
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
def _principal_directions(centred: torch.Tensor, components: int) -> torch.Tensor:
    """Orthonormal [dim, components], from the Gram matrix of the smaller side."""
    batch, dim = centred.shape
    if dim <= batch:
        return torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -components:]
    left = torch.linalg.eigh(centred @ centred.T).eigenvectors[:, -components:]
    # QR instead of dividing by the singular values: some are zero where images repeat.
    return torch.linalg.qr(centred.T @ left).Q


def dual_caption_objective(
    features: Features, scale: torch.Tensor, short_weight: float, components: int, label_smoothing: float
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """L = w * L_short + (1 - w) * L_long (DeBias-CLIP, Algorithm 1, lines 14 to 16).

    L_long compares the images with their long captions; L_short compares the images rebuilt from their first principal
    components with the short captions.

    Args:
        scale: exp(logit_scale), a scalar.
        short_weight: w, in [0, 1].

    Returns:
        (losses, report): the terms, already weighted, whose sum is L; and the unweighted losses and the scale,
        detached.

    Example:
        >>> f = Features(*torch.randn(3, 8, 16))
        >>> losses, report = dual_caption_objective(f, torch.tensor(10.0), 0.1, 4, 0.0)
        >>> sorted(losses)
        ['long_loss', 'short_loss']
    """
    image, long_text, short_text = (
        F.normalize(x, dim=-1) for x in (features.image, features.long_text, features.short_text)
    )
    long = contrastive_loss(image, long_text, scale, label_smoothing)
    short = contrastive_loss(rebuild_from_components(image, components), short_text, scale, label_smoothing)
    losses = {"short_loss": short_weight * short, "long_loss": (1 - short_weight) * long}
    return losses, {"short": short.detach(), "long": long.detach(), "logit_scale": scale.detach()}
