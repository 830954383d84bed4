"""The story of the toy world, at the top of the report: what each encoder read and drew, for readers new to CLIP."""

import io
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from PIL import Image

from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import ARRANGEMENTS, scene

from .common.pages import png_url
from .pictures import generation
from .pictures.toy_objects import LATE, compare_images

SCENES, SHORT_PROMPTS = "toy/", "toy/short-"  # data of long captions and of short prompts
SHORT_FOLDER = "short-prompts"  # of images of short prompts, in the folder of the other results
NAMES = {"clip": "Original CLIP", "long-clip": "Long-CLIP", "debias-clip": "DeBias-CLIP"}
EDITS = {"keep": "Whole caption", "move2": "1 and 2 swapped", "move4": "1 and 4 swapped", "remove": "1 removed"}
DIRECTIONS = {"t2i_r1": "text_to_image", "i2t_r1": "image_to_text"}
EXAMPLES = 8  # the first of each family of scenes, not the best ones
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
    return {
        "prompts": generated["images"],
        "names": names,
        "image_columns": [title for title, *_ in _IMAGE_COLUMNS],
        "examples": _examples(folder, generated, names),
        "edits": list(EDITS.values()),
        "retrieval": {way.replace("_", " "): _retrieval_rows(measured, way_r1) for way_r1, way in DIRECTIONS.items()},
        "sentences": _sentence_rows(measured["generation"]),
        "images": _rows([_image_column(measured, *column) for column in _IMAGE_COLUMNS], measured["generation"]),
        "differences": [_difference(pair, line, names) for pair, line in measured["bootstrap"].items()],
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
        "generation": {E: {"fid", "dino", "objects_correct", "objects_correct_by_sentence", "objects_by_sentence",
        "n"}}, in shares of 1 (None of no objects), counts of objects by the number of the sentence that first mentions
        them, and n prompts; a score that was not asked for is None;
        "bootstrap": {"E1 - E2": {"difference", "low", "high"}}, in shares of the objects, with the 95% interval;
        "short_prompts": {E: share of objects drawn right}.
    """
    keys = keys_of(list(generated["encoders"]))
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
        "bootstrap": {
            f"{keys[line['a']]} - {keys[line['b']]}": {end: line[end] / 100 for end in ("difference", "low", "high")}
            for line in generated["compared"]
            if line["score"] == "objects_right"
        },
        "short_prompts": {
            keys[label]: entry["scores"]["objects_right"]["value"] / 100
            for label, entry in (short["encoders"] if short else {}).items()
            if label in keys
        },
    }


def _generation_numbers(scores: dict) -> dict:
    by_sentence = {line["sentence"]: line for line in scores["objects_right_by_sentence"]}
    lines = [by_sentence.get(sentence) for sentence in range(1, max(by_sentence) + 1)]
    return {
        "fid": scores.get("fid_own", {}).get("value"),
        "dino": scores.get("dino_score", {}).get("value"),
        "objects_correct": scores["objects_right"]["value"] / 100,
        "objects_correct_by_sentence": [line and line["value"] / 100 for line in lines],
        "objects_by_sentence": [line["objects"] if line else 0 for line in lines],
    }


# ---- claims


def claims(measured: dict) -> list[dict]:
    """What the method promises, and whether `numbers` show it; nothing unless all of `NAMES` were evaluated.

    Returns:
        {"expectation": the promise, "found": the numbers, "met": True, False, or None where they do not decide}
    """
    retrieval, drawn = measured["retrieval"], measured["generation"]
    of_both_recipes = measured["bootstrap"].get("debias-clip - long-clip")
    if of_both_recipes is None or not (NAMES.keys() <= retrieval.keys() and NAMES.keys() <= drawn.keys()):
        return []
    return [
        _whole_captions(retrieval, "t2i_r1", "text to image"),
        _whole_captions(retrieval, "i2t_r1", "image to text"),
        _loses_less(retrieval, "move4", "sentences 1 and 4 are swapped", 0.6),
        _loses_less(retrieval, "remove", "sentence 1 is removed", 0.85),
        _draws_more(drawn),
        _draws_late_objects(drawn),
        _beats_long_clip(of_both_recipes),
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


def _beats_long_clip(line: dict[str, float]) -> dict:
    difference, low, high = (100 * line[name] for name in ("difference", "low", "high"))
    undecided = low <= 0 <= high
    return _claim(
        "With DeBias-CLIP, more objects are drawn right than with Long-CLIP.",
        f"{difference:+.1f} points, 95% interval {low:+.1f} to {high:+.1f}"
        + (": no difference shown" if undecided else ""),
        None if undecided else difference > 0,
    )


# ---- rows of the page

# Title, part of `numbers`, score, digits, factor, and whether the highest is the best.
_IMAGE_COLUMNS = (
    ("Objects right (%)", "generation", "objects_correct", 1, 100, True),
    ("Short prompts: objects right (%)", "short_prompts", None, 1, 100, True),
    ("FID", "generation", "fid", 2, 1, False),
    ("DINO score", "generation", "dino", 3, 1, True),
)


def _image_column(measured: dict, title, part, score, digits, factor, highest) -> tuple[dict, int, bool]:
    values = {key: measured[part].get(key) for key in measured["generation"]}
    values = {key: value[score] if score and value else value for key, value in values.items()}
    return {key: value and factor * value for key, value in values.items()}, digits, highest


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


def _difference(pair: str, line: dict[str, float], names: Mapping[str, str]) -> dict[str, str]:
    a, b = pair.split(" - ")
    ahead = names[a] if line["low"] > 0 else names[b] if line["high"] < 0 else None
    return {
        "pair": f"{names[a]} minus {names[b]}",
        **{name: f"{100 * value:+.1f}" for name, value in line.items()},
        "verdict": f"{ahead} draws more" if ahead else "could be chance",
    }


# ---- examples


def _examples(folder: Path, generated: dict, names: Mapping[str, str]) -> list[dict]:
    """The first prompts with their reference image and the generated ones; none where images are missing."""
    split, labels = generated["settings"]["data"].removeprefix(SCENES), list(generated["encoders"])
    keys = keys_of(labels)
    folders = {label: folder / "pictures" / name for label, name in generation.folder_names(labels).items()}
    shown = range(0, generated["images"], ARRANGEMENTS)[:EXAMPLES]
    if not all((at / f"{index:06}.png").is_file() for at, index in product(folders.values(), shown)):
        return []
    return [
        _example(split, index, {names[keys[label]]: at / f"{index:06}.png" for label, at in folders.items()})
        for index in shown
    ]


def _example(split: str, index: int, files: Mapping[str, Path]) -> dict:
    shown, prompt = scene(split, index), caption(split, index)
    mentioned = prompt.first_mentions()
    texts = {thing.place: f"{thing.size} {thing.colour} {thing.kind}, {thing.place}" for thing in shown.things}
    drawn = []
    comparisons = compare_images(files.values(), [shown] * len(files))
    for (name, file), right in zip(files.items(), [seen.correct for seen in comparisons], strict=True):
        score = f"{sum(right.values())} of {len(right)} objects right"
        objects = [
            {"text": texts[place], "sentence": mentioned[place] + 1, "right": is_right}
            for place, is_right in right.items()
        ]
        with Image.open(file, formats=("PNG",)) as image:
            drawn.append(_image(image, name, f"{name}: {score}") | {"score": score, "objects": objects})
    return {
        "sentences": [sentence.text for sentence in prompt.sentences],
        "reference": _image(render(shown), "Reference image", f"Reference image: {'; '.join(texts.values())}"),
        "drawn": drawn,
    }


def _image(image: Image.Image, name: str, alt: str) -> dict:
    file = io.BytesIO()
    image.convert("RGB").save(file, format="PNG")
    return {"name": name, "alt": alt, "source": png_url(file.getvalue()), "width": image.width, "height": image.height}
