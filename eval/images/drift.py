"""Drift: how far an encoder's hidden states have moved from those that the UNet was trained on. Needs no images.

The base is the SDXL checkpoint's own text encoder. Encoders read as the pipelines do, longer captions in chunks that
overlap. Each gives the UNet one state for each token, and these are compared.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm
from transformers import CLIPTokenizer

from debias_diffusion.clip.weight_files import model_digest
from debias_diffusion.encoders.spec import EncoderSpec
from debias_diffusion.encoders.text_encoders import TextEncoder
from debias_diffusion.errors import UserError
from debias_diffusion.files import json_digest
from debias_diffusion.text.chunks import Tokens
from debias_diffusion.text.encoding import encode
from debias_diffusion.text.prompt import plan_tokens
from debias_diffusion.text.prompt_tokens import tokenize_text
from debias_diffusion.text.tokens import clean

from ..intervals import Groups, group_numbers, mean_interval, paired_difference
from ..options import DriftConfig
from ..report import Table, cell, compared_tables, draw_by_position
from ..session import Session, compare_encoders, read_source

PADS = 24  # after EOT, whose states are compared
PARTS = {"text": "text", "sot": "SOT", "eot": "EOT", "pads": f"{PADS} pads"}
_RIDGE = 1e-3  # of the mean variance of the encoder's channels


@dataclass(frozen=True)
class StatesReader:
    """A text encoder as the pipelines read it.

    Attributes:
        name: as typed.
        encoder: in evaluation mode, on its device.
    """

    name: str
    encoder: TextEncoder
    tokenizer: CLIPTokenizer

    @classmethod
    def load(cls, spec: EncoderSpec, device: torch.device) -> "StatesReader":
        encoder, tokenizer = spec.load_text_encoder()
        return cls(spec.name, encoder.float().to(device), tokenizer)

    @cached_property
    def digest(self) -> str:
        """See `model_digest`."""
        return model_digest(self.encoder, self.encoder.config, self.tokenizer)

    def tokens(self, captions: Sequence[str]) -> list[Tokens]:
        return [tokenize_text(clean(caption), self.tokenizer) for caption in captions]

    @torch.no_grad()
    def rows(self, tokens: list[Tokens], length: int) -> Tensor:
        """What a UNet is given of the texts, [texts, length, width]."""
        context_length = self.encoder.config.max_position_embeddings
        [plan], _ = plan_tokens([tokens], [(self.tokenizer, context_length)], positions=length)
        return encode(plan, self.encoder)[0]

    def states(self, tokens: list[Tokens]) -> list[Tensor]:
        """The states of each text: SOT, its tokens, EOT and `PADS` pads, [positions, width]."""
        rows = self.rows(tokens, max(len(text.ids) for text in tokens) + 2 + PADS)
        return [row[: len(text.ids) + 2 + PADS] for row, text in zip(rows, tokens, strict=True)]


class Moments:
    """Weighted sums of an encoder's states s and the base's t, enough to fit maps and to score them.

    Attributes:
        captions: how many were added.
        n: the sum of weights.
        s, t: of the states, [width].
        ss, st: of their products, [width, width].
        tt: of the base's squared lengths.
    """

    def __init__(self, width: int):
        zeros = partial(torch.zeros, dtype=torch.float64)
        self.captions = 0
        self.n, self.s, self.t = zeros(()), zeros(width), zeros(width)
        self.ss, self.st, self.tt = zeros(width, width), zeros(width, width), zeros(())

    def add(self, student: Tensor, teacher: Tensor, variance: float) -> None:
        """The states of one caption, [tokens, width] each; every caption counts alike, in shares of its variance."""
        student, teacher, weight = student.cpu().double(), teacher.cpu().double(), 1 / (variance * len(student))
        self.captions += 1
        self.n += weight * len(student)
        self.s += weight * student.sum(0)
        self.t += weight * teacher.sum(0)
        self.ss += weight * student.T @ student
        self.st += weight * student.T @ teacher
        self.tt += weight * teacher.square().sum()

    def shift(self) -> tuple[Tensor, Tensor]:
        """(map [width, width], bias [width]): the shift alone that brings the states nearest to the base's."""
        return torch.eye(len(self.s), dtype=torch.float64), (self.t - self.s) / self.n

    def linear(self) -> tuple[Tensor, Tensor]:
        """The linear map and shift that do so, by ridge regression."""
        mean_s, mean_t = self.s / self.n, self.t / self.n
        covariance = self.ss / self.n - mean_s.outer(mean_s)
        ridge = _RIDGE * covariance.diagonal().mean() * torch.eye(len(mean_s), dtype=torch.float64)
        fitted = torch.linalg.solve(covariance + ridge, self.st / self.n - mean_s.outer(mean_t))
        return fitted, mean_t - mean_s @ fitted

    def error(self, fitted: Tensor, bias: Tensor) -> float:
        """The error of s @ fitted + bias: the mean of its captions."""
        mapped = (fitted.T @ self.ss @ fitted).trace() + 2 * (self.s @ fitted) @ bias + self.n * bias @ bias
        total = mapped - 2 * ((fitted * self.st).sum() + bias @ self.t) + self.tt
        return max(0.0, (total / len(bias) / self.captions).item())  # rounding may leave less than nothing


