"""Features of many images and captions, and retrieval recall between them, for training and evaluation."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
    image_features: Tensor,
    text_features: Tensor,
    ks: Sequence[int] = (1, 5, 10),
    block: int = 1024,
    image_of: Sequence[int] | None = None,
) -> dict[str, dict[str, float]]:
    """The share of queries with a partner among the k most similar candidates; see `recall_ranks`.

    Args:
        ks: ranks to report, each at least 1.

    Returns:
        {"text_to_image": {"R@1": percent, ...}, "image_to_text": {...}}

    Raises UserError as `recall_ranks`.
    """
    return {
        direction: {f"R@{k}": 100.0 * (ranks <= k).double().mean().item() for k in ks}
        for direction, ranks in recall_ranks(image_features, text_features, block, image_of).items()
    }


def recall_ranks(
    image_features: Tensor,
    text_features: Tensor,
    block: int = 1024,
    image_of: Sequence[int] | None = None,
    candidates: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> dict[str, Tensor]:
    """The rank, from 1, of each query's partner among its candidates, by cosine similarity.

    Text to image, each caption is a query and its image the only partner. Image to text, each image is a query, and its
    most similar caption counts.

    Ties count against the model: a partner's rank is 1 + the number of strangers at least as similar (within 1e-6), so
    it is last among equals. Duplicates in the data are ties, too. If all features are equal, recall is 0 for k up to
    the number of strangers. An image's other captions are not strangers.

    Args:
        image_features: [N, D], finite, normalised or not, on a device with double precision, as the CPU.
        text_features: [M, D]
        block: images, and captions, compared at once; memory grows with block * block, not with N * M.
        image_of: the row of each caption's image, [M], each image at least once; None: caption i is image i's, N = M.
        candidates: the rows that each query is ranked among, its partner included: M lists of images for
            "text_to_image", N lists of captions for "image_to_text". Only these directions are ranked, and images need
            no captions. None: both directions, each query among all.

    Returns:
        {"text_to_image": int64 [M], "image_to_text": int64 [N]}

    Raises:
        UserError: shapes do not fit or are empty, an image has no caption, a feature is not finite, or a query's
            candidates are not rows, repeat one, or lack its partner.
    """
    owners = _owners(image_features, text_features, image_of, every_image=candidates is None)
    if not all(part.isfinite().all() for features in (image_features, text_features) for part in features.split(block)):
        raise UserError("Features are NaN or infinite, so none is nearest. Check the model's weights.")
    if candidates is None:
        text_ranks, image_ranks = _ranks(image_features, text_features, owners, block)
        return {"text_to_image": text_ranks, "image_to_text": image_ranks}
    sides = {"text_to_image": (text_features, image_features), "image_to_text": (image_features, text_features)}
    return {
        direction: _ranks_among(direction, *sides[direction], owners, rows, block)
        for direction, rows in candidates.items()
    }


def _ranks_among(
    direction: str, queries: Tensor, gallery: Tensor, owners: Tensor, candidates: Sequence[Sequence[int]], block: int
) -> Tensor:
    """The rank, from 1, of each query's best partner among its candidates, [queries], last among equals."""
    counts = torch.tensor([len(rows) for rows in candidates], device=owners.device)
    rows = torch.tensor([row for rows in candidates for row in rows], dtype=torch.long, device=owners.device)
    if len(counts) != len(queries) or not ((rows >= 0) & (rows < len(gallery))).all():
        raise UserError(
            f"The candidates of {direction} must be {len(queries)} lists, one a query, of rows from 0 to "
            f"{len(gallery) - 1}; got {len(counts)} lists."
        )
    # One entry for each query and candidate, [sum of counts].
    asking = torch.arange(len(queries), device=owners.device).repeat_interleave(counts)
    is_partner = owners[asking] == rows if direction == "text_to_image" else owners[rows] == asking
    pairs = zip(asking.split(block), rows.split(block), strict=True)
    similarity = torch.cat([(_unit(queries[a]) * _unit(gallery[r])).sum(dim=1) for a, r in pairs])
    best = similarity.new_full((len(queries),), -torch.inf)
    best.scatter_reduce_(0, asking[is_partner], similarity[is_partner], "amax")
    repeated = len(torch.stack([asking, rows]).unique(dim=1).T) < len(rows)
    if repeated or best.isneginf().any():
        fault = "repeat a row" if repeated else f"of query {int(best.isneginf().nonzero()[0])} lack its partner"
        raise UserError(f"The candidates of {direction} {fault}. Name each candidate once, the partner too.")
    harder = ~is_partner & (similarity >= best[asking] - TIE)
    return torch.ones_like(best, dtype=torch.long).index_add_(0, asking, harder.long())


