"""`showcase`: long prompts in four ways by an SDXL checkpoint, pages to look at and to mark, and what marks say."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from debias_diffusion.app.prompts import SHEET
from debias_diffusion.app.sheet import (
    CUT,
    WAYS,
    WHOLE,
    Images,
    draw_ways,
    provenance,
    write_sheet,
)
from debias_diffusion.errors import UserError
from debias_diffusion.eval.images.networks import load_image
from debias_diffusion.eval.images.prompt_sets import statement
from debias_diffusion.eval.intervals import hits_interval, paired_difference
from debias_diffusion.eval.judge import Questioning, error_table, errors, filled
from debias_diffusion.eval.options import Judging
from debias_diffusion.eval.report import Table, cell, write_page
from debias_diffusion.files import atomic_file, open_regular, read_file, read_json, write_json

from ..options import ShowcaseConfig

HERE = Path(__file__).parent
GRID = 10  # prompts of the contact sheet, with marks
MARKING = "marking"  # folder of the images to mark

Marks = dict[str, list[list[bool] | None]]  # by way, for each prompt whether each fact is right; None: not all marked
Judged = dict[str, list[np.ndarray]]  # by way, for each prompt the judge's p(yes) of each fact


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

    @property
    def facts(self) -> list[tuple[int, str]]:
        """(number of the sentence, from 1; fact), in the order of the prompt."""
        return [(number, fact) for number, facts in enumerate(self.sentences.values(), 1) for fact in facts]


@cache
def read_showcase_prompts() -> list[ShowcasePrompt]:
    """All prompts; the first of each kind come first, then the second ones, and so on."""
    kinds: dict[str, list[ShowcasePrompt]] = {}
    for file in (SHEET, HERE / "prompts.yaml"):
        for name, entry in yaml.safe_load(read_file(file)).items():
            kinds.setdefault(entry["kind"], []).append(ShowcasePrompt(name, **entry))
    return [prompt for prompt in chain(*zip_longest(*kinds.values())) if prompt]


def showcase(config: ShowcaseConfig) -> Path:
    """Draws what is missing, and writes the pages; with marks, what they say.

    Writes into `config.output` a folder of images for each way; `index.html` with all of them; `mark.html`, on which a
    person marks facts blind to the way; `contact-sheet.png`, prompts chosen by rule (`grid`); and `showcase.json`:
    machine, versions, digests of the weights and of every image, the numbers of the marks, and those of a judge, which
    chooses the prompts of the sheet in place of the marks.

    Returns:
        the page with all images

    Raises:
        UserError: a setting, the marks or the judge cannot be used.
        FailedError: some images have values that are not finite; the same command draws the others.
    """
    output, page, judge = Path(config.output), Path(config.output) / "index.html", None
    if config.judge:
        judge = Questioning(Judging(judge=config.judge, server=config.server), config.output)
    prompts = read_showcase_prompts()[: config.limit]
    texts = [prompt.text for prompt in prompts]
    images = draw_ways(config, texts)
    digests = {way: {file.name: digest for file, digest in pairs} for way, pairs in images.items()}
    result, marks, tables = provenance(config) | {"images": digests}, None, []
    if config.marks:
        marks = read_marks(config.marks, prompts, images)
        result["marks"] = summarize(marks, prompts)
        tables = mark_tables(result["marks"])
    if judge:
        judged = ask_about_facts(judge, prompts, images)
        if marks:
            result["agreement"] = agreement(judged, marks)
            tables.append(error_table("where the person marked", result["agreement"]))
        marks = {way: [(p > 0.5).tolist() for p in of_way] for way, of_way in judged.items()}
        result["judged"] = summarize(marks, prompts)
        tables += mark_tables(result["judged"], " by the judge")
    print(*tables, sep="\n\n", end="\n\n" * bool(tables))
    write_json(output / "showcase.json", result)
    write_sheet(config, texts, images, grid(prompts, marks))
    write_marking(output, prompts, images)
    write_page(page, "index.html.j2", HERE, prompts=prompts, images=images, tables=tables, result=result)
    print(f"Wrote {page}. Mark facts on {output / 'mark.html'}, then give --marks marks.json.")
    return page


def grid(prompts: Sequence[ShowcasePrompt], marks: Marks | None = None) -> list[int]:
    """Numbers of the prompts to show, by rule: with marks, the `GRID` prompts whose facts gain by reading the whole
    prompt most nearly what the median prompt gains; without, the first prompt of each kind."""
    pairs = zip(marks[WHOLE], marks[CUT], strict=True) if marks else ()
    gains = {number: np.mean(whole) - np.mean(cut) for number, (whole, cut) in enumerate(pairs) if whole and cut}
    if not gains:
        return sorted({prompt.kind: number for number, prompt in reversed(list(enumerate(prompts)))}.values())
    median = np.median(list(gains.values()))
    return sorted(sorted(gains, key=lambda number: (abs(gains[number] - median), number))[:GRID])


# ---- marks


def write_marking(output: Path, prompts: Sequence[ShowcasePrompt], images: Images) -> None:
    """`mark.html`, and copies of the images, without their settings, under names that tell no way.

    The images of a prompt follow each other, so that who stops early leaves whole prompts, in the order of their
    checksums. A checksum names an image, so marks fit these images alone.
    """
    (output / MARKING).mkdir(exist_ok=True)
    items = []
    for number, prompt in enumerate(prompts):
        for digest, path in sorted(pairs[number][::-1] for pairs in images.values()):
            copy = output / MARKING / f"{digest[:16]}.jpg"
            with open_regular(path) as file, Image.open(file) as image, atomic_file(copy) as unfinished:
                image.convert("RGB").save(unfinished, "JPEG", quality=95)
            items.append({"image": digest[:16], "facts": [fact for _, fact in prompt.facts]})
    write_page(output / "mark.html", "mark.html.j2", HERE, items=items, marking=MARKING)


def read_marks(file: str, prompts: Sequence[ShowcasePrompt], images: Images) -> Marks:
    """The marks of these images.

    Raises:
        UserError: the file is not what mark.html saves, or marks all facts of none of these images.
    """
    marks = read_json(file, advice="Give the file that mark.html has saved.").get("marks")

    def whole(image: tuple[Path, str], prompt: ShowcasePrompt) -> list[bool] | None:
        given = marks.get(image[1][:16]) if isinstance(marks, dict) else None
        fits = isinstance(given, list) and len(given) == len(prompt.facts) and set(map(type, given)) == {bool}
        return given if fits else None

    marked = {way: list(map(whole, pairs, prompts)) for way, pairs in images.items()}
    if not any(chain(*marked.values())):
        raise UserError(f"{file!r} marks all facts of none of these images. Give what this mark.html has saved.")
    return marked


def summarize(marks: Marks, prompts: Sequence[ShowcasePrompt]) -> dict:
    """Facts right in percent by way, in all and by sentence, and each way compared with the cut prompt.

    The intervals (95%) are over prompts. Only prompts that are marked in all ways count.
    """
    numbers = [number for number in range(len(prompts)) if all(marks[way][number] for way in WAYS)]
    facts = [(group, sentence) for group, number in enumerate(numbers) for sentence, _ in prompts[number].facts]
    groups, sentences = np.array(facts, dtype=int).reshape(-1, 2).T
    right = {way: np.array([100.0 * mark for number in numbers for mark in marks[way][number]]) for way in WAYS}

    def share(values: np.ndarray, chosen: np.ndarray) -> dict:
        low, high = hits_interval(values[chosen], groups[chosen])
        counts = {"facts": int(chosen.sum()), "right": int((values[chosen] > 0).sum())}
        return counts | {"value": float(values[chosen].mean()), "low": low, "high": high}

    result: dict = {"prompts": [prompts[number].name for number in numbers], "facts": len(facts), "ways": {}}
    result["compared"] = {}
    for way, values in right.items() if facts else ():
        by_sentence = {int(number): share(values, sentences == number) for number in np.unique(sentences)}
        result["ways"][way] = {"all": share(values, sentences > 0), "by_sentence": by_sentence}
        if way != CUT:
            result["compared"][way] = paired_difference(values, right[CUT], groups)
    return result


def mark_tables(summary: dict, by: str = "") -> list[Table]:
    """What the marks say; nothing where no prompt is marked in all ways."""
    if not summary["ways"]:
        return []
    all_ways = summary["ways"].values()
    rows = {"all": [way["all"] for way in all_ways]}
    for number in next(iter(all_ways))["by_sentence"]:
        rows[f"sentence {number}"] = [way["by_sentence"][number] for way in all_ways]
    title = f"{summary['facts']} facts of {len(summary['prompts'])} prompts: right{by}, % (95%)"
    cells = [
        [name, *(cell(part["value"], part["low"], part["high"]) for part in parts)] for name, parts in rows.items()
    ]
    compared = [
        [
            f"{way} - {CUT}",
            cell(line["difference"], line["low"], line["high"], "+.1f"),
            line["p"] and f"{line['p']:.4f}",
        ]
        for way, line in summary["compared"].items()
    ]
    return [
        Table([title, *summary["ways"]], cells),
        Table([f"facts right{by}, points", "difference (95%)", "p"], compared),
    ]


# ---- a judge beside the person


def ask_about_facts(judge: Questioning, prompts: Sequence[ShowcasePrompt], images: Images) -> Judged:
    """What the judge says of all facts of all images; those that it has answered before are not asked again."""
    asked = [
        (partial(load_image, file), digest, [statement(fact) for _, fact in prompt.facts])
        for pairs in images.values()
        for prompt, (file, digest) in zip(prompts, pairs, strict=True)
    ]
    found = map(filled, judge.ask(asked, "ask about facts"))
    return {way: [next(found) for _ in prompts] for way in images}


def agreement(judged: Judged, marks: Marks) -> dict:
    """The judge's `errors` by what the person has marked, with intervals over prompts."""
    p, mark, prompt = np.array(
        [
            (*pair, number)
            for way in WAYS
            for number, (of_prompt, given) in enumerate(zip(judged[way], marks[way], strict=True))
            for pair in zip(of_prompt, given or (), strict=False)
        ]
    ).T
    return errors(p, mark == 1, prompt)
