"""Features of many images and captions, and retrieval recall between them, for training and evaluation."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ..clip.backbone import Backbone
from ..errors import UserError
from ..files import bytes_digest
from .bad_records import BadRecord, read_or_bad
from .images import ImageSource, pixels_digest
from .records import Record

# Closer cosine similarities are a tie. The same text or image, encoded in another batch or multiplied in another block,
# differs by float32 rounding, which must not decide ranks.
TIE = 1e-6

_READERS = 4  # threads that read images; decoding and resizing release Python's lock
_AT_ONCE = 10_000  # images that wait for them


def recall_at_k(
    image_features: Tensor, text_features: Tensor, ks: Sequence[int] = (1, 5, 10)
) -> dict[str, dict[str, float]]:
    """The share of queries with a partner among the k most similar, for one caption an image; see `recall_ranks`.

    Args:
        ks: ranks to report, each at least 1.

    Returns:
        {"text_to_image": {"R@1": percent, ...}, "image_to_text": {...}}

    Raises UserError as `recall_ranks`.
    """
    return {
        direction: {f"R@{k}": 100.0 * (ranks <= k).double().mean().item() for k in ks}
        for direction, ranks in recall_ranks(image_features, text_features).items()
    }


def recall_ranks(
    image_features: Tensor, text_features: Tensor, block: int = 1024, image_of: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """The rank, from 1, of each query's partner among all candidates, by cosine similarity.

    Text to image, each caption is a query and its image the only partner. Image to text, each image is a query, and its
    most similar caption counts.

    Ties count against the model: a partner's rank is 1 + the number of strangers at least as similar (within 1e-6), so
    it is last among equals. Duplicates in the data are ties, too. If all features are equal, recall is 0 for k up to
    the number of strangers. An image's other captions are not strangers.

    Args:
        image_features: [N, D], finite, normalised or not, on a device with double precision, as the CPU.
        text_features: [M, D].
        block: images, and captions, compared at once; memory grows with block * block, not with N * M.
        image_of: the row of each caption's image, [M], each image at least once; None: caption i is image i's, N = M.

    Returns:
        {"text_to_image": int64 [M], "image_to_text": int64 [N]}

    Raises:
        UserError: shapes do not fit or are empty, an image has no caption, or a feature is not finite.
    """
    of_images, of_texts = tuple(image_features.shape), tuple(text_features.shape)
    owners = torch.arange(len(text_features)) if image_of is None else torch.as_tensor(image_of, device="cpu")
    fits = len(of_texts) == 2 and of_texts[1:] == of_images[1:]
    if not len(owners) or not fits or owners.unique().tolist() != list(range(of_images[0])):
        raise UserError(
            f"Recall got image features {of_images} and text features {of_texts}. They must be [N, D] and [M, D]; "
            "image_of must name the image of each caption, and each image at least once; without it N is M."
        )
    if not all(part.isfinite().all() for features in (image_features, text_features) for part in features.split(block)):
        raise UserError("Features are NaN or infinite, so none is nearest. Check the model's weights.")
    text_ranks, image_ranks = _ranks(image_features, text_features, owners.to(image_features.device), block)
    return {"text_to_image": text_ranks, "image_to_text": image_ranks}


def _ranks(images: Tensor, texts: Tensor, owners: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The ranks, from 1, of each caption's image [M] and of each image's best caption [N], last among equals.

    Every block of similarities is computed once and serves both directions.
    """
    text_blocks = [slice(start, start + block) for start in range(0, len(texts), block)]
    # [M] each caption with its image, and [N] each image with its most similar caption
    paired = torch.cat([(_unit(images[owners[part]]) * _unit(texts[part])).sum(dim=1) for part in text_blocks])
    best = paired.new_full((len(images),), -torch.inf).scatter_reduce_(0, owners, paired, "amax")
    text_ranks, image_ranks = torch.ones_like(owners), owners.new_ones(len(images))
    for start in range(0, len(images), block):
        queries = images[start : start + block]
        least = best[start : start + block, None] - TIE
        for part in text_blocks:
            similarity = cosines(queries, texts[part])  # [B, B]
            row = owners[part] - start
            partners = ((row >= 0) & (row < len(queries))).nonzero()[:, 0]
            similarity[row[partners], partners] = -torch.inf  # only strangers are counted
            text_ranks[part] += (similarity >= paired[part] - TIE).sum(dim=0)
            image_ranks[start : start + block] += (similarity >= least).sum(dim=1)
    return text_ranks, image_ranks


