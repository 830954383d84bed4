"""DPG-Bench (Hu et al. 2024, ELLA): does a picture show what its dense prompt says? Asked proposition by proposition.

A question about each proposition of the prompt is put to a visual question answering (VQA) model. A proposition counts
only when those it depends on hold too: a truck that is not there is not red.
"""

import csv
import hashlib
import io
import json
import os
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from tqdm import tqdm
from transformers import AutoModelForVisualQuestionAnswering, AutoProcessor, PreTrainedTokenizerBase

from debias_diffusion.data import BadRecord
from debias_diffusion.data.images import UnreadableImage, open_image
from debias_diffusion.errors import UserError, reason
from debias_diffusion.files import changed_settings, open_regular, path_digest, sha256, write_text
from debias_diffusion.models.model_files import may_be_hub_id
from debias_diffusion.tokens import clean, clip_tokenizer

from ..common.encoders import check_encoders, compare, labels
from ..common.inputs import check_batch_size, check_output, print_left_out
from ..common.intervals import mean_interval, paired_difference
from ..common.processes import Processes
from ..common.report import Table, compared_tables, interval, show, write_report
from .drawing import Drawing, DrawingSettings, Subject, folder_names, how_drawn

NAME = "dpg_bench"
COLUMNS = (
    "item_id",
    "text",
    "keywords",
    "proposition_id",
    "dependency",
    "category_broad",
    "category_detailed",
    "tuple",
    "question_natural_language",
)
# Where the bands of positions start. SOT stands at 0; 20 is the first position that stretching moves; a window of 77
# ends with EOT at 76, so that text from there on is lost to it.
BANDS = (1, 20, 40, 60, 76, 112)
UNPLACED = "not in the prompt"
BAND_NAMES = (*(f"{start}-{end - 1}" for start, end in pairwise(BANDS)), f"{BANDS[-1]} and on", UNPLACED)
MOST_IMAGES = 1000  # of a prompt
MOST_CHARACTERS = 20_000  # of a prompt, as in `generate`
GRID = 2  # pictures on a side of a published file
NOTES = (
    "The published numbers are of mPLUG-large. Answers of another model make another scale: compare only runs of the "
    "same VQA model.",
    "All rows of the CSV are read. The published script skips the first, and with it loses the first prompt where "
    "other propositions depend on it.",
    "A proposition holds when its answer is yes and all that it depends on hold. The published categories leave "
    "dependencies out and take the last picture of a prompt alone; yes_percent leaves dependencies out too, but is of "
    "all pictures.",
)


@dataclass
class DpgBenchConfig:
    """Settings of a DPG-Bench evaluation.

    What is asked about is either `images`, pictures that are there, or pictures drawn with `base` and `encoders`.

    Attributes:
        data: Folder of the published `dpg_bench`: `dpg_bench.csv`, and `prompts` with a text file a prompt.
        vqa: VQA model that answers: folder or hub id of a ViLT or BLIP in transformers' layout.
        output: Folder for the results, `dpg_bench.json` and `dpg_bench.png`, for the answers, and for the pictures that
            are drawn, `pictures/ENCODER/12/0.png` and so on for the prompt `12.txt`. What is finished there is not
            done again, if it was made with the same settings.
        images: Folder of pictures that are there. For the prompt `12.txt` either the folder `12` with one file a
            picture, or the file `12.png` (or .jpg, .jpeg, .webp): a grid of 2 x 2 as the authors publish, or, with one
            picture a prompt, the picture.
        base: SDXL folder in diffusers' layout, a hub id, or toy/sdxl, to draw with.
        encoders: Text encoders to compare, each in the place of SDXL's first one: training runs, folders, files, hub
            ids, toy/clip, toy/long-clip, toy/debias-clip; original is the base's own.
        images_per_prompt: Pictures of each prompt.
        seed: Picture i of each prompt starts from noise seeded with this number + i.
        steps: Denoising steps. auto is 30, and 20 for toy/sdxl.
        guidance_scale: How strongly prompts are followed; 1 is no guidance. auto is 7, and 5 for toy/sdxl.
        images_at_once: Pictures drawn at once, of prompts of like length; more need more memory. auto is 1, and 20 for
            toy/sdxl.
        prefix: Put before each prompt.
        windows: Let encoders of 77 positions read long prompts in several windows, as this package's pipelines do.
            Without it they are cut at 77 tokens, as stock SDXL does.
        batch_size: Questions asked at once.
        device: Device to run on. The default is cuda where there is one, else cpu; under `accelerate launch` each
            process has its own.
    """

    data: str
    vqa: str
    output: str
    images: str | None = None
    base: str | None = None
    encoders: list[str] = field(default_factory=list)
    images_per_prompt: int = 4
    seed: int = 0
    steps: int | Literal["auto"] = "auto"
    guidance_scale: float | Literal["auto"] = "auto"
    images_at_once: int | Literal["auto"] = "auto"
    prefix: str = ""
    windows: bool = False
    batch_size: int = 16
    device: str | None = None


