"""Results of the toy world, and the page that tells them."""

from dataclasses import replace
from pathlib import Path

from helpers.html_page import Page

from debias_diffusion.eval import merged_report
from debias_diffusion.eval.common.pages import write_page
from debias_diffusion.eval.pictures.generation import folder_names
from debias_diffusion.eval.story import SHORT_FOLDER
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import scene

LABELS = ("toy/clip", "long-clip", "debias-clip")


def generation_report(labels=LABELS, data="toy/test", objects=(0, 60, 30, 6, 2)) -> dict:
    """Encoder n has 31.4 + 10 n percent of the objects right, FID 12.34 - n, and a DINO score of 0.701 + 0.01 n.

    Its precision is 20.3 + n percent, its F1 25.6 + n; it fills 40.1 + n percent of the empty places.
    """
    values = [None, 75.0, 50.0, 100.0, 0.0]
    by_sentence = [
        {"sentence": number, "objects": count, "value": value}
        for number, (count, value) in enumerate(zip(objects, values, strict=True), 1)
        if count
    ]
    scores = [
        {
            "fid_own": {"value": 12.34 - n},
            "dino_score": {"value": 0.701 + 0.01 * n},
            "objects_right": {"value": 31.4 + 10 * n},
            "objects_precision": {"value": 20.3 + n},
            "objects_f1": {"value": 25.6 + n},
            "objects_right_with_size": {"value": 30 + n},
            "empty_filled": {"value": 40.1 + n},
            "background_right": {"value": 56.7 + n},
            "objects_right_by_sentence": by_sentence,
        }
        for n in range(len(labels))
    ]
    differences = [
        ("long-clip", labels[0], "objects_right", 10, -1.1, 20.5),
        ("debias-clip", "long-clip", "objects_right", 11.1, 5.2, 16.3),
        ("debias-clip", labels[0], "empty_filled", 9.1, 5.5, 12.8),
        ("debias-clip", labels[0], "dino_score", 0.1, 0.05, 0.15),
    ]
    return {
        "evaluation": "generation",
        "settings": {"data": data},
        "images": 5,
        "encoders": {label: {"scores": its} for label, its in zip(labels, scores, strict=True)},
        "compared": [
            {"a": a, "b": b, "score": score, "difference": d, "low": low, "high": high, "p": 0.5}
            for a, b, score, d, low, high in differences
        ],
    }


def robustness_report(labels=LABELS) -> dict:
    recall = {"keep": 90, "move2": 60, "move4": 50, "remove": 40}
    return {
        "evaluation": "robustness",
        "settings": {"data": "toy/test"},
        "encoders": {
            label: {
                "recall_at_1_percent": {
                    edit: {"text_to_image": r1 + n + 0.1, "image_to_text": r1 + n + 0.6} for edit, r1 in recall.items()
                }
            }
            for n, label in enumerate(labels)
        },
    }


def results(folder: Path, labels=LABELS) -> list[tuple[Path, dict]]:
    """As `evaluate all` and the short prompts leave them; the last object of every generated image is missing."""
    for name in folder_names(list(labels)).values():
        (folder / "pictures" / name).mkdir(parents=True)
        for index in range(5):
            shown = scene("test", index)
            render(replace(shown, things=shown.things[:-1])).save(folder / "pictures" / name / f"{index:06}.png")
    short = generation_report(labels, "toy/short-test")
    # The order of a folder's results does not matter, and neither does another folder's.
    elsewhere = folder.parent / "elsewhere"
    return [
        (elsewhere, robustness_report(["toy/clip"])),
        (folder, robustness_report(labels)),
        (folder, generation_report(labels)),
        (folder / SHORT_FOLDER, short),
    ]


def page_of(story: dict, folder: Path) -> Page:
    write_page(folder / "report.html", merged_report.TEMPLATE, sections=[], has_story=True, **story)
    return Page((folder / "report.html").read_text(encoding="utf-8"))


WITH_CHUNKS = ("toy/clip", "toy/clip in chunks", *LABELS[1:])