def cosines(images: Tensor, texts: Tensor) -> Tensor:
    """Cosine similarities [N, M], in double precision, of [N, D] with [M, D]."""
    return _unit(images) @ _unit(texts).T


def _unit(features: Tensor) -> Tensor:
    """Rows of length 1, in double precision, whose rounding is far below TIE."""
    return F.normalize(features.double(), dim=1)


@torch.inference_mode()
def encode_images(
    backbone: Backbone | None,
    records: Sequence[Record],
    images: ImageSource,
    batch_size: int,
    device: torch.device | str,
    progress: str | Literal[False] = "images",
    read: Callable | None = None,
    encode: Callable[[Tensor], Tensor] | None = None,
    readers: int = _READERS,
) -> tuple[Tensor, list[int], list[BadRecord]]:
    """The image features on the CPU, the indices of the M readable records, and the bad records.

    Features are [M, D], or [0, 0] where no image is readable.

    Threads read the next batch while one is encoded.

    Args:
        progress: title of the progress bar; False shows none.
        read: turns an opened image into the input of `encode`; None: `backbone.preprocess`.
        encode: a batch of these to features [batch, D]; None: `backbone.encode_image`.
        readers: threads that read images.
    """
    read, encode = read or backbone.preprocess, encode or backbone.encode_image

    def load(record: Record) -> Tensor | BadRecord:
        return read_or_bad(record, lambda image: read(images.open(image)))

    features, good, bad = [], [], []
    starts = range(0, len(records), batch_size)
    with ThreadPoolExecutor(readers) as pool:
        # One batch ahead, which bounds the memory: `map` starts reading at once.
        batches = (pool.map(load, records[start : start + batch_size]) for start in starts)
        ahead = next(batches, None)
        for start in tqdm(starts, desc=progress or None, disable=not progress):
            loading, ahead = ahead, next(batches, None)
            batch = []
            for index, image in enumerate(loading, start):
                if isinstance(image, BadRecord):
                    bad.append(image)
                else:
                    good.append(index)
                    batch.append(image)
            if batch:
                features.append(encode(torch.stack(batch).to(device)).float().cpu())
    return torch.cat(features) if features else torch.empty(0, 0), good, bad


def none_readable(records: Sequence[Record], images: ImageSource, bad: Sequence[BadRecord]) -> UserError:
    """The error for images none of which can be read."""
    return UserError(
        f"None of the {len(records)} images can be read from {str(images.root)!r}. The first fault: {bad[0].detail}. "
        "If a data file names them, give the folder that its paths start from."
    )


@torch.inference_mode()
def embed_texts(
    backbone: Backbone,
    captions: Sequence[str],
    batch_size: int,
    device: torch.device | str,
    progress: str | Literal[False] = "captions",
) -> Tensor:
    """The text features [N, D] of `captions`, on the CPU. Captions are cut to the model's context length.

    Args:
        progress: title of the progress bar; False shows none.
    """
    features = []
    starts = range(0, len(captions), batch_size)
    for start in tqdm(starts, desc=progress or None, disable=not progress):
        tokens = backbone.tokenize(list(captions[start : start + batch_size])).to(device)
        features.append(backbone.encode_text(tokens).float().cpu())
    return torch.cat(features)


def images_digest(records: Sequence[Record], images: ImageSource) -> str:
    """sha256 of the images' pixels, and of what is wrong with those that cannot be read."""

    def digest(record: Record) -> bytes:
        return str(read_or_bad(record, lambda image: pixels_digest(images.open(image)))).encode()

    with ThreadPoolExecutor(_READERS) as readers:
        parts = (records[start : start + _AT_ONCE] for start in range(0, len(records), _AT_ONCE))
        return bytes_digest(row for part in parts for row in readers.map(digest, part))