def measure_drift(
    reader: StatesReader, base: StatesReader, captions: Sequence[str], groups: Groups, batch_size: int, title: str
) -> dict[str, object]:
    """The state errors of one encoder in `captions`. Shows a progress bar.

    The error of a position is the squared difference of the two states, mean over channels, divided by the mean
    variance of the base's channels over the caption's tokens and EOT: 0 is the base, and 1 as far from it as the mean
    of all its tokens' states is.

    Returns:
        "errors": by part of `PARTS`, the mean of each caption, [captions]; "by_position": the mean at each position of
        text from 1, and "captions_at_position"; "after_shift" and "after_linear": the error of text once one shift, or
        one linear map, common to all tokens is undone, each fitted on one half of the groups and scored on the other
        (None for a single group).

    Raises:
        UserError: the encoder reads other tokens than the base.
    """
    errors: dict[str, list[float]] = {part: [] for part in PARTS}
    sums, counts = Counter(), Counter()  # by position of text, from 1
    numbers = range(len(captions)) if groups is None else group_numbers(groups)
    halves = [Moments(base.encoder.config.hidden_size) for _ in range(2)]
    for start in tqdm(range(0, len(captions), batch_size), desc=title):
        batch = captions[start : start + batch_size]
        texts = base.tokens(batch)
        if [text.ids for text in reader.tokens(batch)] != [text.ids for text in texts]:
            raise UserError(
                f"The encoder {reader.name!r} and the base {base.name!r} cut captions into different tokens, so their "
                "states cannot be compared one by one. Give the base that the encoder was trained from."
            )
        states = zip(texts, reader.states(texts), base.states(texts), strict=True)
        for number, (text, student, teacher) in enumerate(states, start):
            end = len(text.ids) + 1  # the position of EOT
            variance = teacher[1 : end + 1].var(dim=0, correction=0).mean().item()
            at = (student - teacher).square().mean(dim=1).cpu().double() / variance
            places = {"text": at[1:end], "sot": at[:1], "eot": at[end : end + 1], "pads": at[end + 1 :]}
            for part, values in places.items():
                errors[part].append(values.mean().item())
            for position, value in enumerate(places["text"].tolist(), 1):
                sums[position] += value
                counts[position] += 1
            halves[numbers[number] % 2].add(student[1:end], teacher[1:end], variance)
    return {
        "errors": errors,
        "by_position": [sums[position] / count for position, count in counts.items()],
        "captions_at_position": list(counts.values()),
        "after_shift": _fitted(halves, Moments.shift),
        "after_linear": _fitted(halves, Moments.linear),
    }


def _fitted(halves: Sequence[Moments], fit: Callable[[Moments], tuple[Tensor, Tensor]]) -> float | None:
    """The error of both halves, each mapped by what was fitted on the other; None if a half has no captions."""
    if not all(half.captions for half in halves):
        return None
    total = sum(half.captions * half.error(*fit(other)) for half, other in (halves, halves[::-1]))
    return total / sum(half.captions for half in halves)


