"""The story of the toy world, at the top of the report: what each encoder read and drew, for readers new to CLIP."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from debias_diffusion.toyworld.scenes import ARRANGEMENTS

from .pictures import generation
from .pictures.toy_objects import BY_SENTENCE, LATE
from .story_examples import EXAMPLES, examples

SCENES, SHORT_PROMPTS = "toy/", "toy/short-"  # data of long captions and of short prompts
SHORT_FOLDER = "short-prompts"  # of images of short prompts, in the folder of the other results
IN_CHUNKS, IN_OVERLAPPING_CHUNKS, FOR_SDXL = "clip in chunks", "clip in overlapping chunks", "debias-clip-sdxl"
NAMES = {
    "clip": "Original CLIP",
    IN_CHUNKS: "Original CLIP in chunks",
    IN_OVERLAPPING_CHUNKS: "Original CLIP in overlapping chunks",
    "long-clip": "Long-CLIP",
    "debias-clip": "DeBias-CLIP",
    FOR_SDXL: "DeBias-CLIP for SDXL",
}
EDITS = {"keep": "Whole caption", "move2": "1 and 2 swapped", "move4": "1 and 4 swapped", "remove": "1 removed"}
DIRECTIONS = {"t2i_r1": "text_to_image", "i2t_r1": "image_to_text"}
# By name in `numbers`: the score of a report. Those of objects and places, in shares of 1.
OBJECT_SCORES = {
    "objects_correct": "objects_right",
    "precision": "objects_precision",
    "f1": "objects_f1",
    "objects_correct_with_size": "objects_right_with_size",
    "empty_filled": "empty_filled",
    "background": "background_right",
}
FEW = 20  # objects; a share of fewer says little
_ROUNDING = 1e-9  # so that a difference of exactly what is allowed is allowed


def tell(results: Sequence[tuple[Path, dict]]) -> dict | None:
    """What the template `story.html.j2` shows; None without images generated from captions of the toy world.

    Args:
        results: folders of results and the reports in them, the newest last. The story is of one folder, as `evaluate
            all` leaves it, so that no two models of one name meet in it.
    """
    reports = {(folder, report["evaluation"]): report for folder, report in results}
    toy = [folder for (folder, name), report in reports.items() if name == "generation" and _is_of_captions(report)]
    if not toy:
        return None
    folder = toy[-1]
    generated, robustness = reports[folder, "generation"], reports.get((folder, "robustness"))
    if robustness and robustness["settings"]["data"] != generated["settings"]["data"]:
        robustness = None
    measured = numbers(generated, robustness, reports.get((folder / SHORT_FOLDER, "generation")))
    names = {key: NAMES.get(key, key) for key in measured["generation"]}
    folders = {
        names[key]: folder / "pictures" / generation.folder_names(list(generated["encoders"]))[label]
        for label, key in keys_of(list(generated["encoders"])).items()
    }
    return {
        "prompts": generated["images"],
        "names": names,
        "has_chunks": IN_CHUNKS in names,
        "has_overlapping_chunks": IN_OVERLAPPING_CHUNKS in names,
        "has_states_kept": FOR_SDXL in names,
        "arrangements": ARRANGEMENTS,
        "most_examples": EXAMPLES,
        "examples": examples(generated["settings"]["data"].removeprefix(SCENES), generated["images"], folders),
        "edits": list(EDITS.values()),
        "retrieval": {way.replace("_", " "): _retrieval_rows(measured, way_r1) for way_r1, way in DIRECTIONS.items()},
        "sentences": _sentence_rows(measured["generation"]),
        "objects": _score_table(measured, _OBJECT_COLUMNS),
        "images": _score_table(measured, _IMAGE_COLUMNS),
        "differences": {
            title: [_difference(pair, line, highest, names) for pair, line in measured["differences"][score].items()]
            for title, score, highest in _COMPARED
            if measured["differences"][score]
        },
        "claims": claims(measured),
        "few": FEW,
    }


# ---- numbers


def _is_of_captions(report: dict) -> bool:
    """Whether images were generated from long captions of the toy world."""
    scored = all("objects_right" in entry["scores"] for entry in report["encoders"].values())
    return scored and not report["settings"]["data"].startswith(SHORT_PROMPTS)


def keys_of(labels: Sequence[str]) -> dict[str, str]:
    """By label, an encoder's name in the story: "clip" for "toy/clip", unless two would share it."""
    keys = {label: label.rpartition("/")[2] for label in labels}
    return {
        label: key if key in NAMES and list(keys.values()).count(key) == 1 else label for label, key in keys.items()
    }


