"""A page of captions whose image one encoder retrieves and another does not (Figure S9 of the DeBias-CLIP paper)."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.data.bad_records import BadRecord, read_or_bad
from debias_diffusion.data.images import ImageSource
from debias_diffusion.data.records import Record
from debias_diffusion.data.retrieval import cosines
from debias_diffusion.eval.image_features import PairSession
from debias_diffusion.eval.report import Table, image_url, write_page
from debias_diffusion.eval.retrieval import retrieve

from .options import ExamplesConfig

TEMPLATE = "retrieval_examples.html.j2"
SIDE = 320  # pixels of an image's longer side on the page


def evaluate_examples(config: ExamplesConfig) -> dict:
    """Captions that encoders disagree on; writes `retrieval-examples.json` and `.html` and prints a table.

    What `evaluate retrieval` has ranked into the same output folder is not encoded again.

    Returns:
        The content of the file, see `Session.report`, with the number of captions; by encoder "right", how many
        captions it alone has right beside each other encoder.

    Raises:
        UserError: the data or an encoder cannot be used.
    """
    session = PairSession("retrieval-examples", config)
    results = session.by_encoder(partial(retrieve, session))
    ranks = {label: result["ranks"]["text_to_image"] for label, result in results.items()}
    write_examples(session, ranks)
    counts = {label: {"right": {}} for label in results}
    for (right, wrong), queries in disagreements(ranks).items():
        counts[right]["right"][wrong] = len(queries)
    return session.report(tables, figures, counts, captions=len(next(iter(ranks.values()))))


def tables(report: dict) -> list[Table]:
    """How many captions one encoder has right and another wrong."""
    rows = [
        [f"{right} right, {wrong} wrong", count]
        for right, numbers in report["encoders"].items()
        for wrong, count in numbers["right"].items()
    ]
    return [Table([f"of {report['captions']} captions, image first", "captions"], rows)]


def figures(report: dict) -> dict[str, Figure]:
    """None: the examples are a page of their own."""
    return {}


def write_examples(session: PairSession, ranks: Mapping[str, Sequence[int]]) -> None:
    """Writes the page, `retrieval-examples.html`. All text on it is escaped, and images are part of it.

    Every two encoders are compared in both orders, with at most `config.examples` captions each, drawn at random and
    always the same.

    Args:
        ranks: by encoder, the rank of each caption's image, from 1, [M].
    """
    disagreed, count = disagreements(ranks), session.config.examples
    drawn = {
        pair: sorted(np.random.default_rng(0).choice(queries, min(count, len(queries)), replace=False).tolist())
        for pair, queries in disagreed.items()
    }

    def examples(label: str, backbone: Backbone) -> dict[int, dict]:
        """By caption that this encoder gets wrong, what the template shows of it."""
        readable = session.read(label, backbone)
        queries = sorted({query for (_, wrong), some in drawn.items() if wrong == label for query in some})
        if not queries:
            return {}
        captions, owners = ([part[query] for query in queries] for part in (readable.captions, readable.image_of))
        similarity = cosines(readable.features, session.embed_texts(readable, captions)).T  # [Q, N]
        similarity[range(len(queries)), owners] = -torch.inf  # a wrong encoder has another image first
        own, other = (
            [_thumbnail(session.records[readable.good[row]], session.images) for row in rows]
            for rows in (owners, similarity.argmax(dim=1).tolist())
        )
        parts = zip(queries, captions, own, other, strict=True)
        return {query: {"caption": text, "own": image, "other": first} for query, text, image, first in parts}

    by_wrong, sections = session.by_encoder(examples), []
    for (right, wrong), queries in disagreed.items():
        of_pair = [by_wrong[wrong][query] for query in drawn[right, wrong]]
        sections.append({"right": right, "wrong": wrong, "total": len(queries), "examples": of_pair})
    path = Path(session.config.output) / "retrieval-examples.html"
    write_page(path, TEMPLATE, Path(__file__).parent, sections=sections, captions=len(next(iter(ranks.values()))))
    print(f"Captions that one encoder gets right and another wrong: {path}")


def disagreements(ranks: Mapping[str, Sequence[int]]) -> dict[tuple[str, str], np.ndarray]:
    """By (right, wrong) encoder, the captions whose image the one ranks first and the other does not, ascending."""
    first = {label: np.asarray(of_encoder) == 1 for label, of_encoder in ranks.items()}
    return {(right, wrong): np.flatnonzero(first[right] & ~first[wrong]) for right, wrong in permutations(first, 2)}


def _thumbnail(record: Record, images: ImageSource) -> dict[str, str | None]:
    """The "name" of an image and its "source", a data URL; None if it can no longer be read."""
    image = read_or_bad(record, images.open)
    if isinstance(image, BadRecord):
        return {"name": record.image, "source": None}
    image = image.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    return {"name": record.image, "source": image_url(image, "jpeg", quality=85)}