def evaluate_drift(config: DriftConfig) -> dict:
    """The state errors of several encoders against the base's own.

    Writes `drift.json` and `drift.png` into `config.output`, and prints tables.

    Returns:
        The content of the JSON: settings, versions, digests, number of captions; by encoder "state_error" of each part
        of `PARTS` ("value", "low", "high", 95%), "after_shift", "after_linear", "by_position" and
        "captions_at_position" (see `measure_drift`); comparisons of the errors of text; bad records, seconds.

    Raises:
        UserError: the data or an encoder cannot be used, or an encoder's states cannot be compared with the base's.
    """
    pairs = read_source(config, config.labelled, config.held_out, only_captions=True)
    session = Session("drift", config, pairs)
    base = StatesReader.load(EncoderSpec.parse(config.base), session.device)
    with_text = [number for number, text in enumerate(base.tokens(pairs.captions)) if text.ids]
    if not with_text:
        raise UserError("No caption holds any text. Give other data.")
    captions, groups = ([part[number] for number in with_text] for part in (pairs.captions, pairs.groups))

    def evaluate(label: str, reader: StatesReader) -> dict:
        width, base_width = (part.encoder.config.hidden_size for part in (reader, base))
        if width != base_width:
            raise UserError(
                f"The states of {reader.name!r} have {width} channels and those of the base {base.name!r} "
                f"{base_width}. Give the base that the encoder was trained from."
            )
        depends = {"encoder": reader.digest, "base": base.digest, "captions": json_digest({"all": [captions, groups]})}
        compute = partial(measure_drift, reader, base, captions, groups, config.batch_size, label)
        return session.cache.result("drift", depends, compute)

    results = session.by_encoder(evaluate, StatesReader.load)
    session.digests["base"] = base.digest
    encoders = {}
    for label, result in results.items():
        errors = {
            part: {"value": float(np.mean(values))}
            | dict(zip(("low", "high"), mean_interval(values, groups), strict=True))
            for part, values in result["errors"].items()
        }
        encoders[label] = {"state_error": errors} | {key: value for key, value in result.items() if key != "errors"}
    notes = ["0 is the base's own state, and 1 as far from it as the mean of all its tokens' states is."]
    if without := len(pairs.captions) - len(captions):
        notes.append(f"{without} captions hold no text, and were left out.")
    compared = compare_encoders(
        {label: {"state error of text": result["errors"]["text"]} for label, result in results.items()},
        lambda a, b, score: paired_difference(a, b, groups),
    )
    return session.report(tables, figures, encoders, compared, notes, captions=len(captions))


def tables(report: dict) -> list[Table]:
    """A report's errors by part, what is left of them once a shift or a linear map is undone, and comparisons."""
    rows = []
    for label, numbers in report["encoders"].items():
        errors = numbers["state_error"]
        cells = [cell(*errors["text"].values(), form=".2f"), numbers["after_shift"], numbers["after_linear"]]
        rows.append([label, *cells, *(errors[part]["value"] for part in PARTS if part != "text")])
    header = ["state error, share of the variance", "text (95% interval)", "less one shift", "less a linear map"]
    header += [title for part, title in PARTS.items() if part != "text"]
    return [Table(header, rows), *compared_tables(report["compared"])]


def figures(report: dict) -> dict[str, Figure]:
    """The error at each position of text, by file name."""
    figure = Figure(figsize=(8, 4.5), layout="constrained", dpi=150)
    axes = figure.subplots()
    for index, (label, numbers) in enumerate(report["encoders"].items()):
        draw_by_position(axes, numbers["by_position"], numbers["captions_at_position"], label, f"C{index}")
    axes.set(xlabel="position of the token (SOT is 0)", ylabel="state error, share of the variance")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    axes.set_title(f"Mean over {report['captions']} captions; dotted where few reach", fontsize="medium")
    return {"drift.png": figure}
