"""What every evaluation has: encoders one after the other, a cache, bad records, and the report."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import torch
from matplotlib.figure import Figure

from debias_diffusion.data.bad_records import BadRecord
from debias_diffusion.devices import pick_device
from debias_diffusion.encoders import EncoderSpec
from debias_diffusion.files import json_digest, write_json
from debias_diffusion.models.backbone import Backbone

from .cache import ResultCache
from .registry import EVALUATIONS
from .report import show, versions

Result = TypeVar("Result")


@dataclass(frozen=True)
class TwoTower:
    """An encoder with its image tower.

    Attributes:
        label: short, and unique among the encoders of one evaluation.
        backbone: in evaluation mode, on its device.
        digest: of its weights and of replaced attention.
    """

    label: str
    backbone: Backbone
    digest: str

    @classmethod
    def load(cls, spec: EncoderSpec, label: str, device: torch.device) -> "TwoTower":
        backbone = spec.load_two_tower().to(device)
        return cls(label, backbone, backbone.digest())

    @cached_property
    def depends(self) -> dict:
        """Everything that affects its features, for the cache."""
        return {"encoder": self.digest, **how_used(self.backbone)}


def how_used(backbone: Backbone) -> dict:
    """Everything besides its weights that affects a two-tower's features."""
    tokenizer = json.loads(backbone.tokenizer.tokenizer.backend_tokenizer.to_str())
    # These two are left from the last call, and no row here depends on them.
    rules = {name: rule for name, rule in tokenizer.items() if name not in ("truncation", "padding")}
    return {
        "configuration": backbone.config,
        "tokenizer": json_digest(rules),
        "markers": asdict(backbone.tokenizer.markers),
    }


class Session:
    """One evaluation of several encoders.

    Args:
        name: in `registry.EVALUATIONS`.
        config: its settings.
        data: digest of the data.
        bad: the bad records of the data.
        device: where to run; by default as the settings say.

    Attributes:
        encoders: by label.
        cache: of results.
        digests: for the report: "data" and, of the encoders so far, "encoders" by label.
        left_out: the bad records so far.
    """

    def __init__(
        self,
        name: str,
        config: Any,
        data: str | None,
        bad: Sequence[BadRecord] = (),
        device: torch.device | None = None,
    ):
        self.name, self.config, self.device = name, config, device or pick_device(config.device)
        self.encoders: dict[str, EncoderSpec] = config.labelled
        self.cache = ResultCache(config.output)
        self.digests: dict[str, Any] = {"data": data, "encoders": {}}
        self.left_out = list(bad)

    def of_each(
        self,
        evaluate: Callable[[Any], Result],
        load: Callable[[EncoderSpec, str, torch.device], Any] = TwoTower.load,
    ) -> dict[str, Result]:
        """The result of `evaluate` for each encoder, by label. One encoder at a time is in memory.

        Args:
            load: (spec, label, device) -> encoder

        Raises:
            UserError: an encoder cannot be loaded.
        """

        def of_one(label: str, spec: EncoderSpec) -> Result:
            encoder = load(spec, label, self.device)
            self.digests["encoders"][label] = encoder.digest if isinstance(encoder, TwoTower) else spec.digest
            return evaluate(encoder)

        return {label: of_one(label, spec) for label, spec in self.encoders.items()}

    def report(
        self,
        encoders: dict[str, dict],
        compared: Sequence[dict] = (),
        notes: Sequence[str] = (),
        saved: Mapping[str, Figure] | None = None,
        seconds: float | None = None,
        **more,
    ) -> dict:
        """Writes NAME.json and the figures into the output folder, prints the tables, and returns the report.

        Args:
            encoders: numbers by label.
            compared: see `compare`.
            saved: figures that cannot be drawn again from the report, by file name.
            seconds: by default those of the results in the cache.
        """
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
        module = EVALUATIONS[self.name].load()
        show(report, module.tables(report), module.figures(report) | (saved or {}))
        return report


def compare(values: Mapping[str, Mapping], difference: Callable[..., dict]) -> list[dict]:
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
