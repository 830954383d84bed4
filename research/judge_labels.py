"""How well a judge agrees with people: their labels of what images show, and the order of images that these give."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata

from debias_diffusion.data.bad_records import BadRecord, check_share, leave_out, print_left_out
from debias_diffusion.data.captions import fold
from debias_diffusion.data.images import ImageFolder, is_there
from debias_diffusion.devices import pick_device
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.eval.images.networks import TwoTowerFeatures
from debias_diffusion.eval.images.prompt_sets import BAND_NAMES, Places, band, csv_rows, statement
from debias_diffusion.eval.images.scores import clip_scores
from debias_diffusion.eval.intervals import FEWEST, ends, group_numbers
from debias_diffusion.eval.judge import Questioning, error_table, errors, filled
from debias_diffusion.eval.report import Table, cell, versions
from debias_diffusion.files import read_json, write_json

from .options import JudgeConfig

NAME = "judge"
LABELS, LONG_T2I = "labels.csv", "split/test.json"
_COLUMNS = ("image", "prompt", "element", "label")
_LABELS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
_KINDS = ("entity_alignment", "attribute_alignment", "relation_alignment")
_SAMPLES = 1000  # of the bootstrap of rank correlations, which rank each sample again
_FEWEST = 10  # images that a rank correlation is of


class Labelled(NamedTuple):
    """An image, the prompt it was generated from, and {question: whether the image shows it, as people say}."""

    image: str
    prompt: str
    labels: dict[str, bool]


def evaluate_judge(config: JudgeConfig) -> dict:
    """Asks a judge about what people labelled; writes `judge.json` and prints tables. A killed run continues.

    Returns:
        settings, versions, digests; "judge", see `judge.control`; "labels", its `judge.errors` by what people say;
        unanswered ones are p(yes) = 0.5, hence no, as `following` takes them, whose rates of error these are;
        "order", for all images and by the length of their prompt in CLIP tokens: "images", and of "judge", "clip_score"
        and their "difference" the rank correlation with the share of elements that people see, "value", "low", "high"
        (95%, bootstrap over prompts, see `intervals`); "fit", whether the judge's is higher, None without CLIPScore
        or of too few prompts; the bad records.

    Raises:
        UserError: the labels, their images or a model cannot be used, or the judge does not look at images.
    """
    device = pick_device(config.device)
    images, labelled, bad, count = read_labels(Path(config.labels))
    labelled = labelled[: config.limit]
    print_left_out(bad)
    check_share(bad, count, config.max_bad)
    judge = Questioning(config, config.output)
    opened = [partial(images.open, one.image) for one in labelled]
    digests = [images.stamp(one.image).hex() for one in labelled]
    asked = [(image, digest, [*one.labels]) for image, digest, one in zip(opened, digests, labelled, strict=True)]
    answers = [*map(filled, judge.ask(asked, f"ask {config.judge}"))]
    scores, depends = {"judge": np.array([each.mean() for each in answers])}, judge.depends
    if config.clip_score:
        clip = TwoTowerFeatures(config.clip_score, device)
        texts = clip.of_texts([one.prompt for one in labelled], config.batch_size)
        scores["clip_score"] = np.array(clip_scores(clip.of_images(opened, config.batch_size), texts))
        depends = depends | {"clip_score": clip.digest()}
    truth, p = np.concatenate([[*one.labels.values()] for one in labelled]), np.concatenate(answers)
    prompts, order = np.repeat([one.prompt for one in labelled], [*map(len, answers)]), _orders(labelled, scores)
    can_say = config.clip_score and len({*prompts}) >= FEWEST
    report = {
        "evaluation": NAME,
        "settings": vars(config),
        "versions": versions(),
        "digests": depends,
        "judge": judge.of_toys,
        "labels": errors(p, truth, prompts),
        "order": order,
        "fit": (order["all"]["difference"]["low"] or 0) > 0 if can_say else None,
        "left_out": [vars(record) for record in bad],
    }
    write_json(Path(config.output, f"{NAME}.json"), report)
    for table in tables(report):
        print(f"\n{table}")
    verdict = "better than CLIPScore." if report["fit"] else "no better than CLIPScore: do not use it for claims."
    unknown = f"Give labels of at least {FEWEST} prompts" if config.clip_score else "Give --clip-score"
    unknown += ": only a judge that orders images better than CLIPScore is fit for claims."
    print("", unknown if report["fit"] is None else f"{config.judge} orders these images {verdict}", sep="\n")
    return report


def read_labels(folder: Path) -> tuple[ImageFolder, list[Labelled], list[BadRecord], int]:
    """The images' folder, the labelled images, the bad records, and how many records there are.

    An element with both labels is left out, as a bad record is.

    LongT2IBench (Yang et al. 2025) names elements as `cat`, `[red]cat` and `cat[on]chair`.

    Raises:
        UserError: there are no labels of either layout that can be used.
    """
    labelled: dict[tuple[str, str], Labelled] = {}
    bad: list[BadRecord] = []

    def add(image: str, prompt: str, element: str, label: str) -> None:
        text, is_shown = fold(element.replace("[", " ").replace("]", " ")), _LABELS.get(label.strip().lower())
        if not (prompt.strip() and text and is_there(root, image)) or is_shown is None:
            raise ValueError(
                f"the prompt is {prompt[:40]!r}, the element {text!r}, the image {image!r}, the label {label[:40]!r}, "
                "which must be 1 or 0"
            )
        labels = labelled.setdefault((image, prompt), Labelled(image, fold(prompt), {})).labels
        question = text if text.endswith("?") else statement(text)
        if labels.setdefault(question, is_shown) != is_shown:
            del labels[question]
            raise ValueError(f"the element {text!r} is labelled both 1 and 0 in the image {image!r}")

    root = ImageFolder(folder)
    if (folder / LABELS).is_file():
        records = csv_rows(folder / LABELS, _COLUMNS)
        for number, row in enumerate(records, 1):
            with leave_out(f"row {number}", bad), explain_failure("unusable label"):
                add(*(row[column] for column in _COLUMNS))
    elif (folder / LONG_T2I).is_file():
        records = read_json(folder / LONG_T2I, list)
        for number, entry in enumerate(records):
            with leave_out(f"entry {number}", bad), explain_failure("unusable labels"):
                for kind, (name, label) in product(_KINDS, (("align", "1"), ("misalign", "0"))):
                    for element in entry["en_structured_data"][kind][name]:
                        add(entry["img_path"], entry["en_prompt_text"], element, label)
    else:
        raise UserError(f"{str(folder)!r} holds no labels: neither {LABELS} nor {LONG_T2I}, as in LongT2IBench.")
    if not (usable := [one for one in labelled.values() if one.labels]):
        raise UserError(f"{str(folder)!r} holds no usable label. The first fault: {bad[0] if bad else 'it is empty'}.")
    return root, usable, bad, len(records)


def _orders(labelled: Sequence[Labelled], scores: dict[str, np.ndarray]) -> dict:
    """The rank correlations of scores [N] with people, for all images and by length of the prompt."""
    values = np.stack([[np.mean([*one.labels.values()]) for one in labelled], *scores.values()])  # [1 + scores, N]
    bands = np.array([band(Places(one.prompt).at(len(one.prompt))[1]) for one in labelled])
    prompts, random = group_numbers(one.prompt for one in labelled), np.random.default_rng(0)
    lines = {}
    for name in ("all", *BAND_NAMES):
        there = np.flatnonzero((bands == name) | (name == "all"))
        if len(there) < _FEWEST and name != "all":
            continue
        groups = [there[prompts[there] == prompt] for prompt in np.unique(prompts[there])]
        draws = (random.integers(len(groups), size=len(groups)) for _ in range(_SAMPLES))
        samples = [there, *(np.concatenate([groups[at] for at in draw]) for draw in draws)]
        with np.errstate(invalid="ignore"):  # [1 + _SAMPLES, scores], nan where all values are alike
            found = [np.corrcoef(rankdata(values[:, at], axis=1))[0, 1:] for at in samples]
        columns = dict(zip(scores, np.array(found).T, strict=True))
        if "clip_score" in columns:
            columns["difference"] = columns["judge"] - columns["clip_score"]
        lines[name] = {"images": len(there)}
        for score, (value, *drawn) in columns.items():
            low, high = ends(np.array(drawn)) if len(groups) >= FEWEST else (None, None)
            lines[name][score] = {"value": None if np.isnan(value) else float(value), "low": low, "high": high}
    return lines


def tables(report: dict) -> list[Table]:
    """The judge's errors on labels and on toy scenes, and its rank correlation beside CLIPScore's."""
    _, *names = report["order"]["all"]
    rows = [
        [name, line["images"], *(cell(*line[score].values(), form=".3f") for score in names)]
        for name, line in report["order"].items()
    ]
    of_labels, of_toys = error_table("on these labels", report["labels"]), error_table("on toy scenes", report["judge"])
    header = ["rank correlation with people, by CLIP tokens of the prompt", "images", *names]
    return [of_labels, of_toys, Table(header, rows)]