@dataclass(frozen=True)
class Proposition:
    """One thing that a prompt says.

    Attributes:
        item: the prompt's id, the name of its file.
        number: its own, unique within the prompt.
        parents: the numbers of those it depends on.
        category, detail: as published: attribute and color.
        question: what is asked.
        words: what names it; see `proposition_words`.
    """

    item: str
    number: int
    parents: tuple[int, ...]
    category: str
    detail: str
    question: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class DpgBench:
    """The published files.

    Attributes:
        prompts: text by id, of the prompts that have propositions.
        propositions: of each of them.
        bad: the rows, and prompts, that cannot be used.
        digest: of all files.
    """

    prompts: dict[str, str]
    propositions: dict[str, list[Proposition]]
    bad: list[BadRecord]
    digest: str


# (prompt's id, picture from 0, proposition's number)
Key = tuple[str, int, int]
# A picture and questions about it -> an answer to each.
Ask = Callable[[Image.Image, Sequence[str]], list[str]]


def read_dpg_bench(data: str) -> DpgBench:
    """Reads `prompts/*.txt` and every row of `dpg_bench.csv`.

    A row that cannot be used is left out and named in `bad`, and with it those that depend on it.

    Raises:
        UserError: a file is missing or has other columns, or nothing is left.
    """
    root = Path(data)
    file, folder = root / "dpg_bench.csv", root / "prompts"
    if not (file.is_file() and folder.is_dir()):
        missing = folder if file.is_file() else file
        raise UserError(f"{str(missing)!r} is not there. Give the folder dpg_bench of ELLA's repository.")
    texts = {path.stem: path for path in sorted(folder.glob("*.txt"))}
    prompts, bad = {}, []
    for item, path in list(texts.items()):
        try:
            with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as lines:
                text = lines.read().strip()
        except OSError as error:
            bad.append(BadRecord(f"prompts/{path.name}", "unreadable prompt", reason(error)))
            del texts[item]
            continue
        if 0 < len(text) <= MOST_CHARACTERS:
            prompts[item] = text
        elif text:
            detail = f"it has {len(text):,} characters, and at most {MOST_CHARACTERS:,} are read"
            bad.append(BadRecord(f"prompts/{path.name}", "too long prompt", detail))
        else:
            bad.append(BadRecord(f"prompts/{path.name}", "empty prompt", "there is no text in it"))
    rows = _read_rows(file)
    propositions, wrong = parse_rows(rows, prompts)
    bad += wrong
    for item in [item for item in prompts if item not in propositions]:
        bad.append(BadRecord(f"prompts/{item}.txt", "prompt without propositions", "no usable row names it"))
        del prompts[item]
    if not propositions:
        raise UserError(f"{str(file)!r} has no usable row. The first fault: {bad[0] if bad else 'it has no rows'}.")
    total = hashlib.sha256(sha256(file).encode())
    for item, path in texts.items():
        total.update(f"{item}\0{sha256(path)}\n".encode())
    return DpgBench(prompts, propositions, bad, total.hexdigest())


def _read_rows(file: Path) -> list[dict[str, str]]:
    try:
        with io.TextIOWrapper(open_regular(file), encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, restval="")
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise UserError(
                    f"{str(file)!r} lacks the column {missing[0]}. Its columns must be {', '.join(COLUMNS)}."
                )
            return list(reader)
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{str(file)!r} is no CSV file in UTF-8 ({reason(error)}). Download it again.") from error


