"""Scores of one model in one evaluation, by query where queries can be paired."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from debias_diffusion.errors import UserError
from debias_diffusion.eval.attention import AttentionConfig, evaluate_attention
from debias_diffusion.eval.images.generation import GenerationConfig, evaluate_generation
from debias_diffusion.eval.report import FEW
from debias_diffusion.eval.retrieval import DIRECTIONS, KS, RetrievalConfig, hits, retrieval_ranks
from debias_diffusion.eval.robustness import LOSING, RobustnessConfig, hits_by_edit

SHORT = dict(zip(("t2i", "i2t"), DIRECTIONS, strict=True))

# {score: a value for each query, or one number}
Scores = dict[str, list[float] | float]


def retrieval_scores(model: str, output: Path, settings: dict) -> Scores:
    """R@1 ("t2i", "i2t") and mean-R ("mean-R t2i", "mean-R i2t") of every query, in percent."""
    [result] = retrieval_ranks(RetrievalConfig([model], str(output), **settings)).values()
    scores = {}
    for short, way in SHORT.items():
        scores[short] = hits(result["ranks"][way], 1).tolist()
        scores[f"mean-R {short}"] = np.mean([hits(result["ranks"][way], k) for k in KS], axis=0).round(4).tolist()
    return scores


def robustness_scores(model: str, output: Path, settings: dict) -> Scores:
    """R@1 of every query in percent under the edits in `settings` ("t2i EDIT"), and its drops ("t2i drop EDIT")."""
    edits = settings["edits"]
    config = RobustnessConfig(
        [model], str(output), **{name: part for name, part in settings.items() if name != "edits"}
    )
    [result] = hits_by_edit(config, edits).values()
    scores = {}
    for short, way in SHORT.items():
        scores |= {f"{short} {edit}": result.of(edit, way).tolist() for edit in edits}
        losing = [edit for edit in edits if edit in LOSING and LOSING[edit].base in edits]
        scores |= {f"{short} drop {edit}": result.drop(edit, way).tolist() for edit in losing}
    return scores


def attention_scores(model: str, output: Path, settings: dict) -> Scores:
    """How EOT's attention changes over 100 positions ("slope" before the softmax, "slope move4" with sentence 4 first).

    The slope is of the least-squares line through the means of the positions that a tenth of the captions reach,
    weighted by how many do; SOT is left out, as in Figure 1b.
    """
    report = evaluate_attention(AttentionConfig([model], str(output), **settings))
    [numbers] = report["encoders"].values()
    of_edits = {"slope": "keep", "slope move4": "move4"}
    return {score: attention_slope(numbers["attention"][edit]) for score, edit in of_edits.items()}


def attention_slope(numbers: dict) -> float:
    """The slope over 100 positions of `look_at_captions`' attention before the softmax, see `attention_scores`."""
    counts = np.asarray(numbers["captions_at_position"], dtype=float)
    heights = np.asarray(numbers["before_softmax"]["positions"], dtype=float)[: len(counts)]
    many = counts >= FEW * counts[0]
    if many.sum() < 2:
        raise UserError(
            "The captions are shorter than two tokens, so attention has no slope over them. Give longer ones."
        )
    positions = np.arange(1, len(counts) + 1)[many]
    slope, _ = np.polyfit(positions, heights[many], 1, w=np.sqrt(counts[many]))
    return float(100 * slope)


def generation_scores(model: str, output: Path, settings: dict) -> Scores:
    """Every score of `evaluate generation` ("dino_score", "objects_right", ...).

    "fid" is of Inception's 64 features, whose scale the paper's has, or of `own_features` where there is no Inception;
    without either there is none.
    """
    report = evaluate_generation(GenerationConfig([model], output=str(output), **settings))
    [encoder] = report["encoders"].values()
    parts = encoder["scores"].items()
    scores = {score: part["value"] for score, part in parts if isinstance(part, dict) and part.get("value") is not None}
    fid = scores.get("fid_64", scores.get("fid_own"))
    return scores if fid is None else scores | {"fid": fid}


KINDS: dict[str, Callable[[str, Path, dict], Scores]] = {
    "retrieval": retrieval_scores,
    "robustness": robustness_scores,
    "attention": attention_scores,
    "generation": generation_scores,
}