def numbers(generated: dict, robustness: dict | None = None, short: dict | None = None) -> dict:
    """The numbers of the story, by encoder E, out of the reports of three evaluations in the toy world.

    Args:
        generated: images generated from long captions.
        robustness: R@1 with edited captions.
        short: images generated from short prompts.

    Returns:
        "retrieval": {E: {edit: {"t2i_r1", "i2t_r1"}}}, in percent;
        "generation": {E: {"fid", "dino", `OBJECT_SCORES`, "objects_correct_by_sentence", "objects_by_sentence", "n"}},
        in shares of 1 (None of no objects), counts of objects by the number of the sentence that first mentions them,
        and n prompts; a score that was not asked for is None;
        "differences": {one of `OBJECT_SCORES`: {"E1 - E2": {"difference", "low", "high"}}}, in shares, with the 95%
        interval; "bootstrap": the one of "objects_correct";
        "short_prompts": {E: share of objects drawn right}.
    """
    keys = keys_of(list(generated["encoders"]))
    differences = {name: _differences(generated["compared"], score, keys) for name, score in OBJECT_SCORES.items()}
    return {
        "retrieval": {
            keys[label]: {
                edit: {name: entry["recall_at_1_percent"][edit][way] for name, way in DIRECTIONS.items()}
                for edit in EDITS
            }
            for label, entry in (robustness["encoders"] if robustness else {}).items()
            if label in keys
        },
        "generation": {
            keys[label]: _generation_numbers(entry["scores"]) | {"n": generated["images"]}
            for label, entry in generated["encoders"].items()
        },
        "differences": differences,
        "bootstrap": differences["objects_correct"],
        "short_prompts": {
            keys[label]: entry["scores"]["objects_right"]["value"] / 100
            for label, entry in (short["encoders"] if short else {}).items()
            if label in keys
        },
    }


def _differences(compared: Sequence[dict], score: str, keys: Mapping[str, str]) -> dict[str, dict[str, float]]:
    return {
        f"{keys[line['a']]} - {keys[line['b']]}": {end: line[end] / 100 for end in ("difference", "low", "high")}
        for line in compared
        if line["score"] == score
    }


def _generation_numbers(scores: dict) -> dict:
    by_sentence = {line["sentence"]: line for line in scores[BY_SENTENCE]}
    lines = [by_sentence.get(sentence) for sentence in range(1, max(by_sentence) + 1)]
    return {
        "fid": scores.get("fid_own", {}).get("value"),
        "dino": scores.get("dino_score", {}).get("value"),
        # Earlier releases had the first of them alone.
        **{name: scores[score]["value"] / 100 if score in scores else None for name, score in OBJECT_SCORES.items()},
        "objects_correct_by_sentence": [line and line["value"] / 100 for line in lines],
        "objects_by_sentence": [line["objects"] if line else 0 for line in lines],
    }


# ---- claims


def claims(measured: dict) -> list[dict]:
    """What the method promises, and whether `numbers` show it; nothing unless the three encoders were evaluated.

    Returns:
        {"expectation": the promise, "found": the numbers, "met": True, False, or None where they do not decide}
    """
    retrieval, drawn = measured["retrieval"], measured["generation"]
    of_both_recipes = measured["bootstrap"].get("debias-clip - long-clip")
    encoders = NAMES.keys() - {IN_CHUNKS, IN_OVERLAPPING_CHUNKS, FOR_SDXL}
    in_chunks = IN_OVERLAPPING_CHUNKS if IN_OVERLAPPING_CHUNKS in drawn else IN_CHUNKS
    if of_both_recipes is None or not (encoders <= retrieval.keys() and encoders <= drawn.keys()):
        return []
    return [
        _whole_captions(retrieval, "t2i_r1", "text to image"),
        _whole_captions(retrieval, "i2t_r1", "image to text"),
        _loses_less(retrieval, "move4", "sentences 1 and 4 are swapped", 0.6),
        _loses_less(retrieval, "remove", "sentence 1 is removed", 0.85),
        _draws_more(drawn),
        _draws_late_objects(drawn),
        _draws_surely_more("Long-CLIP", of_both_recipes),
        _draws_surely_more(_in_text(in_chunks), measured["bootstrap"].get(f"debias-clip - {in_chunks}")),
        _fills_no_more(measured["differences"]["empty_filled"].get("debias-clip - clip")),
        *(_claims_for_sdxl(measured, in_chunks) if FOR_SDXL in drawn else ()),
    ]


def _in_text(encoder: str) -> str:
    """The name of the original CLIP, read so, within a sentence."""
    return f"the o{NAMES[encoder][1:]}"