def parse_rows(
    rows: Sequence[Mapping[str, str]], prompts: Mapping[str, str]
) -> tuple[dict[str, list[Proposition]], list[BadRecord]]:
    """The propositions of each prompt, in the rows' order, and the rows that cannot be used (row 1 follows the header).

    A dependency of 0 is none.
    """
    keywords: dict[str, list[str]] = {}
    for row in rows:
        keywords.setdefault(row["item_id"].strip(), []).append(row["keywords"])
    items: dict[str, dict[int, tuple[int, Proposition]]] = {}
    bad = []
    for place, row in enumerate(rows, 1):
        item = row["item_id"].strip()
        own = row["keywords"] if len(set(keywords[item])) > 1 or len(keywords[item]) == 1 else ""
        try:
            proposition = _parse(row, item, own)
            if item not in prompts:
                raise ValueError(f"there is no prompts/{item}.txt")
            if proposition.number in items.get(item, ()):
                raise ValueError(f"prompt {item} has a proposition {proposition.number} already")
        except ValueError as error:
            bad.append(BadRecord(f"row {place}", "unusable row", str(error)))
        else:
            items.setdefault(item, {})[proposition.number] = (place, proposition)
    for numbered in items.values():
        bad += _drop_ungrounded(numbered)
    kept = {item: [proposition for _, proposition in numbered.values()] for item, numbered in items.items() if numbered}
    return kept, bad


def _parse(row: Mapping[str, str], item: str, keywords: str) -> Proposition:
    try:
        number = int(row["proposition_id"])
        parents = tuple(int(part) for part in row["dependency"].split(",") if int(part) != 0)
    except ValueError:
        given = f"proposition_id {row['proposition_id']!r}, dependency {row['dependency']!r}"
        raise ValueError(f"{given}: whole numbers are needed, in the dependency with commas between them") from None
    question = row["question_natural_language"].strip()
    if not question or number < 1:
        raise ValueError("there is no question" if number >= 1 else f"proposition_id {number} is below 1")
    words = proposition_words(keywords, row["tuple"])
    category, detail = row["category_broad"].strip(), row["category_detailed"].strip()
    return Proposition(item, number, parents, category, detail, question, words)


def _drop_ungrounded(numbered: dict[int, tuple[int, Proposition]]) -> list[BadRecord]:
    """Takes out the propositions whose dependencies lead to none that is there, or round in a circle."""
    grounded: set[int] = set()
    while True:
        more = {
            number
            for number, (_, proposition) in numbered.items()
            if number not in grounded and grounded.issuperset(proposition.parents)
        }
        if not more:
            break
        grounded |= more
    lost = [number for number in numbered if number not in grounded]
    dropped = [numbered.pop(number) for number in lost]
    detail = "dependency {} leads to no proposition that is there, or round in a circle"
    return [
        BadRecord(f"row {place}", "unusable dependency", detail.format(list(proposition.parents)))
        for place, proposition in dropped
    ]


def proposition_words(keywords: str, published_tuple: str) -> tuple[str, ...]:
    """What names a proposition, in lower case: its keywords, or else what stands in its tuple's brackets.

    >>> proposition_words("", "attribute - color (truck, Red)")
    ('truck', 'red')
    """
    inside = re.search(r"\((.*)\)", published_tuple, re.DOTALL)
    return _words(keywords) or _words(inside[1] if inside else "")


def _words(text: str) -> tuple[str, ...]:
    # The s of a lion's mane is no word of its own.
    return tuple(word for word in re.findall(r"\w+", clean(text)) if word != "s")


