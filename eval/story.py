"""The top of the toy world's report: what each encoder drew, what to do next, and examples.

An example is a prompt with its images, and what is right, wrong or extra in each place.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from debias_diffusion.data.toy_scenes import toy_scene
from debias_diffusion.encoders.spec import ORIGINAL_LABEL, READINGS
from debias_diffusion.toyworld.checker import compare, describe, read_image
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import PLACES

from .images.networks import load_image
from .images.objects import BY_SENTENCE, LATE
from .images.rendered import FOLDER, folder_names
from .intervals import first_of_each
from .report import Table, cell, image_url

SCENES, SHORT_PROMPTS = "toy/", "toy/short-"  # data of long captions and of short prompts
SHORT_FOLDER = "short-prompts"  # of images of short prompts, in the folder of the other results
OWN_CUT, OWN_WHOLE = (f"{ORIGINAL_LABEL}, {READINGS[reading]}" for reading in ("cut", "overlap"))
# By the last part of a label. In retrieval the base model stands for SDXL's own text encoder, which it is.
NAMES = {"clip": OWN_CUT, "long-clip": "Long-CLIP", "debias-clip": "DeBias-CLIP"}
NAMES |= {"debias-clip-sdxl": "DeBias-CLIP for SDXL"}
EXAMPLES = 8  # the first of each family of scenes, not the best ones
_WIDTH = 240  # pixels that smaller images are enlarged to, smoothly and the same in every browser


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
    labels, count = list(generated["encoders"]), generated["images"]
    names = names_of(labels)
    scores, short_scores = (
        {names.get(label, label): entry["scores"] for label, entry in report["encoders"].items()} if report else {}
        for report in (generated, short)
    )
    images = {names[label]: folder / FOLDER / name for label, name in folder_names(labels).items()}
    return {
        "lead": _lead(scores, count),
        "scores": _table(scores, short_scores, count),
        "shipped": [names[label] for label in labels if label.startswith(SCENES)],
        "examples": examples(generated["records"], images),
        "most_examples": EXAMPLES,
    }


def _is_of_captions(report: dict) -> bool:
    """Whether images were generated from long captions of the toy world."""
    scored = all("objects_right" in entry["scores"] for entry in report["encoders"].values())
    return scored and not report["settings"]["data"].startswith(SHORT_PROMPTS)


def names_of(labels: Sequence[str]) -> dict[str, str]:
    """By label, the name on the page; two encoders that would share one keep their labels."""
    names = [NAMES.get(label.rpartition("/")[2], label) for label in labels]
    return {label: name if names.count(name) == 1 else label for label, name in zip(labels, names, strict=True)}


# ---- scores


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


# ---- examples


def examples(records: Mapping[str, Sequence[str]], folders: Mapping[str, Path]) -> list[dict]:
    """The first prompt of each family of scenes, with its reference image and the generated ones.

    Args:
        records: of `generation.json`, all of toy scenes.
        folders: of images, by the encoder's name.

    Returns:
        for the template, at most `EXAMPLES`; none if images are missing.
    """
    files = {
        records["image"][index]: {name: folder / f"{index:06}.png" for name, folder in folders.items()}
        for index in first_of_each(records["group"])[:EXAMPLES]
    }
    if not all(file.is_file() for by_name in files.values() for file in by_name.values()):
        return []
    return [_example(image, by_name) for image, by_name in files.items()]


def _example(image: str, files: Mapping[str, Path]) -> dict:
    scene, prompt = toy_scene(image)
    images = {name: load_image(file) for name, file in files.items()}
    generated = []
    for name, image in images.items():
        seen = read_image(image)
        words, comparison, marks = describe(seen, scene), compare(seen, scene), []
        for place, (column, row) in PLACES.items():  # in the grid of three by three, from 0
            if place in comparison.correct:
                marks.append(
                    {"verdict": "right" if comparison.correct[place] else "wrong", "column": column, "row": row}
                )
            elif place in comparison.filled:
                marks.append({"verdict": "extra", "column": column, "row": row})
        shown = _image(image, name, f"{name}: {words}")
        generated.append(shown | {"score": words.partition(".")[0], "marks": marks})
    things = "; ".join(thing.description for thing in scene.things)
    reference, title = render(scene, next(iter(images.values())).width), "Reference image"
    return {
        "sentences": [sentence.text for sentence in prompt.sentences],
        "reference": _image(reference, title, f"{title}: {things}"),
        "generated": generated,
    }


def _image(image: Image.Image, name: str, alt: str) -> dict:
    image = image.convert("RGB")
    if image.width < _WIDTH:
        image = image.resize((_WIDTH, _WIDTH * image.height // image.width), Image.Resampling.BICUBIC)
    source = image_url(image, optimize=True)
    return {"name": name, "alt": alt, "source": source, "width": image.width, "height": image.height}