def _claims_for_sdxl(measured: dict, in_chunks: str) -> list[dict]:
    """Of the encoder whose words keep their states."""
    objects, filled, name = measured["bootstrap"], measured["differences"]["empty_filled"], NAMES[FOR_SDXL]
    return [
        _draws_surely_more("Long-CLIP", objects.get(f"{FOR_SDXL} - long-clip"), name),
        _interval_claim(
            f"With {name}, no fewer objects are drawn right than with {_in_text(in_chunks)}.",
            objects.get(f"{FOR_SDXL} - {in_chunks}"),
            lambda difference, low, high: None if difference < 0 <= high else difference >= 0,
        ),
        _fills_no_more(filled.get(f"{FOR_SDXL} - {in_chunks}"), name, _in_text(in_chunks)),
    ]


def _claim(expectation: str, result: str, met: bool | None) -> dict:
    return {"expectation": expectation, "found": result, "met": met}


def _whole_captions(retrieval: dict, direction: str, name: str) -> dict:
    debias, long = (retrieval[encoder]["keep"][direction] for encoder in ("debias-clip", "long-clip"))
    return _claim(
        f"With whole captions, R@1 of DeBias-CLIP ({name}) is at most 1 point below Long-CLIP's.",
        f"{debias:.1f}% against {long:.1f}%",
        debias >= long - 1 - _ROUNDING,
    )


def _loses_less(retrieval: dict, edit: str, condition: str, most: float) -> dict:
    expectation = f"When {condition}, DeBias-CLIP loses at most {most} of the points Long-CLIP loses (text to image)."
    before, after = (
        {encoder: retrieval[encoder][name]["t2i_r1"] for encoder in ("debias-clip", "long-clip")}
        for name in ("keep", edit)
    )
    debias, long = (before[encoder] - after[encoder] for encoder in before)
    if long <= 0:
        kept = f"Long-CLIP loses no points, from {before['long-clip']:.1f}% to {after['long-clip']:.1f}%"
        return _claim(expectation, kept, None)
    return _claim(
        expectation, f"{debias:.1f} points against {long:.1f}: {debias / long:.2f}", debias <= most * long + _ROUNDING
    )


def _draws_more(drawn: dict) -> dict:
    debias, original = (drawn[encoder]["objects_correct"] for encoder in ("debias-clip", "clip"))
    return _claim(
        "With DeBias-CLIP, more objects are drawn right than with the original CLIP.",
        f"{100 * debias:.1f}% against {100 * original:.1f}%",
        debias > original,
    )


def _draws_late_objects(drawn: dict) -> dict:
    expectation = (
        f"The gain over the original CLIP is larger for objects first mentioned in sentence {LATE + 1} or later."
    )
    shares = {
        encoder: [_share(drawn[encoder], numbers) for numbers in (slice(LATE), slice(LATE, None))]
        for encoder in ("debias-clip", "clip")
    }
    early, late = (None if None in pair else 100 * (pair[0] - pair[1]) for pair in zip(*shares.values(), strict=True))
    if early is None or late is None:
        return _claim(expectation, "no objects on one side", None)
    return _claim(expectation, f"{late:+.1f} points, and {early:+.1f} for objects mentioned earlier", late > early)


def _share(drawn: dict, sentences: slice) -> float | None:
    """The share of objects drawn right, of those that these sentences first mention."""
    counts, shares = (drawn[name][sentences] for name in ("objects_by_sentence", "objects_correct_by_sentence"))
    right = sum(count * share for count, share in zip(counts, shares, strict=True) if count)
    return right / sum(counts) if sum(counts) else None


def _draws_surely_more(other: str, line: dict[str, float] | None, encoder: str = NAMES["debias-clip"]) -> dict:
    return _interval_claim(
        f"With {encoder}, more objects are drawn right than with {other}.",
        line,
        lambda difference, low, high: None if low <= 0 <= high else difference > 0,
    )


def _fills_no_more(
    line: dict[str, float] | None, encoder: str = NAMES["debias-clip"], other: str = "the original CLIP"
) -> dict:
    return _interval_claim(
        f"With {encoder}, no more of the places that should be empty are filled than with {other}.",
        line,
        lambda difference, low, high: None if low <= 0 < difference else difference <= 0,
    )