def token_position(words: Iterable[str], prompt: str, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Where in the encoded prompt a proposition has been said at the earliest: SOT is 0, the first word 1.

    Each word counts where it first stands in the prompt, as a whole word, in either case, with or without a plural's
    s or es; the position is that of the last of them, because a red truck is not named before both words are read.
    Words that are not in the prompt are passed over. None: none of them is.

    Args:
        words: of the proposition.
        prompt: it is cleaned as captions are (`tokens.clean`).
        tokenizer: CLIP's.
    """
    prompt = clean(prompt)
    found = [re.search(rf"(?<!\w){re.escape(word.lower())}(?:s|es)?(?!\w)", prompt) for word in words]
    starts = [match.start() for match in found if match]
    return 1 + len(tokenizer.tokenize(prompt[: max(starts)], verbose=False)) if starts else None


def band(position: int | None) -> str:
    """The name of the band of `BANDS` that a position lies in."""
    if position is None:
        return UNPLACED
    return BAND_NAMES[bisect_right(BANDS, position) - 1]


def holds(propositions: Iterable[Proposition], yes: Mapping[int, bool]) -> dict[int, bool]:
    """Which propositions of one picture hold: answered yes, and so are all that they depend on, however far back.

    Args:
        propositions: of one prompt, in any order; what they depend on is among them, without circles.
        yes: by number.
    """
    by_number = {proposition.number: proposition for proposition in propositions}
    result: dict[int, bool] = {}
    stack = list(by_number)  # and no recursion, which a long chain of dependencies would exhaust
    while stack:
        parents = by_number[stack[-1]].parents
        unknown = [parent for parent in parents if parent not in result]
        if unknown:
            stack += unknown
        else:
            number = stack.pop()
            result[number] = bool(yes[number]) and all(result[parent] for parent in parents)
    return {number: result[number] for number in by_number}


@dataclass(frozen=True)
class Outcomes:
    """What became of propositions, one entry for each and each picture: whose it is, whether it holds, and a "yes".

    Attributes:
        prompt: the place of its prompt among all.
        holds, yes: 100 where it does, else 0, so that a mean is in percent.
    """

    prompt: np.ndarray
    holds: np.ndarray
    yes: np.ndarray

    def __getitem__(self, chosen: np.ndarray) -> "Outcomes":
        return Outcomes(self.prompt[chosen], self.holds[chosen], self.yes[chosen])


GROUPS = ("by_category", "by_detail", "by_position")


def outcomes(
    propositions: Mapping[str, Sequence[Proposition]],
    yes: Mapping[Key, bool],
    images_per_prompt: int,
    bands: Mapping[tuple[str, int], str],
) -> tuple[Outcomes, dict[str, list[str]]]:
    """What became of every proposition on every picture, and, by `GROUPS`, the name of the group that each is in.

    Args:
        propositions: of each prompt.
        yes: every answer.
        images_per_prompt: pictures of each prompt.
        bands: of each proposition, by (prompt's id, number).
    """
    rows, groups = [], {group: [] for group in GROUPS}
    for place, (item, own) in enumerate(propositions.items()):
        for picture in range(images_per_prompt):
            answered = {proposition.number: yes[item, picture, proposition.number] for proposition in own}
            holding = holds(own, answered)
            for proposition in own:
                rows.append((place, 100.0 * holding[proposition.number], 100.0 * answered[proposition.number]))
                groups["by_category"].append(proposition.category)
                groups["by_detail"].append(f"{proposition.category} - {proposition.detail}")
                groups["by_position"].append(bands[item, proposition.number])
    prompt, holding, answered = map(np.array, zip(*rows, strict=True))
    return Outcomes(prompt.astype(int), holding, answered), groups


def prompt_scores(found: Outcomes) -> np.ndarray:
    """Of each prompt the mean over its pictures of the share of propositions that hold, in percent."""
    # Every picture of a prompt has as many propositions, so that the mean of its means is that of all.
    return np.bincount(found.prompt, found.holds) / np.bincount(found.prompt)


def score(found: Outcomes, groups: Mapping[str, Sequence[str]], images_per_prompt: int) -> dict:
    """The scores, all in percent, 0 to 100, with 95% intervals over prompts.

    Args:
        found, groups: see `outcomes`.
        images_per_prompt: pictures of each prompt.

    Returns:
        score_percent, interval_percent: the mean over prompts, of the mean over their pictures, of the share of
            propositions that hold.
        by_category, by_detail, by_position: for each group the number of propositions, the share that holds, over all
            pictures, its interval, and the share answered yes whatever they depend on.
    """
    scores = prompt_scores(found)
    numbers = {"score_percent": float(scores.mean()), "interval_percent": mean_interval(scores)}
    for group, names in groups.items():
        numbers[group] = {}
        for name, chosen in _members(group, names).items():
            its = found[chosen]
            numbers[group][name] = {
                "propositions": int(chosen.sum()) // images_per_prompt,
                "holds_percent": float(its.holds.mean()),
                "interval_percent": mean_interval(its.holds, its.prompt),
                "yes_percent": float(its.yes.mean()),
            }
    return numbers


def _members(group: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """{name: which of the entries are in it}, in order."""
    names = np.array(names)
    order = BAND_NAMES if group == "by_position" else sorted(set(names.tolist()))
    return {name: names == name for name in order if (names == name).any()}


def compare_outcomes(found: Mapping[str, Outcomes], groups: Mapping[str, Sequence[str]]) -> list[dict]:
    """Every two encoders by score and by position, in points, paired by prompt; see `encoders.compare`."""
    bands = {f"holds, {name}": chosen for name, chosen in _members("by_position", groups["by_position"]).items()}

    def difference(a: Outcomes, b: Outcomes, name: str) -> dict:
        if name not in bands:
            return paired_difference(prompt_scores(a), prompt_scores(b))
        return paired_difference(a.holds, b.holds, a.prompt)

    values = {label: {"score": its, **{name: its[bands[name]] for name in bands}} for label, its in found.items()}
    return compare(values, difference)


def find_pictures(folder: str, items: Iterable[str], images_per_prompt: int) -> dict[str, list[Path]]:
    """The files of each prompt's pictures: one each in a folder of the prompt's name, or one file for all.

    Raises:
        UserError: a prompt has none, or not as many as it should.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"The folder of pictures {folder!r} is not there.")
    singles: dict[str, Path] = {}
    for path in sorted(root.iterdir()):
        if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp") and not path.name.startswith("."):
            singles.setdefault(path.stem, path)
    found, faults = {}, []
    for item in items:
        if (root / item).is_dir():
            files = sorted(path for path in (root / item).iterdir() if not path.name.startswith("."))
            if len(files) != images_per_prompt:
                faults.append(f"the folder {item} holds {len(files)} files")
        elif item in singles and images_per_prompt in (1, GRID**2):
            files = [singles[item]]
        else:
            faults.append(f"there is neither a folder {item} nor a file {item}.png")
            continue
        found[item] = files
    if faults:
        raise UserError(
            f"{folder!r} does not hold the pictures of {len(faults)} prompts: {faults[0]}. Each prompt needs "
            f"images_per_prompt={images_per_prompt} pictures: one file each in a folder named as the prompt, or (for "
            "4) one file with a grid of 2 x 2."
        )
    return found


def open_picture(files: Sequence[Path], index: int, images_per_prompt: int) -> Image.Image:
    """One picture as RGB: a file, or a quarter of a grid, which is read line by line as the published script does.

    Raises:
        UserError: it cannot be read, or a grid's sides are odd.
    """
    single = len(files) == 1 and images_per_prompt > 1
    path = files[0] if single else files[index]
    try:
        image = open_image(path)
        if not single:
            return image
        if image.width % GRID or image.height % GRID:
            raise UnreadableImage(f"{image.width} x {image.height} pixels are no grid of {GRID} x {GRID} pictures")
    except UnreadableImage as error:
        raise UserError(
            f"The picture {str(path)!r} cannot be used: {reason(error)}. Draw it again; the answers so far are kept."
        ) from error
    width, height = image.width // GRID, image.height // GRID
    row, column = divmod(index, GRID)
    return image.crop((column * width, row * height, (column + 1) * width, (row + 1) * height))


class VqaModel:
    """A ViLT or a BLIP of transformers that answers questions about a picture.

    Args:
        model: its folder or hub id.
        device: where it runs.

    Raises:
        UserError: it cannot be loaded, lacks weights, or is of another kind.
    """

    def __init__(self, model: str, device: torch.device):
        try:
            if not os.path.isdir(model) and not may_be_hub_id(model):
                raise ValueError("it is not there")
            self.processor = AutoProcessor.from_pretrained(model)
            # Files that are no safetensors are read with weights_only=True.
            loaded, info = AutoModelForVisualQuestionAnswering.from_pretrained(
                model, dtype=torch.float32, output_loading_info=True
            )
            if info["missing_keys"]:
                missing = sorted(info["missing_keys"])
                raise ValueError(f"it lacks {len(missing)} of the model's weights, such as {missing[0]}")
            kind = loaded.config.model_type
            if kind not in ("vilt", "blip"):
                raise ValueError(f"it is a {kind}, which is asked in another way")
        except Exception as error:  # whatever a wrong folder or a failed download raises
            raise UserError(
                f"The VQA model {model!r} could not be loaded: {reason(error)}. Give --vqa a folder or hub id of a "
                "ViLT or BLIP for visual question answering, such as dandelin/vilt-b32-finetuned-vqa or "
                "Salesforce/blip-vqa-base, with its processor's files."
            ) from error
        self.model, self.device = loaded.to(device).eval(), device

    def __call__(self, image: Image.Image, questions: Sequence[str]) -> list[str]:
        """An answer to each question, in lower case, without a full stop; the same whatever is asked with it."""
        # By length, because transformers' BLIP reads padding as if it were part of the question.
        groups: dict[int, list[int]] = {}
        for index, question in enumerate(questions):
            groups.setdefault(len(self.processor.tokenizer(question)["input_ids"]), []).append(index)
        answers = [""] * len(questions)
        for group in groups.values():
            for index, answer in zip(group, self._answer(image, [questions[i] for i in group]), strict=True):
                answers[index] = answer.strip().lower().rstrip(".")
        return answers

    @torch.inference_mode()
    def _answer(self, image: Image.Image, questions: list[str]) -> list[str]:
        """The answers to questions of one length."""
        images = [image] * len(questions)
        inputs = self.processor(images=images, text=questions, truncation=True, return_tensors="pt").to(self.device)
        if self.model.config.model_type == "vilt":
            # It looks at its patches in a random order, and with that rounds differently.
            with torch.random.fork_rng():
                torch.manual_seed(0)
                best = self.model(**inputs).logits.argmax(dim=-1).tolist()
            return [self.model.config.id2label[index] for index in best]
        ids = self.model.generate(**inputs, max_new_tokens=10, do_sample=False, num_beams=1)
        return self.processor.batch_decode(ids, skip_special_tokens=True)


class Answers:
    """Answers in a JSONL file that grows by whole lines. The first line says what they were given with.

    Args:
        file: where they are kept.
        settings: everything that decides an answer.

    Raises:
        UserError: the file holds answers given with other settings, or something else.
    """

    def __init__(self, file: Path, settings: dict):
        self.file, self.given = file, {}
        self._header = json.dumps({"settings": settings}) + "\n"
        if not file.exists() or not self._read(settings):
            write_text(file, self._header)

    def _read(self, settings: dict) -> bool:
        """Whether there is a first line; what follows is taken in, and half a line at the end cut off."""
        content = self.file.read_bytes()
        if self._header.encode().startswith(content):  # the process was killed before it had written as much
            return False
        whole = content[: content.rfind(b"\n") + 1]
        try:
            before, *answers = map(json.loads, whole.splitlines())
            before = before["settings"]
            for answer in answers:
                self.given[answer["item"], answer["picture"], answer["proposition"]] = answer["answer"]
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise UserError(
                f"{str(self.file)!r} holds something other than answers ({reason(error)}). Give another output, or "
                "remove it."
            ) from error
        if before != settings:
            raise UserError(
                f"The answers in {str(self.file)!r} were given with other settings: "
                f"{changed_settings(before, settings)}. Give another output, go back to those settings, or remove it."
            )
        if len(whole) < len(content):  # the process was killed while it wrote
            os.truncate(self.file, len(whole))
        return True

    def add(self, answers: Mapping[Key, str]) -> None:
        """Appends answers, on the disk before this returns."""
        lines = [
            json.dumps({"item": item, "picture": picture, "proposition": number, "answer": answer}, ensure_ascii=False)
            for (item, picture, number), answer in answers.items()
        ]
        with open(self.file, "a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        self.given |= answers


def ask_missing(
    answers: Answers,
    bench: DpgBench,
    pictures: Mapping[str, list[Path]],
    config: DpgBenchConfig,
    load: Callable[[], Ask],
    title: str,
) -> None:
    """Puts the questions that have no answer yet; `load` makes what answers them, if there are any.

    Args:
        title: for the progress bar.
    """
    missing: dict[tuple[str, int], list[Proposition]] = {}
    for item, own in bench.propositions.items():
        for picture in range(config.images_per_prompt):
            left = [proposition for proposition in own if (item, picture, proposition.number) not in answers.given]
            if left:
                missing[item, picture] = left
    if not missing:
        return
    ask = load()
    for (item, picture), own in tqdm(missing.items(), desc=f"ask, {title}"):
        image = open_picture(pictures[item], picture, config.images_per_prompt)
        for start in range(0, len(own), config.batch_size):
            part = own[start : start + config.batch_size]
            texts = ask(image, [proposition.question for proposition in part])
            answers.add(
                {(item, picture, proposition.number): text for proposition, text in zip(part, texts, strict=True)}
            )


def plot(encoders: dict[str, dict]) -> Figure:
    """The share that holds with its interval, by category and by position, one colour an encoder."""
    # A Figure of its own draws with Agg and leaves pyplot alone.
    figure = Figure(figsize=(12, 4.2), layout="constrained", dpi=150)
    titles = {"by_category": "by category", "by_position": "by position in the prompt (CLIP tokens)"}
    width = 0.8 / len(encoders)
    for axes, (group, title) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        for index, (label, numbers) in enumerate(encoders.items()):
            values = np.array([its["holds_percent"] for its in numbers[group].values()])
            ends = np.array([its["interval_percent"] for its in numbers[group].values()]).T  # [2, groups]
            places = np.arange(len(values)) + (index - (len(encoders) - 1) / 2) * width
            # A skewed sample's interval need not hold its mean to the last bit.
            error = np.maximum([values - ends[0], ends[1] - values], 0)
            bars = axes.bar(places, values, width, yerr=error, capsize=2, label=label, error_kw={"linewidth": 0.8})
            axes.bar_label(bars, fmt="%.0f" if len(encoders) > 1 else "%.1f", fontsize=7, padding=2)
        axes.set_xticks(np.arange(len(values)), list(numbers[group]), rotation=30)
        axes.set(title=title, ylim=(0, 115))
    figure.axes[0].set_ylabel("propositions that hold (%), 95% intervals")
    if len(encoders) > 1:
        figure.axes[1].legend(fontsize="small", loc="upper right")
    return figure


def evaluate_dpg_bench(config: DpgBenchConfig) -> dict:
    """DPG-Bench on pictures that are there, or drawn with one encoder after the other; writes what it finds and prints
    tables.

    A run that was killed draws only what is missing and asks only what has no answer yet. Started by `accelerate
    launch` it draws with several processes, one a GPU, of which the main one asks.

    Returns:
        What `dpg_bench.json` holds: settings, versions, digests, prompts, propositions; by encoder (or by the name of
        the folder of pictures) the scores of `score`, how prompts were read, digest of the pictures; the encoders
        compared in points; notes, the rows left out, seconds. In processes other than the main one, nothing.

    Raises:
        UserError: a setting cannot be used, a picture is missing or broken, or the answers or pictures in the output
            folder were made with other settings.
    """
    check_output(config.output)
    check_batch_size(config.batch_size)
    if not 1 <= config.images_per_prompt <= MOST_IMAGES:
        raise UserError(
            f"images_per_prompt={config.images_per_prompt} is not allowed. Give a whole number from 1 to {MOST_IMAGES}."
        )
    if (config.images is None) == (config.base is None) or (config.base is None) != (not config.encoders):
        raise UserError(
            f"images is {config.images!r}, base {config.base!r} and encoders {config.encoders}. Give either --images, "
            "pictures that are there, or --base and --encoders to draw them with."
        )
    return _DpgBench(config).run()


class _DpgBench:
    """One evaluation. What is read and asked is in the main process alone."""

    def __init__(self, config: DpgBenchConfig):
        self.config, self.output = config, Path(config.output)
        self.settings = None
        if config.base is not None:
            check_encoders(config.encoders)
            self.settings = DrawingSettings.of(config)
        self.processes = Processes(config.device)
        self.encoders = dict(zip(labels(config.encoders), config.encoders, strict=True))
        names = folder_names(list(self.encoders))
        self.folders = {label: self.output / "pictures" / name for label, name in names.items()}
        self.answers = {label: self.output / "answers" / f"{name}.jsonl" for label, name in names.items()}
        if config.images is not None:
            label = Path(os.path.realpath(config.images)).name
            self.folders, self.answers = {label: Path(config.images)}, {label: self.output / "answers.jsonl"}

    def run(self) -> dict:
        started = time.monotonic()
        with self.processes.only_main_prints():
            digests = {"base": None, "encoders": {}}
            subjects, data = self.processes.from_main(self._read)
            if self.settings is not None:
                drawing = Drawing(self.settings, self.processes, data)
                drawing.check(self.encoders.values(), self.folders.values(), subjects)
            with self.processes.alone_in(self.output):
                if self.settings is not None:
                    for label, encoder in self.encoders.items():
                        drawing.draw(encoder, self.folders[label], subjects, label)
                    digests = drawing.digests
                    del drawing  # and with it the models, whose memory the VQA model may need
                return self._report(digests, started) if self.processes.is_main else {}

    def _read(self) -> tuple[list[Subject], str]:
        """What to draw, and the digest of the prompts."""
        config = self.config
        self.bench = read_dpg_bench(config.data)
        print_left_out(self.bench.bad)
        if config.images is not None:
            find_pictures(config.images, self.bench.prompts, config.images_per_prompt)
        elif not all(file.exists() for file in self.answers.values()):
            self._ask  # noqa: B018 - loaded before hours of drawing, not after
        subjects = [
            Subject(f"{item}/{number}", prompt, number)
            for item, prompt in self.bench.prompts.items()
            for number in range(config.images_per_prompt)
        ]
        return subjects, self.bench.digest

    @cached_property
    def _ask(self) -> Ask:
        return VqaModel(self.config.vqa, self.processes.device)

    def _answered(self, label: str, vqa: str) -> tuple[dict[Key, bool], str]:
        """Whether each answer is yes, and the digest of the pictures."""
        config = self.config
        pictures = find_pictures(str(self.folders[label]), self.bench.prompts, config.images_per_prompt)
        of_pictures = _pictures_digest(pictures)
        settings = {
            "data": self.bench.digest,
            "pictures": of_pictures,
            "vqa": vqa,
            "images_per_prompt": config.images_per_prompt,
        }
        answers = Answers(self.answers[label], settings)
        ask_missing(answers, self.bench, pictures, config, lambda: self._ask, label)
        return {key: answer == "yes" for key, answer in answers.given.items()}, of_pictures

    def _report(self, digests: dict, started: float) -> dict:
        config, bench = self.config, self.bench
        vqa = path_digest(config.vqa) if os.path.exists(config.vqa) else config.vqa
        tokenizer = clip_tokenizer(77)
        bands = {
            (item, proposition.number): band(token_position(proposition.words, bench.prompts[item], tokenizer))
            for item, own in bench.propositions.items()
            for proposition in own
        }
        found, encoders, groups = {}, {}, {}
        for label, folder in self.folders.items():
            yes, pictures = self._answered(label, vqa)
            found[label], groups = outcomes(bench.propositions, yes, config.images_per_prompt, bands)
            drawn = how_drawn(folder) if self.settings is not None else {}
            encoders[label] = score(found[label], groups, config.images_per_prompt) | drawn | {"pictures": pictures}
        of_encoders = {
            label: digests["encoders"][name] or digests["base"] for label, name in self.encoders.items()
        } or {label: its["pictures"] for label, its in encoders.items()}
        report = write_report(
            NAME,
            config,
            digests={"data": bench.digest, "vqa": vqa, "base": digests["base"], "encoders": of_encoders},
            left_out=bench.bad,
            seconds=time.monotonic() - started,
            drawing=self.settings and asdict(self.settings),
            prompts=len(bench.prompts),
            propositions=sum(map(len, bench.propositions.values())),
            encoders=encoders,
            compared=compare_outcomes(found, groups),
            notes=[*NOTES, f"Answers are by {Path(config.vqa).name}."],
        )
        show(report, tables(report), figures(report))
        return report


def _pictures_digest(pictures: Mapping[str, list[Path]]) -> str:
    total = hashlib.sha256()
    for item, files in sorted(pictures.items()):
        total.update(f"{item}\0{' '.join(map(sha256, files))}\n".encode())
    return total.hexdigest()


def tables(report: dict) -> list[Table]:
    """A report's shares by category and by position, and the encoders compared."""
    encoders = report["encoders"]
    first = next(iter(encoders.values()))
    whole = ["all prompts", report["propositions"]]
    for its in encoders.values():
        whole += [_cell(its["score_percent"], its["interval_percent"]), None]
    rows = [whole]
    for group in ("by_category", "by_position"):
        for name, numbers in first[group].items():
            row = [name, numbers["propositions"]]
            for its in encoders.values():
                values = its[group][name]
                row += [_cell(values["holds_percent"], values["interval_percent"]), values["yes_percent"]]
            rows.append(row)
    columns = [column for label in encoders for column in (f"{label}: hold", "yes")]
    return [Table(["DPG-Bench, percent", "propositions", *columns], rows), *compared_tables(report["compared"])]


def _cell(value: float, ends: Sequence[float]) -> str:
    return f"{value:.1f} ({interval(ends)})"


def figures(report: dict) -> dict[str, Figure]:
    """The picture of a report, by its file's name."""
    return {f"{NAME}.png": plot(report["encoders"])}
