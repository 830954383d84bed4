"""Scores of one model in one evaluation, by query where queries can be paired."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import ArgumentError

from debias_diffusion.ablation.saved import FILE as ABLATION_FILE
from debias_diffusion.app.command_line import make_options, make_parser
from debias_diffusion.errors import UserError, reason
from debias_diffusion.eval.attention import AttentionConfig, evaluate_attention
from debias_diffusion.eval.caption_edits import LOSING
from debias_diffusion.eval.image_features import PairSession
from debias_diffusion.eval.images.generation import GenerationConfig, evaluate_generation
from debias_diffusion.eval.report import FEW
from debias_diffusion.eval.retrieval import DIRECTIONS, KS, RetrievalConfig, hits, retrieve
from debias_diffusion.eval.robustness import RobustnessConfig, rank_edits
from debias_diffusion.files import read_json_object
from debias_diffusion.jobs import Job

from ..ablate.command import SEARCH
from ..evaluations.classification import evaluate_classification
from ..evaluations.cola import evaluate_cola
from ..evaluations.options import ClassificationConfig, ColaConfig
from ..referring.scores import evaluate_referring

THIRDS = ("first", "middle", "last")
SHORT = dict(zip(("t2i", "i2t"), DIRECTIONS, strict=True))

# {score: the fields of `papers.Queries`, or one number}
Scores = dict[str, dict[str, list] | float]


def checked(options: type, values: dict[str, Any]) -> Any:
    """An instance of a dataclass of options, its values checked as those of a command line and a file are.

    Raises:
        UserError: a value cannot be used, is unknown or is missing.
    """
    try:
        values = make_parser("", options, "").parse_object(values).as_dict()
    except ArgumentError as error:
        raise UserError(f"Settings of {options.__name__} cannot be used: {reason(error)}") from error
    return make_options(options, values)


def retrieval_scores(settings: dict) -> Scores:
    """R@1 ("t2i", "i2t"), "R@5 t2i" and so on, "mean-R t2i" and "mean-R" of both, of every query, in percent."""
    session = PairSession("retrieval", checked(RetrievalConfig, settings))
    [result] = session.by_encoder(partial(retrieve, session)).values()
    scores, means, groups = {}, [], result["groups"]
    for short, direction in SHORT.items():
        by_k = {k: hits(result["ranks"][direction], k) for k in KS}
        means.append(np.mean([*by_k.values()], axis=0))
        named = {short if k == 1 else f"R@{k} {short}": values for k, values in by_k.items()}
        scores |= {name: _queries(values, groups[direction]) for name, values in named.items()}
        scores[f"mean-R {short}"] = _queries(means[-1].round(4), groups[direction])
    if len(means[0]) == len(means[1]):
        scores["mean-R"] = _queries(np.mean(means, axis=0), groups["image_to_text"])
    return scores


def _queries(values: np.ndarray, groups: Sequence[str]) -> dict[str, list]:
    return {"above": values.tolist(), "below": [1.0] * len(values), "groups": list(groups)}


def robustness_scores(settings: dict) -> Scores:
    """R@1 of every query in percent under the edits in `settings` ("t2i EDIT"), and its drops ("t2i drop EDIT")."""
    edits = settings["edits"]
    config = checked(RobustnessConfig, {name: part for name, part in settings.items() if name != "edits"})
    session = PairSession("robustness", config)
    [result] = session.by_encoder(partial(rank_edits, session, edits=edits)).values()
    losing = [edit for edit in edits if edit in LOSING and LOSING[edit].base in edits]
    scores = {}
    for short, direction in SHORT.items():
        groups = result.groups[direction]
        scores |= {f"{short} {edit}": _queries(result.of(edit, direction), groups) for edit in edits}
        scores |= {f"{short} drop {edit}": _queries(result.drop(edit, direction), groups) for edit in losing}
    return scores


def attention_scores(report: dict) -> Scores:
    """How EOT's attention changes over 100 positions, in standard deviations ("slope move4": with sentence 4 first).

    The slope is of the least-squares line through the means of the positions that a tenth of the captions reach,
    weighted by how many do; SOT is left out, as in Figure 1b.
    """
    [numbers] = report["encoders"].values()
    of_edits = {"slope": "keep", "slope move4": "move4"}
    return {score: attention_slope(numbers["attention"][edit]) for score, edit in of_edits.items()}


def attention_slope(numbers: dict) -> float:
    """The slope over 100 positions of `look_at_captions`' attention before the softmax, see `attention_scores`."""
    counts = np.asarray(numbers["captions_at_position"], dtype=float)
    many = counts >= FEW * counts[0]
    if many.sum() < 2:
        raise UserError("The captions are shorter than two tokens, so attention has no slope. Give longer ones.")
    heights = np.asarray(numbers["before_softmax"]["positions"], dtype=float)[: len(counts)]
    slope, _ = np.polyfit(np.arange(1, len(counts) + 1)[many], heights[many], 1, w=np.sqrt(counts[many]))
    return float(100 * slope)


