"""Features of many images and captions, and the recall of retrieval between them.

Here rather than in the evaluation because training watches it.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from .backbones import Backbone
from .data.dataset import UNREADABLE, unreadable
from .data.images import ImageFolder
from .data.sharegpt4v import BadRecord, Record
from .errors import UserError

# Cosine similarities closer than this are a tie. The same text or image, encoded in another batch or multiplied in
# another block, differs by float32 rounding; without a tolerance that would decide ranks.
TIE = 1e-6


def recall_at_k(
    image_features: Tensor, text_features: Tensor, ks: Sequence[int] = (1, 5, 10), block: int = 1024
) -> dict[str, dict[str, float]]:
    """The share of queries whose own partner is among the k most similar candidates, by cosine similarity.

    Ties cannot flatter: the partner's rank is 1 + the number of other candidates at least as similar as it (within
    1e-6), so it stands last among equals. Duplicates in the data are such ties too. If all features are the same,
    recall is 0 for k below the number of pairs.

    Args:
        image_features: [N, D], finite; need not be normalised.
        text_features: [N, D]; row i is the caption of image i.
        ks: ranks to report, each at least 1.
        block: queries compared at once; memory grows with block * N, never with N * N.

    Returns:
        {"text_to_image": {"R@1": percent, ...}, "image_to_text": {...}}

    Raises:
        UserError: shapes differ or are empty, a feature is not finite, or a k is below 1.
    """
    if image_features.ndim != 2 or image_features.shape != text_features.shape or len(image_features) == 0:
        raise UserError(
            f"recall_at_k got image features {tuple(image_features.shape)} and text features "
            f"{tuple(text_features.shape)}. Both must be [N, D] with the same N >= 1 and D."
        )
    if not (image_features.isfinite().all() and text_features.isfinite().all()):
        raise UserError("recall_at_k got features that are NaN or infinite. Check the model's weights.")
    if min(ks, default=0) < 1:
        raise UserError(f"recall_at_k got ks={tuple(ks)}. Give at least one k, each at least 1.")
    # In double precision rounding stays far below TIE.
    images = F.normalize(image_features.double(), dim=1)
    texts = F.normalize(text_features.double(), dim=1)
    recalls = {}
    for direction, queries, candidates in (("text_to_image", texts, images), ("image_to_text", images, texts)):
        ranks = _ranks(queries, candidates, block)
        recalls[direction] = {f"R@{k}": 100.0 * (ranks <= k).double().mean().item() for k in ks}
    return recalls


def _ranks(queries: Tensor, candidates: Tensor, block: int) -> Tensor:
    """The rank of candidate i for query i, from 1, last among equals. All [N, D], normalised; returns [N]."""
    ranks = []
    for start in range(0, len(queries), block):
        similarity = queries[start : start + block] @ candidates.T  # [B, N]
        partner = similarity.diagonal(offset=start)  # [B]
        ranks.append((similarity >= partner[:, None] - TIE).sum(dim=1))  # the partner itself is the 1
    return torch.cat(ranks)


@torch.inference_mode()
def encode_images(
    backbone: Backbone,
    records: Sequence[Record],
    images: ImageFolder,
    batch_size: int,
    device: torch.device | str,
    progress: bool = True,
    read: Callable | None = None,
) -> tuple[Tensor, list[int], list[BadRecord]]:
    """The image features [M, D] on the CPU, the positions of the M records they belong to, and the unreadable rest.

    Args:
        read: what `images` opens to what `backbone.encode_image` takes; None: `backbone.preprocess`.

    Raises:
        UserError: none of the images can be read.
    """
    read = read or backbone.preprocess
    features, good, bad = [], [], []
    for start in tqdm(range(0, len(records), batch_size), desc="images", disable=not progress):
        batch = []
        for index, record in enumerate(records[start : start + batch_size], start):
            try:
                batch.append(read(images.open(record.image)))
            except UNREADABLE as error:
                bad.append(unreadable(record, error))
            else:
                good.append(index)
        if batch:
            features.append(backbone.encode_image(torch.stack(batch).to(device)).float().cpu())
    if not features:
        raise UserError(
            f"None of the {len(records)} images can be read from {str(images.root)!r}. The first fault: "
            f"{bad[0].detail}. Give the folder that the data file's image paths start from."
        )
    return torch.cat(features), good, bad


@torch.inference_mode()
def encode_texts(
    backbone: Backbone,
    captions: Sequence[str],
    batch_size: int,
    device: torch.device | str,
    progress: bool = True,
) -> Tensor:
    """The text features [N, D] of `captions`, on the CPU. What exceeds the model's window is cut."""
    features = []
    for start in tqdm(range(0, len(captions), batch_size), desc="captions", disable=not progress):
        tokens = backbone.tokenize(list(captions[start : start + batch_size])).to(device)
        features.append(backbone.encode_text(tokens).float().cpu())
    return torch.cat(features)


def encode_pairs(
    backbone: Backbone,
    records: Sequence[Record],
    images: ImageFolder,
    batch_size: int,
    device: torch.device | str,
    progress: bool = True,
) -> tuple[Tensor, Tensor, list[BadRecord]]:
    """Image features [N, D] and text features [N, D] of the pairs whose image is readable, and the others by name."""
    image_features, good, bad = encode_images(backbone, records, images, batch_size, device, progress)
    captions = [records[index].caption for index in good]
    return image_features, encode_texts(backbone, captions, batch_size, device, progress), bad
