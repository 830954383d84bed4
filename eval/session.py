"""What every evaluation has: its data, encoders one after the other, a cache of results, and the report."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file
from torch import Tensor

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.clip.weight_files import save_tensors
from debias_diffusion.data.bad_records import check_share, print_left_out
from debias_diffusion.data.seen import seen_positions
from debias_diffusion.data.sources import data_digest, open_data, read_captions
from debias_diffusion.devices import pick_device
from debias_diffusion.encoders.spec import EncoderSpec
from debias_diffusion.errors import UserError
from debias_diffusion.files import atomic_file, json_digest, read_checked, with_checksum, write_json
from debias_diffusion.limits import SHAREGPT4V_HELD_OUT

from .report import Table, versions, write_png
from .retrieval_sets import Pairs, read_retrieval_set

CACHE = "cache"  # in an evaluation's output folder

Result = TypeVar("Result")


# ---- data


def read_source(
    config: Any,
    encoders: Mapping[str, EncoderSpec] | None = None,
    held_out: bool = False,
    beside: Sequence[EncoderSpec] = (),
    only_captions: bool = False,
) -> Pairs:
    """The first `limit` images, with their captions, of the data or the benchmark that settings name.

    A limit of "auto" is 1,000 pairs of data and all of a benchmark. Bad records are also named on the console.

    Args:
        config: has `data`, `limit`, `max_bad`, `dataset` (and `root`, if that is given) and `images`.
        encoders: by label, see `Pairs.trained_on`.
        held_out: only pairs that none of the encoders has seen.
        beside: encoders that read with each of these.
        only_captions: images of data need not be there.

    Raises:
        UserError: the data cannot be used, or more of it than the share `max_bad`.
    """
    specs, limit = {label: [spec, *beside] for label, spec in (encoders or {}).items()}, config.limit
    if dataset := config.dataset:
        [name] = [dataset] if isinstance(dataset, str) else dataset
        pairs, most = read_retrieval_set(name, config.root), None
    else:
        name, most = config.data, SHAREGPT4V_HELD_OUT
        source, images = (read_captions(name), None) if only_captions else open_data(name, config.images)
        pairs = Pairs(source.records, images, [], [], source.bad, data_digest(name, source))
    count = len(pairs.records)
    print_left_out(pairs.bad)
    check_share(pairs.bad, max(count, len(pairs.captions)) + len(pairs.bad), config.max_bad)
    chosen = _choose(specs, held_out, name, pairs.digest, count, most if limit == "auto" else limit)
    if dataset:
        return pairs.select(*chosen)
    records = pairs.records[chosen[0]]
    captions, image_of = [record.caption for record in records], list(range(len(records)))
    return replace(pairs, records=records, captions=captions, image_of=image_of, trained_on=chosen[1])


def _choose(
    encoders: Mapping[str, Sequence[EncoderSpec]], held_out: bool, data: str, digest: str, count: int, limit: int | None
) -> tuple[np.ndarray, dict[str, int]]:
    """The positions of the pairs to evaluate on, and how many of them each encoder has seen, see `Pairs.trained_on`."""
    seen = {label: seen_positions(specs, digest, count) for label, specs in encoders.items()}
    seen = {label: positions for label, positions in seen.items() if positions is not None}
    chosen = np.arange(count)
    if held_out:
        if not seen:
            raise UserError(f"None of the encoders was trained or chosen on the data {data!r}. Leave out held_out.")
        chosen = np.flatnonzero(~np.any(list(seen.values()), axis=0))
        if not len(chosen):
            raise UserError(
                f"Each of the {count} pairs of {data!r} was seen by one of the encoders: {', '.join(seen)}. Give other "
                "data, or leave out held_out."
            )
    chosen = chosen[:limit]
    return chosen, {label: int(positions[chosen].sum()) for label, positions in seen.items()}


# ---- cache


class ResultCache:
    """On-disk cache of results, keyed by every input that affects them: settings, digests, library versions.

    So a killed evaluation resumes at the first unfinished result, changed settings find nothing, and evaluations of the
    same encoders on the same data share results, also at once. A damaged result is computed again.

    Attributes:
        folder: where results are kept.
        seconds: how long the results requested so far took to compute, in whichever run that was; tensors in this one.
    """

    def __init__(self, output: str | os.PathLike):
        self.folder, self.seconds = Path(output, CACHE), 0.0

    def result(self, kind: str, depends: dict, compute: Callable[[], dict]) -> dict:
        """The result of `compute`, in JSON values, from the cache if it is there.

        Args:
            kind: of result, for its file.
            depends: JSON values: everything that affects the result.
        """
        file, started = self._file(kind, depends, "json"), time.monotonic()
        if (kept := read_checked(file)) is None:
            content = json.loads(json.dumps(compute()))  # so that a first run and a resumed one get the same
            kept = {"content": content, "seconds": time.monotonic() - started}
            write_json(file, with_checksum(kept))
        self.seconds += kept["seconds"]
        return kept["content"]

    def tensors(self, kind: str, depends: dict, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The same for tensors on the CPU, in one file, which is written whole or not at all."""
        file, started = self._file(kind, depends, "safetensors"), time.monotonic()
        if not file.exists():
            content = compute()
            with atomic_file(file) as temporary:
                save_tensors(content, temporary)
            self.seconds += time.monotonic() - started
        return load_file(file)

    def _file(self, kind: str, depends: dict, ending: str) -> Path:
        digest = json_digest({"depends": depends, "versions": versions()})
        return self.folder / f"{kind}-{digest[:32]}.{ending}"


