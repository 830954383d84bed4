"""Results of the toy world, and the page that tells them."""

from dataclasses import replace
from pathlib import Path

from helpers.html_page import Page

from debias_diffusion.data.toy_scenes import family
from debias_diffusion.eval import page
from debias_diffusion.eval.images.rendered import FOLDER, folder_names
from debias_diffusion.eval.report import write_page
from debias_diffusion.eval.story import SHORT_FOLDER
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import scene

CUT, WHOLE = "SDXL's own, cut at 77 tokens", "SDXL's own, overlapping chunks"
LABELS = (CUT, WHOLE, "toy/long-clip", "toy/debias-clip", "debias-clip-sdxl")


def generation_report(labels=LABELS, data="toy/test") -> dict:
    """Encoder n has 31.4 + 10 n percent of the objects right, and fills 40.1 + n percent of the empty places.

    Of 60 objects that sentence 2 first mentions it has 90 - 5 n percent right, of 30 of sentence 5 then 10 n percent.
    """
    scores = [
        {
            "objects_right": {"value": 31.4 + 10 * n, "low": 30.4 + 10 * n, "high": 33.4 + 10 * n},
            "empty_filled": {"value": 40.1 + n},
            "objects_right_by_sentence": [
                {"sentence": 2, "objects": 60, "value": 90.0 - 5 * n},
                {"sentence": 5, "objects": 20, "value": 15.0 * n},
                {"sentence": 6, "objects": 10, "value": 0.0},
            ],
        }
        for n in range(len(labels))
    ]
    images = [f"{data.removeprefix('toy/')}/{index:06}" for index in range(5)]
    return {
        "evaluation": "generation",
        "settings": {"data": data},
        "images": 5,
        "records": {"image": images, "group": [*map(family, images)]},
        "encoders": {label: {"scores": its} for label, its in zip(labels, scores, strict=True)},
    }


def results(folder: Path, labels=LABELS) -> list[tuple[Path, dict]]:
    """As the quickstart leaves them; the last object of every generated image is missing."""
    for name in folder_names(list(labels)).values():
        (folder / FOLDER / name).mkdir(parents=True)
        for index in range(5):
            shown = scene("test", index)
            render(replace(shown, things=shown.things[:-1])).save(folder / FOLDER / name / f"{index:06}.png")
    # Another folder's results do not matter.
    return [
        (folder.parent / "elsewhere", generation_report(labels[:1])),
        (folder, generation_report(labels)),
        (folder / SHORT_FOLDER, generation_report(labels, "toy/short-test")),
    ]


def page_of(story: dict, folder: Path) -> Page:
    write_page(folder / "report.html", page.TEMPLATE, sections=[], has_story=True, **story)
    return Page((folder / "report.html").read_text(encoding="utf-8"))
