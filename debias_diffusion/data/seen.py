"""Which pairs a model has seen: was trained on, or chosen by, itself or a model that it was made from.

The record lies beside the weights and names data by their digest, so it holds wherever models and data are moved.
Whatever makes a model from others hands their records on.
"""

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np

from ..clip.weight_files import written_metadata
from ..encoders.spec import EncoderSpec
from ..errors import explain_failure
from ..files import read_json, write_json

SEEN = "seen.json"  # the record's file; in a single file of weights the key of its metadata
Seen = dict[str, list[tuple[int, int]]]  # by digest of data, the positions of records: [first, end) of each range


def read_seen(encoder: EncoderSpec) -> Seen:
    """The record of an encoder; empty where there is none, as of published models. Raises UserError if damaged."""
    place = Path(encoder.model.weights or encoder.model.location)
    # Text encoders and their weights lie in folders of a folder that was written as a whole.
    levels = 3 if place.is_file() else 2 if place.is_dir() else 0
    files = (folder / SEEN for folder in [place, *place.parents][:levels])
    with explain_failure(f"{SEEN} of {encoder.name!r}, what it was trained on, is damaged", "Get it again."):
        if not (content := place.is_file() and json.loads(written_metadata(place).get(SEEN, "{}"))):
            content = next((read_json(file) for file in files if file.is_file()), {})
        seen = {data: [range(first, end) for first, end in ranges] for data, ranges in content.items()}
        if wrong := [each for each in chain(*seen.values()) if each.start < 0 or not each]:
            raise ValueError(f"from {wrong[0].start} to {wrong[0].stop} are no records")
        return {data: [(each.start, each.stop) for each in ranges] for data, ranges in seen.items()}


def add_seen(records: Iterable[Seen], data: str, positions: range) -> Seen:
    """The record of a model that was made, on these positions of `data`, from models with these records."""
    seen = {data: [(positions.start, positions.stop)]}
    for record in records:
        for digest, ranges in record.items():
            seen[digest] = sorted({*map(tuple, seen.get(digest, [])), *map(tuple, ranges)})
    return seen


def write_seen(folder: Path, seen: Seen) -> None:
    """Writes a record into a model's folder."""
    if seen:
        write_json(folder / SEEN, seen)


def seen_positions(encoders: Iterable[EncoderSpec], data: str, count: int) -> np.ndarray | None:
    """[count] whether any of the encoders has seen the record of `data`; None where no record of theirs names it."""
    records = [record[data] for record in map(read_seen, encoders) if data in record]
    seen = np.zeros(count, dtype=bool)
    for first, end in chain.from_iterable(records):
        seen[first:end] = True
    return seen if records else None
