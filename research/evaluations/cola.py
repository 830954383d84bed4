"""Cola: do objects keep their own attributes? (Ray et al. 2023, https://github.com/arijitray1993/COLA)

Files and scores are those of the authors' README and `scripts/eval.py`. The multi-object file was read; the three
single-object files are known from the README alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional.classification import binary_average_precision

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.data.bad_records import BadRecord, check_share, leave_out, print_left_out
from debias_diffusion.data.captions import fold
from debias_diffusion.data.images import ImageFolder
from debias_diffusion.data.records import Record
from debias_diffusion.data.retrieval import TIE, embed_texts
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.eval.image_features import ImageSession
from debias_diffusion.eval.intervals import mean_interval, paired_difference
from debias_diffusion.eval.report import Table, cell, compared_tables
from debias_diffusion.eval.session import Pairs, compare_encoders
from debias_diffusion.files import read_json, sha256

from .options import ColaConfig

MULTI, SINGLE = "multi-object", "single-object"
DATA = "https://github.com/arijitray1993/COLA/tree/main/data"


@dataclass(frozen=True)
class Cola:
    """One of Cola's files.

    Attributes:
        part: `MULTI` or `SINGLE`.
        images: the file names of all images, [N].
        texts: captions, two an item, [2 * items], or the names of the classes, [C].
        image_of: the position in `images` of each caption's image, [2 * items]; of a single-object file empty.
        present: whether an image shows a class, [N, C]; of a multi-object file [N, 0].
        hard: whether an image counts for a class, [N, C]; likewise.
        bad: the bad records.
    """

    part: str
    images: list[str]
    texts: list[str]
    image_of: list[int]
    present: Tensor
    hard: Tensor
    bad: list[BadRecord]


def read_cola(file: str | Path) -> Cola:
    """Reads a file of Cola's `data/`; which kind it is shows in its content.

    Multi-object: a list of items `[image 1, caption 1, image 2, caption 2]`, images by address. Single-object: `labels`
    and `data`, by these keys or as a list of two (the README has the first, `eval.py` the second); `labels` are the
    names of the classes, and `data` a list of `[image, annotation, label, hard list]`, the annotation missing in PACO,
    label and hard list with 0 or 1 for each class. An image is known by the last part of its address or path.

    Raises:
        UserError: the file is none of Cola's, or has no record that can be used.
    """
    file, content = Path(file), read_json(file, object)
    classes, entries, good, bad = None, content, [], []
    with explain_failure(f"{str(file)!r} is none of Cola's files", f"Give one from {DATA}."):
        if isinstance(content, dict):
            classes, entries = content["labels"], content["data"]
        elif len(content) == 2 and isinstance(content[1][0], list):
            classes, entries = content
        for index, entry in enumerate(entries):
            with leave_out(f"{file.name}, entry {index}", bad), explain_failure("unusable entry"):
                good.append(_item(*entry) if classes is None else _labelled(entry, len(classes)))
    if not good:
        raise UserError(f"{str(file)!r} has no record that can be used. The first: {bad[0] if bad else 'none'}.")
    if classes is None:
        pairs = [pair for item in good for pair in item]
        images = list(dict.fromkeys(image for image, _ in pairs))
        place = {image: position for position, image in enumerate(images)}
        none = torch.zeros(len(images), 0, dtype=torch.bool)
        return Cola(MULTI, images, [text for _, text in pairs], [place[image] for image, _ in pairs], none, none, bad)
    images, *flags = zip(*good, strict=True)
    present, hard = map(torch.stack, flags)
    return Cola(SINGLE, list(images), [fold(name) for name in classes], [], present, hard, bad)


def _item(*parts: str) -> list[tuple[str, str]]:
    """The (image, caption) pairs of an item."""
    a, caption_a, b, caption_b = parts
    if _name(a) == _name(b) or not (caption_a.strip() and caption_b.strip()):
        raise ValueError(f"it must have two images and two captions, found {str(parts)[:60]}")
    return [(_name(a), fold(caption_a)), (_name(b), fold(caption_b))]


def _labelled(entry: list, classes: int) -> tuple[str, Tensor, Tensor]:
    """(image, label, hard list) of an entry."""
    image, *_, label, hard = entry
    if not all(len(flags) == classes and {*flags} <= {0, 1} for flags in (label, hard)):
        raise ValueError(f"label and hard list must be 0 or 1 for each of {classes} classes, found {str(entry)[:60]}")
    return _name(image), torch.tensor(label) == 1, torch.tensor(hard) == 1


def _name(image: str) -> str:
    """The last part of an image's address or path. Raises ValueError where there is none."""
    if not (name := PurePosixPath(urlsplit(image).path).name):
        raise ValueError(f"{image[:60]!r} names no image")
    return name


def right_items(image_features: Tensor, text_features: Tensor, image_of: Sequence[int]) -> list[float]:
    """100 for each item both of whose captions are more similar to their own image than to the other's, else 0.

    Args:
        image_features: [N, D]
        text_features: of two captions an item, one after the other, [2 * items, D].
        image_of: the row of each caption's image, [2 * items].
    """
    images, texts = (F.normalize(part.double(), dim=1) for part in (image_features, text_features))
    own = torch.as_tensor(image_of)
    other = own.view(-1, 2).flip(1).flatten()
    similar, wrong = ((texts * images[rows]).sum(dim=1) for rows in (own, other))
    return (100.0 * ((wrong < similar - TIE) | (other == own)).view(-1, 2).all(dim=1)).tolist()


