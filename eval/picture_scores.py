"""Scores of pictures: pure functions of the features that `feature_networks` gives."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from debias_diffusion.errors import UserError


def _check_enough(generated: Sequence, originals: Sequence, option: str) -> None:
    if min(len(generated), len(originals)) < 2:
        raise UserError(
            f"FID needs at least 2 images on each side, got {len(generated)} generated and {len(originals)} "
            f"original ones. Raise the limit, or set {option} to null to skip FID."
        )


def frechet_distances(
    generated: Iterable[Sequence[Tensor]], originals: Iterable[Sequence[Tensor]], sizes: Sequence[int]
) -> list[float]:
    """The Fréchet distance of each kind of features, from batches of one tensor [B, size] for each of `sizes`."""
    metrics = [FrechetInceptionDistance(feature=_Identity(size)) for size in sizes]
    for batches, real in ((originals, True), (generated, False)):
        for batch in batches:
            for metric, features in zip(metrics, batch, strict=True):
                metric.update(features.double().cpu(), real=real)
    return [metric.compute().item() for metric in metrics]


class _Identity(nn.Module):
    """Hands features on, in the place where torchmetrics expects the network that makes them."""

    def __init__(self, num_features: int):
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def fid_inception(generated: dict[int, Tensor], originals: dict[int, Tensor]) -> dict[str, float]:
    """FID of each kind of Inception features, {"fid_64": ..., "fid_2048": ...}; the order of the rows does not matter.

    Args:
        generated, originals: {size: [N, size]}

    Raises:
        UserError: fewer than two images on a side, which have no covariance.
    """
    kinds = [list(side.values()) for side in (generated, originals)]
    _check_enough(kinds[0][0], kinds[1][0], "inception_weights")
    distances = frechet_distances([kinds[0]], [kinds[1]], list(generated))
    return {f"fid_{size}": distance for size, distance in zip(generated, distances, strict=True)}


def fid_own(generated: Tensor, originals: Tensor) -> float:
    """FID on features of a network of one's own, [N, D] and [M, D]; the order of the rows does not matter.

    Raises:
        UserError: fewer than two images on a side, which have no covariance.
    """
    _check_enough(generated, originals, "own_features")
    return frechet_distances([[generated]], [[originals]], [generated.shape[1]])[0]


def dino_score(generated: Tensor, originals: Tensor) -> float:
    """Mean cosine, in [-1, 1], of the features [N, D] of each generated image and its own original."""
    return nn.functional.cosine_similarity(generated.double(), originals.double(), dim=1).mean().item()
