"""Results of the toy world, and the page that tells them."""

from pathlib import Path

from helpers.html_page import Page
from PIL import Image

from debias_diffusion.eval import page
from debias_diffusion.eval.report import write_page
from debias_diffusion.eval.story import EXAMPLES, SHORT_FOLDER

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
    return {
        "evaluation": "generation",
        "settings": {"data": data},
        "images": 5,
        "encoders": {label: {"scores": its} for label, its in zip(labels, scores, strict=True)},
    }


def results(folder: Path, labels=LABELS) -> list[tuple[Path, dict]]:
    """As the quickstart leaves them."""
    Image.new("RGB", (8, 8)).save(folder / EXAMPLES)
    # Another folder's results do not matter.
    return [
        (folder.parent / "elsewhere", generation_report(labels[:1])),
        (folder, generation_report(labels)),
        (folder / SHORT_FOLDER, generation_report(labels, "toy/short-test")),
    ]


def page_of(story: dict, folder: Path) -> Page:
    write_page(folder / "report.html", page.TEMPLATE, sections=[], has_story=True, **story)
    return Page((folder / "report.html").read_text(encoding="utf-8"))