def image_scores(report: dict) -> Scores:
    """Every score of a report of one encoder's images ("dino_score", "objects_right", ...), also of groups of objects.

    Those of a group are named by its list: "objects_right_by_sentence: 5". "fid" is of Inception's 64 features, whose
    scale the paper's has, or of `own_features` where there is no Inception; without either there is none.
    """
    [encoder] = report["encoders"].values()
    scores = {}
    for score, numbers in encoder["scores"].items():
        parts = {score: numbers}
        if isinstance(numbers, list):  # of groups, each named by its first value
            parts = {f"{score}: {next(iter(group.values()))}": group for group in numbers}
        scores |= {name: part["value"] for name, part in parts.items() if part.get("value") is not None}
    scores |= {score: _of_images(values, report["records"]["group"]) for score, values in encoder["by_image"].items()}
    fid = scores.get("fid_64", scores.get("fid_own"))
    return scores if fid is None else scores | {"fid": fid}


def cola_scores(report: dict) -> Scores:
    """Whether each of Cola's items is right, or the average precision of each class, in percent ("t2i")."""
    [encoder] = report["encoders"].values()
    scores = encoder["scores_percent"]
    values = [*scores.values()] if isinstance(scores, dict) else scores
    return {"t2i": _queries(np.array(values), [str(item) for item in range(len(values))])}


def classification_scores(report: dict) -> Scores:
    """Top-1 of all images in percent ("t2i")."""
    [encoder] = report["encoders"].values()
    return {"t2i": encoder["top1_percent"]}


def ablation_scores(settings: dict) -> Scores:
    """What a search left: its time ("minutes"), and of the heads that it ablates the share of all ("ratio"), the mean
    number in a layer ("a layer"), and that in each third of the layers ("a layer, first third", middle, last)."""
    [folder] = map(Path, settings["encoders"])
    content = read_json_object(folder / ABLATION_FILE) or {"beta": [[1.0]] * 3, "heads": []}  # none where none helps
    ablated = np.zeros(np.shape(content["beta"]))
    for name in content["heads"]:
        ablated[tuple(map(int, name.split("-")))] = 1
    counts = {f"a layer, {name} third": part for name, part in zip(THIRDS, np.array_split(ablated, 3), strict=True)}
    counts = {"a layer": ablated} | counts
    scores = {name: float(part.sum(axis=1).mean()) for name, part in counts.items()}
    return scores | {"ratio": float(ablated.mean()), "minutes": Job.read(folder).notes(SEARCH)["seconds"] / 60}


def _of_images(values: dict[str, list[int]] | list[float | None], groups: Sequence[str]) -> dict[str, list]:
    """The queries of a score of images: a ratio of counts, in percent, or a mean over the images that have a value."""
    if isinstance(values, dict):
        return {"above": [100.0 * count for count in values["above"]], "below": values["below"], "groups": list(groups)}
    kept = [(value, group) for value, group in zip(values, groups, strict=True) if value is not None]
    return _queries(np.array([value for value, _ in kept]), [group for _, group in kept])


def _of_report(
    options: type, evaluate: Callable[[Any], dict], scores: Callable[[dict], Scores], settings: dict
) -> Scores:
    """The scores that stand in the report of an evaluation of one encoder."""
    return scores(evaluate(checked(options, settings)))


# {kind: from an evaluation's settings, `encoders` and `output` among them, to scores}
KINDS: dict[str, Callable[[dict], Scores]] = {
    "retrieval": retrieval_scores,
    "robustness": robustness_scores,
    "attention": partial(_of_report, AttentionConfig, evaluate_attention, attention_scores),
    "generation": partial(_of_report, GenerationConfig, evaluate_generation, image_scores),
    "referring": partial(_of_report, GenerationConfig, evaluate_referring, image_scores),
    "cola": partial(_of_report, ColaConfig, evaluate_cola, cola_scores),
    "classification": partial(_of_report, ClassificationConfig, evaluate_classification, classification_scores),
    "ablation": ablation_scores,
}