# ---- encoders, and the report


class Session:
    """One evaluation of several encoders.

    Args:
        name: of the results, NAME.json.
        config: its settings.
        data: has a `digest` and `bad` records; None where nothing is read.
        device: where to run; by default as the settings say.

    Attributes:
        encoders: by label.
        cache: of results.
        digests: for the report: "data" and, of the encoders so far, "encoders" by label.
        left_out: the bad records so far.
    """

    def __init__(self, name: str, config: Any, data: Any, device: torch.device | None = None):
        self.name, self.config, self.device = name, config, device or pick_device(config.device)
        self.encoders: dict[str, EncoderSpec] = config.labelled
        self.cache = ResultCache(config.output)
        self.data = data
        self.digests: dict[str, Any] = {"data": data and data.digest, "encoders": {}}
        self.left_out = list(data.bad) if data else []

    def by_encoder(
        self,
        evaluate: Callable[[str, Any], Result],
        load: Callable[[EncoderSpec, torch.device], Any] = lambda spec, device: spec.load_two_tower().to(device),
    ) -> dict[str, Result]:
        """The result of `evaluate`, given label and encoder, for each encoder, by label. One at a time is in memory.

        Raises:
            UserError: an encoder cannot be loaded.
        """
        results = {}
        for label, spec in self.encoders.items():
            encoder = load(spec, self.device)
            self.digests["encoders"][label] = encoder.digest() if isinstance(encoder, Backbone) else spec.digest
            results[label] = evaluate(label, encoder)
            del encoder  # before the next one is loaded
        return results

    def report(
        self,
        tables: Callable[[dict], list[Table]],
        figures: Callable[[dict], dict[str, Figure]],
        encoders: dict[str, dict],
        compared: Sequence[dict] = (),
        notes: Sequence[str] = (),
        saved: Mapping[str, Figure] | None = None,
        seconds: float | None = None,
        **more,
    ) -> dict:
        """Writes NAME.json and the figures into the output folder, prints the tables, and returns the report.

        It holds settings, versions, digests, numbers by encoder, encoders compared, notes, bad records and seconds; of
        pairs also how many of them each encoder has seen.

        Args:
            tables, figures: of the report.
            encoders: numbers by label.
            compared: see `compare_encoders`.
            saved: figures that cannot be drawn again from the report, by file name.
            seconds: by default those of the results in the cache.
        """
        if isinstance(self.data, Pairs):
            more["trained_on"], count = self.data.trained_on, len(self.data.records)
            trained = [
                f"{label} was trained or chosen on {seen} of these {count} pairs. held_out takes the others."
                for label, seen in self.data.trained_on.items()
                if seen
            ]
            notes = [*trained, *notes]
        report = {
            "evaluation": self.name,
            "settings": asdict(self.config),
            "versions": versions(),
            "digests": self.digests,
            **more,
            "encoders": encoders,
            "compared": list(compared),
            "notes": list(notes),
            "left_out": [asdict(record) for record in self.left_out],
            "seconds": round(self.cache.seconds if seconds is None else seconds, 1),
        }
        write_json(Path(self.config.output) / f"{self.name}.json", report)
        for table in tables(report):
            print(f"\n{table}")
        for note in report["notes"]:
            print(f"Note: {note}")
        for name, figure in (figures(report) | (saved or {})).items():
            write_png(Path(self.config.output) / name, figure)
        return report


def compare_encoders(values: Mapping[str, Mapping], difference: Callable[..., dict]) -> list[dict]:
    """Every two encoders compared, the later with the earlier, by every score.

    Args:
        values: {label: {score: an argument of `difference`}}
        difference: (a, b, score) -> "difference" a - b, "low", "high", "p"

    Returns:
        {"a": label, "b": label, "score": name, "difference", "low", "high", "p"}, one for each pair and score.
    """
    return [
        {"a": a, "b": b, "score": score, **difference(values[a][score], values[b][score], score)}
        for b, a in combinations(values, 2)
        for score in values[b]
    ]