def _owners(
    image_features: Tensor, text_features: Tensor, image_of: Sequence[int] | None, every_image: bool = True
) -> Tensor:
    """The row of each caption's image, [M]. Raises UserError when the features do not fit it."""
    shapes = f"image features {tuple(image_features.shape)} and text features {tuple(text_features.shape)}"
    fit = image_features.ndim == text_features.ndim == 2 and image_features.shape[1] == text_features.shape[1]
    images, texts = len(image_features), len(text_features)
    if not fit or images == 0 or (image_of is None and images != texts):
        raise UserError(
            f"Recall got {shapes}. Both must be [N, D] with the same N >= 1 and D, or [N, D] and [M, D] with image_of."
        )
    owners = torch.arange(texts) if image_of is None else torch.as_tensor(image_of, dtype=torch.long, device="cpu")
    named = owners.unique()
    fits = torch.equal(named, torch.arange(images)) if every_image else bool(((named >= 0) & (named < images)).all())
    if owners.shape != (texts,) or not fits:
        raise UserError(
            f"Recall got {shapes} and image_of of {len(owners)} rows. It must name the image of each caption, "
            f"from 0 to {images - 1}, and each image at least once."
        )
    return owners.to(image_features.device)


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
        queries = _unit(images[start : start + block])
        least = best[start : start + block, None] - TIE
        for part in text_blocks:
            similarity = queries @ _unit(texts[part]).T  # [B, B]
            row = owners[part] - start
            partners = ((row >= 0) & (row < len(queries))).nonzero()[:, 0]
            similarity[row[partners], partners] = -torch.inf  # only strangers are counted
            text_ranks[part] += (similarity >= paired[part] - TIE).sum(dim=0)
            image_ranks[start : start + block] += (similarity >= least).sum(dim=1)
    return text_ranks, image_ranks


def _unit(features: Tensor) -> Tensor:
    """Rows of length 1, in double precision, whose rounding is far below TIE."""
    return F.normalize(features.double(), dim=1)


@torch.inference_mode()
def encode_images(
    backbone: Backbone,
    records: Sequence[Record],
    images: ImageSource,
    batch_size: int,
    device: torch.device | str,
    progress: str | Literal[False] = "images",
    read: Callable | None = None,
    encode: Callable[[Tensor], Tensor] | None = None,
    require_any: bool = True,
) -> tuple[Tensor, list[int], list[BadRecord]]:
    """The image features [M, D] on the CPU, the indices of the M readable records, and the bad records.

    Threads read the next batch while one is encoded.

    Args:
        progress: title of the progress bar; False shows none.
        read: turns an opened image into the input of `encode`; None: `backbone.preprocess`.
        encode: a batch of these to features [batch, D]; None: `backbone.encode_image`.
        require_any: False gives features [0, 0] where none of the images can be read.

    Raises:
        UserError: none of the images can be read.
    """
    read, encode = read or backbone.preprocess, encode or backbone.encode_image

    def load(record: Record) -> Tensor | BadRecord:
        return read_or_bad(record, lambda image: read(images.open(image)))

    features, good, bad = [], [], []
    starts = range(0, len(records), batch_size)
    with ThreadPoolExecutor(_READERS) as readers:
        ahead = deque()  # at most two batches, which bounds the memory
        for start in tqdm(starts, desc=progress or None, disable=not progress):
            while len(ahead) < 2 and (upcoming := start + len(ahead) * batch_size) < len(records):
                ahead.append([readers.submit(load, record) for record in records[upcoming : upcoming + batch_size]])
            loaded = [future.result() for future in ahead.popleft()]
            batch = [image for image in loaded if not isinstance(image, BadRecord)]
            good += [start + place for place, image in enumerate(loaded) if not isinstance(image, BadRecord)]
            bad += [image for image in loaded if isinstance(image, BadRecord)]
            if batch:
                features.append(encode(torch.stack(batch).to(device)).float().cpu())
    if require_any and not good:
        raise none_readable(records, images, bad)
    return torch.cat(features) if features else torch.empty(0, 0), good, bad


def none_readable(records: Sequence[Record], images: ImageSource, bad: Sequence[BadRecord]) -> UserError:
    """The error for images none of which can be read."""
    return UserError(
        f"None of the {len(records)} images can be read from {str(images.root)!r}. The first fault: {bad[0].detail}. "
        "If a data file names them, give the folder that its paths start from."
    )


@torch.inference_mode()
def encode_texts(
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
