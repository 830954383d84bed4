"""`showcase`: long prompts drawn in four ways by an SDXL checkpoint, pages to look at and to mark, and what marks say.

A person marks facts without knowing which way drew an image: the page of marks shows images in the order of their
checksums, and names no way. An image is known by its checksum, so marks fit these images alone.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
import yaml

from debias_diffusion.devices import describe_machine
from debias_diffusion.errors import UserError
from debias_diffusion.eval.intervals import by_group, drawn_ratios, ends, paired_difference
from debias_diffusion.eval.report import Table, cell, versions, write_page
from debias_diffusion.files import read_json, sha256, write_json, write_text
from debias_diffusion.jobs import Job
from debias_diffusion.pipelines.rendering.checkpoints import Checkpoint

from ..contact_sheet import write_contact_sheets
from ..generate import generate
from ..options import GenerateConfig, ShowcaseConfig

HERE = Path(__file__).parent
# By name: the settings of `generate`. The first is stock SDXL's.
WAYS = {
    "cut": {"reading": "cut"},
    "as A1111 reads": {"reading": "a1111"},
    "whole": {"reading": "overlap"},
    "whole, sharpened": {"reading": "overlap", "sharpen": 1.5},
}
GRID = 10  # prompts of the grid
PROMPTS, MARKING, RESULT = "prompts.jsonl", "marking", "showcase.json"


@dataclass(frozen=True)
class ShowcasePrompt:
    """A prompt with what can be checked in its image.

    Attributes:
        name: unique.
        kind: people, places, interiors, animals, food, drawings.
        sentences: {sentence: its facts}, in the order of the prompt.
    """

    name: str
    kind: str
    sentences: dict[str, list[str]]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


@cache
def read_showcase_prompts() -> list[ShowcasePrompt]:
    """All prompts; the first of each kind come first, then the second ones, and so on."""
    content = yaml.safe_load((HERE / "prompts.yaml").read_text(encoding="utf-8"))
    kinds: dict[str, list[ShowcasePrompt]] = {}
    for name, entry in content.items():
        kinds.setdefault(entry["kind"], []).append(ShowcasePrompt(name, **entry))
    return [prompt for prompt in chain(*zip_longest(*kinds.values())) if prompt]


def showcase(config: ShowcaseConfig) -> Path:
    """Draws what is missing, and writes the pages; with marks, what they say.

    Writes into `config.output` a folder of images for each way, `index.html` with all of them, `mark.html`, on which a
    person marks facts blind to the way, `contact-sheet.png`, the grid of some prompts, chosen by rule, and
    `showcase.json`: machine, versions, digests of the weights and of every image, and the numbers of the marks.

    Returns:
        the page with all images

    Raises:
        UserError: a setting or the marks cannot be used.
        FailedError: some images have values that are not finite; the same command draws the others.
    """
    prompts, output = read_showcase_prompts()[: config.limit], Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    lines = [{"prompt": prompt.text, "seed": config.seed + number} for number, prompt in enumerate(prompts)]
    write_text(output / PROMPTS, "".join(json.dumps(line) + "\n" for line in lines))
    images = {way: draw(config, output, way, len(prompts)) for way in WAYS}
    digests = {way: [sha256(file) for file in files] for way, files in images.items()}
    result = {
        "machine": describe_machine(config.device),
        "versions": versions(),
        "settings": config.settings(),
        "base": Checkpoint.parse(config.base).digest,
        "prompts": [prompt.name for prompt in prompts],
        "images": digests,
    }
    scores, summary = None, []
    if config.marks:
        marked = read_marks(Path(config.marks), prompts, digests)
        result["marks"], scores = numbers_of(marked, prompts), marked
        summary = mark_tables(result["marks"])
        print(*summary, sep="\n\n")
    write_json(output / RESULT, result)
    shown = chosen(prompts, scores)
    write_contact_sheets(
        output, [(files[number], way, prompts[number].text) for number in shown for way, files in images.items()]
    )
    write_marking(output, prompts, images, digests)
    sheet = [
        {"prompt": prompt, "images": {way: files[number].relative_to(output) for way, files in images.items()}}
        for number, prompt in enumerate(prompts)
    ]
    page = output / "index.html"
    write_page(page, "index.html.j2", HERE, sheet=sheet, ways=list(WAYS), tables=summary, result=result)
    print(f"Wrote {page}. Mark facts on {output / 'mark.html'}, then: --marks marks.json")
    return page


def draw(config: ShowcaseConfig, output: Path, way: str, count: int) -> list[Path]:
    """The images of one way, in the order of the prompts."""
    print(f"\n{way}:")
    folder = output / way.replace(", ", "-").replace(" ", "-").lower()
    names = ("base", "steps", "guidance_scale", "height", "width", "batch", "low_memory", "device", "precision")
    shared = {name: getattr(config, name) for name in names}
    generate(GenerateConfig(None, prompts=str(output / PROMPTS), output=str(folder), **shared, **WAYS[way]))
    files = sorted(name for name in Job.read(folder).names() if name.endswith(".png"))
    return [folder / name for name in files[:count]]


# ---- marks


def write_marking(
    output: Path, prompts: Sequence[ShowcasePrompt], images: Mapping[str, list[Path]], digests: Mapping[str, list[str]]
) -> None:
    """`mark.html`, and copies of the images under their checksums, which tell no way."""
    (output / MARKING).mkdir(exist_ok=True)
    items = []
    for way, files in images.items():
        for prompt, file, digest in zip(prompts, files, digests[way], strict=True):
            shutil.copyfile(file, output / MARKING / f"{digest[:16]}.png")
            facts = [{"sentence": at, "fact": fact} for at, fact in facts_of(prompt)]
            items.append({"image": digest[:16], "facts": facts})
    items.sort(key=lambda item: item["image"])
    write_page(output / "mark.html", "mark.html.j2", HERE, items=items, folder=MARKING)


def facts_of(prompt: ShowcasePrompt) -> list[tuple[int, str]]:
    """(number of the sentence, from 1, fact), in the order of the prompt."""
    return [(at, fact) for at, facts in enumerate(prompt.sentences.values(), 1) for fact in facts]


def read_marks(
    file: Path, prompts: Sequence[ShowcasePrompt], digests: Mapping[str, list[str]]
) -> dict[str, list[list[bool] | None]]:
    """{way: for each prompt whether each fact was marked right, or None if the image has no complete marks}

    Raises:
        UserError: the file is not what the page of marks saves, or marks none of these images.
    """
    marks = read_json(file, advice="Give the file that mark.html saves.").get("marks", {})
    marked = {way: [marks.get(digest[:16]) for digest in names] for way, names in digests.items()}
    for way in marked:
        for number, prompt in enumerate(prompts):
            facts = marked[way][number]
            whole = isinstance(facts, list) and len(facts) == len(facts_of(prompt)) and set(facts) <= {True, False}
            marked[way][number] = facts if whole else None
    if not any(facts for way in marked.values() for facts in way):
        raise UserError(f"{str(file)!r} marks all facts of none of these images. Give marks of this folder's mark.html.")
    return marked


def numbers_of(marked: Mapping[str, list[list[bool] | None]], prompts: Sequence[ShowcasePrompt]) -> dict:
    """Facts right by way, in all and by sentence, with 95% intervals over prompts; and every two ways compared.

    Only prompts of which all ways are marked count.
    """
    whole = [number for number in range(len(prompts)) if all(facts[number] for facts in marked.values())]
    values = {way: np.array([100.0 * right for number in whole for right in facts[number]]) for way, facts in marked.items()}
    facts = [(group, at) for group, number in enumerate(whole) for at, _ in facts_of(prompts[number])]
    groups, sentences = (np.array(part) for part in (zip(*facts, strict=True) if facts else ((), ())))
    numbers: dict = {"prompts": len(whole), "facts": len(facts), "ways": {}, "compared": []}
    if not whole:
        return numbers
    for way, right in values.items():
        by_sentence = {int(at): _share(right[sentences == at], groups[sentences == at]) for at in np.unique(sentences)}
        numbers["ways"][way] = {"all": _share(right, groups), "by_sentence": by_sentence}
    first, *others = WAYS
    for way in others:
        line = paired_difference(values[way], values[first], groups)
        numbers["compared"].append({"a": way, "b": first, **line})
    return numbers


def _share(right: np.ndarray, groups: np.ndarray) -> dict:
    above, below = by_group(right, np.unique(groups, return_inverse=True)[1])
    low, high = ends(drawn_ratios(above, below))
    return {"value": float(right.mean()), "low": low, "high": high, "facts": len(right)}


def mark_tables(numbers: dict) -> list[Table]:
    """What the marks say."""
    ways = numbers["ways"]
    if not ways:
        return []
    sentences = sorted({at for parts in ways.values() for at in parts["by_sentence"]})
    rows = [["all", *(cell(**_cell(parts["all"])) for parts in ways.values())]]
    rows += [[f"sentence {at}", *(cell(**_cell(parts["by_sentence"][at])) for parts in ways.values())] for at in sentences]
    compared = [
        [f"{line['a']} - {line['b']}", cell(line["difference"], line["low"], line["high"], "+.1f")]
        for line in numbers["compared"]
    ]
    title = f"{numbers['facts']} facts of {numbers['prompts']} prompts: right, % (95%)"
    return [Table([title, *ways], rows), Table(["facts right, points", "difference (95%)"], compared)]


def _cell(share: dict) -> dict:
    return {name: share[name] for name in ("value", "low", "high")}


def chosen(prompts: Sequence[ShowcasePrompt], marked: Mapping[str, list[list[bool] | None]] | None) -> list[int]:
    """The numbers of the grid's prompts, by rule: with marks the GRID nearest to the median difference of "whole" and
    "cut"; without, the first of each kind."""
    if marked is None:
        first = {prompt.kind: number for number, prompt in reversed(list(enumerate(prompts)))}
        return sorted(first.values())
    both = {
        number: np.mean(whole) - np.mean(cut)
        for number, (whole, cut) in enumerate(zip(marked["whole"], marked["cut"], strict=True))
        if whole and cut
    }
    median = np.median(list(both.values())) if both else 0.0
    return sorted(sorted(both, key=lambda number: (abs(both[number] - median), number))[:GRID])