def _interval_claim(
    expectation: str, line: dict[str, float] | None, is_met: Callable[[float, float, float], bool | None]
) -> dict:
    """A claim about a paired difference and its interval, in points; None where they do not decide."""
    if line is None:
        return _claim(expectation, "not measured", None)
    difference, low, high = (100 * line[name] for name in ("difference", "low", "high"))
    met = is_met(difference, low, high)
    chance = ": could be chance" if met is None else ""
    return _claim(expectation, f"{difference:+.1f} points, 95% interval {low:+.1f} to {high:+.1f}{chance}", met)


# ---- rows of the page

# Title, part of `numbers`, score, digits, factor, and whether the highest is the best.
_OBJECT_COLUMNS = (
    ("Objects right (%)", "generation", "objects_correct", 1, 100, True),
    ("Precision (%)", "generation", "precision", 1, 100, True),
    ("F1 (%)", "generation", "f1", 1, 100, True),
    ("Empty places filled (%)", "generation", "empty_filled", 1, 100, False),
)
# Title, score, and whether the highest is the best, of the differences shown.
_COMPARED = (
    ("Objects right", "objects_correct", True),
    ("F1", "f1", True),
    ("Empty places filled: lower is better", "empty_filled", False),
)
_IMAGE_COLUMNS = (
    ("Short prompts: objects right (%)", "short_prompts", None, 1, 100, True),
    ("Background right (%)", "generation", "background", 1, 100, True),
    ("FID", "generation", "fid", 2, 1, False),
    ("DINO score", "generation", "dino", 3, 1, True),
)


def _score_table(measured: dict, columns: Sequence[tuple]) -> dict:
    """ "columns", their titles, and "rows", the cells of each encoder."""
    rows = _rows([_score_column(measured, *column) for column in columns], measured["generation"])
    return {"columns": [title for title, *_ in columns], "rows": rows}


def _score_column(measured: dict, title, part, score, digits, factor, highest) -> tuple[dict, int, bool]:
    values = {key: measured[part].get(key) for key in measured["generation"]}
    values = {key: value[score] if score and value else value for key, value in values.items()}
    return {key: None if value is None else factor * value for key, value in values.items()}, digits, highest


def _retrieval_rows(measured: dict, direction: str) -> dict[str, list[dict]]:
    retrieval = measured["retrieval"]
    columns = [({key: entry[edit][direction] for key, entry in retrieval.items()}, 1, True) for edit in EDITS]
    return _rows(columns, retrieval)


def _rows(columns: Sequence[tuple[Mapping, int, bool]], keys: Sequence[str]) -> dict[str, list[dict]]:
    """By encoder, its cells: "text", "percent" (of a bar) and "best" of its column, as shown.

    Args:
        columns: of each, the values by encoder, the digits to show, and whether the highest is the best.
    """
    rows = {key: [] for key in keys}
    for values, digits, highest in columns:
        shown = {key: round(value, digits) for key, value in values.items() if value is not None}
        # One number alone, or numbers that look alike, are not the best of anything.
        best = (max if highest else min)(shown.values()) if len(set(shown.values())) > 1 else None
        for key in keys:
            text = f"{shown[key]:.{digits}f}" if key in shown else "–"
            rows[key].append(
                {"text": text, "percent": shown.get(key, 0), "best": best is not None and shown.get(key) == best}
            )
    return rows


def _sentence_rows(drawn: dict) -> list[dict]:
    """Objects drawn right by the sentence that first mentions them; the last sentences together hold `FEW` objects."""
    counts = next(iter(drawn.values()))["objects_by_sentence"]
    last = len(counts)
    while last > 1 and sum(counts[last - 1 :]) < FEW and any(counts[: last - 1]):
        last -= 1
    spans = [(number, number) for number in range(1, last)] + [(last, len(counts))]
    rows = []
    for first, end in spans:
        shares = {key: _share(entry, slice(first - 1, end)) for key, entry in drawn.items()}
        percents = {key: None if share is None else 100 * share for key, share in shares.items()}
        cells = _rows([(percents, 1, True)], drawn)
        rows.append(
            {
                "label": f"{first}" if first == end else f"{first} to {end}",
                "objects": sum(counts[first - 1 : end]),
                "cells": [cell for (cell,) in cells.values()],
            }
        )
    return [row for row in rows if row["objects"]]


def _difference(pair: str, line: dict[str, float], highest: bool, names: Mapping[str, str]) -> dict[str, str]:
    a, b = pair.split(" - ")
    best, worst = (names[a], names[b]) if highest else (names[b], names[a])
    ahead = best if line["low"] > 0 else worst if line["high"] < 0 else None
    return {
        "pair": f"{names[a]} minus {names[b]}",
        **{name: f"{100 * value:+.1f}" for name, value in line.items()},
        "verdict": f"{ahead} is better" if ahead else "could be chance",
    }
