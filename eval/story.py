"""The top of the toy world's report: what each encoder drew, examples, and what to do next."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from debias_diffusion.encoders.spec import ORIGINAL_LABEL, READINGS
from debias_diffusion.files import read_file

from .images.objects import BY_SENTENCE, LATE
from .report import Table, cell, image_url

SCENES, SHORT_PROMPTS = "toy/", "toy/short-"  # data of long captions and of short prompts
SHORT_FOLDER = "short-prompts"  # of images of short prompts, in the folder of the other results
OWN_CUT, OWN_WHOLE = (f"{ORIGINAL_LABEL}, {READINGS[reading]}" for reading in ("cut", "overlap"))
# By the last part of a label. In retrieval the base model stands for SDXL's own text encoder, which it is.
NAMES = {"clip": OWN_CUT, "long-clip": "Long-CLIP", "debias-clip": "DeBias-CLIP"}
NAMES |= {"debias-clip-sdxl": "DeBias-CLIP for SDXL"}
EXAMPLES = "examples.png"  # of `evaluate generation`


def tell(results: Sequence[tuple[Path, dict]]) -> dict | None:
    """What the template `story.html.j2` shows; None without images generated from long captions of the toy world.

    Args:
        results: folders of results and the reports in them, the newest last. The story is of one folder, as `evaluate
            all` leaves it, so that no two models of one name meet in it.
    """
    reports = {(folder, report["evaluation"]): report for folder, report in results}
    toy = [folder for (folder, name), report in reports.items() if name == "generation" and _is_of_captions(report)]
    if not toy:
        return None
    folder = toy[-1]
    generated, short = (reports.get((place, "generation")) for place in (folder, folder / SHORT_FOLDER))
    names, count = _names(list(generated["encoders"])), generated["images"]
    scores, short_scores = (
        {names.get(label, label): entry["scores"] for label, entry in report["encoders"].items()} if report else {}
        for report in (generated, short)
    )
    examples = folder / EXAMPLES
    return {
        "lead": _lead(scores, count),
        "scores": _table(scores, short_scores, count),
        "shipped": [name for label, name in names.items() if label.startswith(SCENES)],
        "examples": image_url(read_file(examples)) if examples.is_file() else None,
    }


def _is_of_captions(report: dict) -> bool:
    """Whether images were generated from long captions of the toy world."""
    scored = all("objects_right" in entry["scores"] for entry in report["encoders"].values())
    return scored and not report["settings"]["data"].startswith(SHORT_PROMPTS)


def _names(labels: Sequence[str]) -> dict[str, str]:
    """By label, the name on the page; two encoders that would share one keep their labels."""
    names = [NAMES.get(label.rpartition("/")[2], label) for label in labels]
    return {label: name if names.count(name) == 1 else label for label, name in zip(labels, names, strict=True)}


def _right(scores: Mapping, first: int = 1, last: float = float("inf")) -> float | None:
    """The percentage of objects right, of those that these sentences first mention."""
    lines = [line for line in scores[BY_SENTENCE] if first <= line["sentence"] <= last]
    objects = sum(line["objects"] for line in lines)
    return sum(line["objects"] * line["value"] for line in lines) / objects if objects else None


def _lead(scores: dict[str, dict], prompts: int) -> str | None:
    """What SDXL's own encoder drew of a prompt that it read whole, and of one that was cut."""
    if not {OWN_CUT, OWN_WHOLE} <= scores.keys():
        return None
    whole, cut = (f"{scores[name]['objects_right']['value']:.0f}%" for name in (OWN_WHOLE, OWN_CUT))
    return (
        f"Of the objects in {prompts} long prompts, SDXL's own encoder drew {whole} right reading each prompt whole in "
        f"overlapping chunks, and {cut} cutting it at 77 tokens, as stock SDXL does."
    )


def _table(by_encoder: dict[str, dict], short: dict[str, dict], prompts: int) -> Table:
    header = [
        f"{prompts} long prompts",
        "objects right, % (95% interval)",
        f"those of sentences 1 to {LATE}, %",
        "those of later ones, %",
        "empty places filled, %",
        "short prompts: objects right, %",
    ]
    rows = []
    for name, scores in by_encoder.items():
        values = [_right(scores, 1, LATE), _right(scores, LATE + 1), scores.get("empty_filled", {}).get("value")]
        values.append(short.get(name, {}).get("objects_right", {}).get("value"))
        rows.append([name, cell(**scores["objects_right"]), *map(cell, values)])
    return Table(header, rows)
