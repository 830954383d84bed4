"""A page of captions whose image one encoder retrieves and another does not (Figure S9 of the DeBias-CLIP paper)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from debias_diffusion.data.bad_records import BadRecord, read_or_bad
from debias_diffusion.data.images import ImageSource
from debias_diffusion.data.records import Record

from .report import image_url, write_page

TEMPLATE = "retrieval_examples.html.j2"
SIDE = 320  # pixels of an image's longer side on the page


@dataclass(frozen=True)
class Disagreement:
    """Captions whose image one encoder ranks first and another does not.

    Attributes:
        right, wrong: labels of the encoders.
        total: how many such captions there are.
        queries: some of them, ascending.
    """

    right: str
    wrong: str
    total: int
    queries: list[int]


def disagreements(ranks: Mapping[str, Sequence[int]], count: int) -> list[Disagreement]:
    """Every two encoders, in both orders, with at most `count` captions each, drawn at random and always the same.

    Args:
        ranks: by encoder, the rank of each caption's image, from 1, [M].
    """
    disagreed = []
    for right, wrong in permutations(ranks, 2):
        queries = np.flatnonzero((np.asarray(ranks[right]) == 1) & (np.asarray(ranks[wrong]) > 1))
        some = np.random.default_rng(0).choice(queries, min(count, len(queries)), replace=False)
        disagreed.append(Disagreement(right, wrong, len(queries), sorted(some.tolist())))
    return disagreed


def nearest_strangers(images: Tensor, texts: Tensor, image_of: Sequence[int]) -> list[int]:
    """The row of the image most similar to each text among all but its own: what an encoder that is wrong has first.

    Args:
        images: features, [N, D], N at least 2.
        texts: features, [Q, D].
        image_of: the row of each text's image, [Q].
    """
    similarity = F.normalize(texts.double(), dim=1) @ F.normalize(images.double(), dim=1).T  # [Q, N]
    similarity[torch.arange(len(image_of)), torch.tensor(image_of)] = -torch.inf
    return similarity.argmax(dim=1).tolist()


def write_examples(
    path: Path,
    disagreed: Sequence[Disagreement],
    first: Mapping[str, Mapping[int, int]],
    captions: Sequence[str],
    image_of: Sequence[int],
    records: Sequence[Record],
    images: ImageSource,
) -> None:
    """Writes the page. All text on it is escaped, and images are part of it.

    Args:
        first: by wrong encoder and caption, the row of the image that it ranks before the caption's own.
        captions: of the readable images, [M].
        image_of: the row of each caption's image, [M].
        records: the readable images, by row.
        images: opens them.
    """
    sections = []
    for part in disagreed:
        examples = [
            {
                "caption": captions[query],
                "own": _thumbnail(records[image_of[query]], images),
                "other": _thumbnail(records[first[part.wrong][query]], images),
            }
            for query in part.queries
        ]
        sections.append({"right": part.right, "wrong": part.wrong, "total": part.total, "examples": examples})
    write_page(path, TEMPLATE, sections=sections, captions=len(captions))


def _thumbnail(record: Record, images: ImageSource) -> dict[str, str | None]:
    """The "name" of an image and its "source", a data URL; None if it can no longer be read."""
    image = read_or_bad(record, images.open)
    if isinstance(image, BadRecord):
        return {"name": record.image, "source": None}
    image = image.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    return {"name": record.image, "source": image_url(image, "jpeg", quality=85)}