def class_precisions(image_features: Tensor, text_features: Tensor, present: Tensor, hard: Tensor) -> dict[int, float]:
    """The average precision of each class among its hard images by cosine similarity, in percent, by its number.

    Classes that no hard image shows are left out: they have none. Equally similar images share one threshold.

    Args:
        image_features: [N, D]
        text_features: of the classes' names, [C, D].
        present, hard: as in `Cola`, [N, C].
    """
    images, texts = (F.normalize(part.double(), dim=1) for part in (image_features, text_features))
    similarity = ((images @ texts.T + 1) / 2).clamp(0, 1)  # torchmetrics takes other values for logits
    precisions = {}
    for number in range(len(texts)):
        rows = hard[:, number]
        labels = present[rows, number].int()
        if labels.any():
            precisions[number] = 100 * float(binary_average_precision(similarity[rows, number], labels))
    return precisions


def evaluate_cola(config: ColaConfig) -> dict:
    """Accuracy on Cola's items, or mAP over its classes; writes `cola.json` and prints tables.

    Items with an unreadable image, and unreadable images of classes, are left out. The text of a class is its name.

    Returns:
        The content of the file, see `Session.report`, with `part` and its `measure`, numbers of images, items and
        classes; by encoder the score in percent with its 95% interval (bootstrap over items, or classes) and every
        item's or class's. Encoders are compared in points, paired by item or class.

    Raises:
        UserError: the data or an encoder cannot be used, or more is bad than the share `max_bad`.
    """
    data = read_cola(config.data)
    print_left_out(data.bad)
    check_share(data.bad, len(data.images) + len(data.bad), config.max_bad)
    records, digest = [Record(name, name, "") for name in data.images], sha256(config.data)
    pairs = Pairs(records, ImageFolder(config.images), data.texts, data.image_of, data.bad, digest)
    session = ImageSession("cola", config, pairs)
    results = session.by_encoder(partial(_score, session, data))
    kind, measure = ("items", "accuracy") if data.part == MULTI else ("classes", "mAP")
    values = {label: {kind: list(scores.values())} for label, scores in results.items()}
    unreadable = len(session.left_out) - len(data.bad)
    return session.report(
        tables,
        figures,
        {label: _numbers(data, scores) for label, scores in results.items()},
        compare_encoders(values, lambda a, b, _: paired_difference(a, b)),
        [_NOTES[data.part]],
        part=data.part,
        measure=measure,
        images=len(data.images) - unreadable,
        **{kind: len(next(iter(results.values())))},
    )


_NOTES = {
    MULTI: "An item counts if each of its two captions is more similar to its own image than to the other.",
    SINGLE: "mAP is the mean over the classes of the average precision among each class's hard images.",
}


def _score(session: ImageSession, data: Cola, label: str, backbone: Backbone) -> dict[int, float]:
    """One encoder's score of each item, or of each class by its number."""
    (features, good), config, scores = session.encode(label, backbone), session.config, {}
    compute = partial(embed_texts, backbone, data.texts, config.batch_size, session.device, f"texts, {label}")
    depends = {"encoder": session.digests["encoders"][label], "texts": data.texts}
    texts = session.cache.tensors("texts", depends, lambda: {"features": compute()})["features"]
    if data.part == SINGLE:
        rows = torch.tensor(good)
        scores = class_precisions(features, texts, data.present[rows], data.hard[rows])
    else:
        row_of = {position: row for row, position in enumerate(good)}
        owners = torch.tensor([row_of.get(image, -1) for image in data.image_of]).view(-1, 2)  # of each item's captions
        readable = (owners >= 0).all(dim=1)
        if readable.any():
            captions, rows = texts[readable.repeat_interleave(2)], owners[readable].flatten().tolist()
            right = right_items(features, captions, rows)
            scores = dict(zip(readable.nonzero().flatten().tolist(), right, strict=True))
    if not scores:
        raise UserError(
            f"{config.data!r} leaves nothing to score: no item has both images, or no class an image that shows it."
        )
    return scores


def _numbers(data: Cola, scores: dict[int, float]) -> dict:
    values = list(scores.values())
    by = {data.texts[number]: score for number, score in scores.items()} if data.part == SINGLE else values
    return {"score_percent": sum(values) / len(values), "interval_percent": mean_interval(values), "scores_percent": by}


def tables(report: dict) -> list[Table]:
    """The numbers of a report, and the encoders compared."""
    count = f"{report['items']} items" if report["part"] == MULTI else f"{report['classes']} classes"
    rows = [
        [label, cell(numbers["score_percent"], *numbers["interval_percent"])]
        for label, numbers in report["encoders"].items()
    ]
    header = [f"Cola, {report['part']}, percent of {count}", f"{report['measure']} (95% interval)"]
    return [Table(header, rows), *compared_tables(report["compared"])]


def figures(report: dict) -> dict:
    """None: a page shows the tables alone."""
    return {}
