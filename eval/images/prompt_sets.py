"""Sets of prompts with questions about what an image of each should show, and where in its prompt a question stands.

Published sets are read from the files of their authors; nothing is downloaded.
"""

import csv
import io
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any, NamedTuple

from debias_diffusion.data.bad_records import BadRecord, leave_out
from debias_diffusion.data.captions import fold, parse_object, text_fault
from debias_diffusion.data.images import open_image
from debias_diffusion.data.sources import is_toy_scenes
from debias_diffusion.data.toy_scenes import family, read_toy_scenes, toy_scene
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.files import bytes_digest, open_regular, read_file, read_json
from debias_diffusion.text.sentences import sentence_ends
from debias_diffusion.text.tokens import clean, clip_tokenizer

from ..judge import object_question

# Where the bands of positions start. SOT is at 0; 20 is the first position that stretching moves; with a context length
# of 77 EOT is at 76, so text from there on is cut.
BANDS = (1, 20, 40, 60, 76, 112, 172)
BAND_NAMES = (*(f"{start}-{end - 1}" for start, end in pairwise(BANDS)), f"{BANDS[-1]} and on")
_DPG = ("item_id", "proposition_id", "dependency", "category_broad", "tuple", "question_natural_language")
_tokenizer = cache(partial(clip_tokenizer, 77))
# Words of questions that place nothing in a prompt.
_FUNCTION_WORDS = frozenset(
    "a an and any are as at be by do does for from has have how if image in is it many no not of on only or picture "
    "present s show shown that the there this to what which with".split()  # s: of a lion's mane
)


class Question(NamedTuple):
    """A question whose answer is yes for an image that follows its prompt.

    Attributes:
        text: for the judge.
        sentence: of the prompt, from 1; None if the prompt does not mention what is asked.
        position: of its last word in the encoded prompt: SOT is 0, the first word 1; None as for `sentence`.
        category: as published; "" for none.
        number: unique within its prompt.
        parents: the numbers of the questions that must be answered with yes too.
    """

    text: str
    sentence: int | None
    position: int | None
    category: str = ""
    number: int = 0
    parents: tuple[int, ...] = ()


class Prompt(NamedTuple):
    """A prompt; its name is that of its images' files, `group` the one that it is resampled with."""

    name: str
    text: str
    questions: tuple[Question, ...]
    group: str


class PromptSet(NamedTuple):
    """The usable prompts, with a digest, and the bad records."""

    prompts: list[Prompt]
    bad: list[BadRecord]
    short: Sequence[Prompt] = ()  # of scenes told twice, the short prompt of each of `prompts`, which are the long ones

    @property
    def digest(self) -> str:
        return bytes_digest([repr([*self.prompts, *self.short]).encode("utf-8", "surrogatepass")])


class Places:
    """Where something stands in a prompt."""

    def __init__(self, text: str):
        self.text, self.ends = text, sentence_ends(text)

    def at(self, start: int) -> tuple[int, int]:
        """(sentence, from 1, position in the encoded prompt) of the word that starts at this character."""
        tokens = _tokenizer().tokenize(clean(self.text[:start]), verbose=False)
        return bisect_right(self.ends, start) + 1, 1 + len(tokens)

    def of_words(self, text: str) -> tuple[int | None, int | None]:
        """The place of the last of a text's words, as a red truck needs both; (None, None) if none is in the prompt.

        Exact if the prompt holds the text word for word, in either case. Else each word counts where it first stands,
        as a whole word, singular or plural.
        """
        last, whole = re.search(r"\w+\W*$", text), rf"(?<!\w){re.escape(text)}(?!\w)"
        if last and (stands := re.search(whole, self.text, re.IGNORECASE)):
            return self.at(stands.start() + last.start())
        words = set(re.findall(r"\w+", text.lower())) - _FUNCTION_WORDS
        singulars = (
            {word, re.sub("s$", "", word), re.sub("es$", "", word), re.sub("ies$", "y", word)} for word in words
        )
        forms = (rf"(?<!\w)(?:{'|'.join(found)})(?:s|es)?(?!\w)" for found in singulars)
        starts = [match.start() for form in forms if (match := re.search(form, self.text, re.IGNORECASE))]
        return self.at(max(starts)) if starts else (None, None)

    def sentences(self) -> Iterator[Question]:
        """A question about each sentence, in VQAScore's words (Lin et al. 2024), placed at its last word."""
        for start, end in pairwise([0, *self.ends, len(self.text)]):
            if words := [*re.finditer(r"\w+", self.text[start:end])]:
                yield Question(statement(self.text[start:end]), *self.at(start + words[-1].start()))


def band(position: int) -> str:
    """The name of a position's band."""
    return BAND_NAMES[bisect_right(BANDS, position) - 1]


def statement(text: str) -> str:
    """The question whether an image shows what a text says."""
    return f'Does this image show "{fold(text)}"?'


def read_prompt_set(name: str, limit: int | None = None) -> PromptSet:
    """The first `limit` usable prompts of a set.

    Args:
        name: as `options.FollowingConfig.prompts`.

    Raises:
        UserError: there is no such set, or no prompt in it that can be used.
        OSError: a file cannot be read.
    """
    published, _, path = name.partition(":")
    bad: list[BadRecord] = []
    if is_toy_scenes(name):
        short = re.sub("^toy/long-", "toy/short-", name)
        return PromptSet(_toy(name, limit), bad, _toy(short, limit) if short != name else ())
    if published in PUBLISHED and path:
        read, parse = PUBLISHED[published]
        entries = read(Path(path))
    elif name.endswith((".txt", ".jsonl")) and Path(name).exists():
        entries, parse = _lines(Path(name)), _plain if name.endswith(".txt") else _own
    else:
        raise UserError(
            f"There is no prompt set {name!r}. Give a file .txt or .jsonl, toy/test, or one of "
            f"{', '.join(f'{known}:PATH' for known in PUBLISHED)} with the place of its authors' files."
        )
    prompts, short = [], []
    for number, (where, entry) in enumerate(entries):
        if len(prompts) == limit:
            break
        with leave_out(where, bad), explain_failure("unusable prompt"):
            text, asked, *short_one = parse(entry, bad)
            told = read_prompt(f"{number:05}", text, asked)
            short += [read_prompt(f"{number:05}-short", *short_one)] if short_one else []
            prompts.append(told)
    if not prompts:
        raise UserError(f"{name!r} holds no usable prompt. The first fault: {bad[0] if bad else 'it is empty'}.")
    return PromptSet(prompts, bad, short)


def read_prompt(name: str, text: str, asked: Iterable[tuple] | None = None) -> Prompt:
    """A prompt with the questions of its file, or one about each sentence. Raises ValueError if it cannot be used."""
    if fault := text_fault(text) or ("" if clean(text) else "is empty"):  # as in `generate`
        raise ValueError(f"it {fault}")
    places = Places(text.strip())
    rows = ((fold(ask), *places.of_words(words), str(kind), *further) for ask, words, kind, *further in asked or ())
    questions = [*places.sentences()] if asked is None else [*starmap(Question, rows)]
    if not questions or any(not one.text or text_fault(one.text + one.category) for one in questions):
        raise ValueError("it has no questions, or one that is empty or holds what is no character")
    return Prompt(name, places.text, tuple(questions), name)


def ask_sentences(judge: Callable, image: str, prompt: str) -> list[tuple[str, float | None]]:
    """Each sentence of an image file's prompt, and its p(yes) or None. Raises UserError where one cannot be used."""
    with explain_failure(f"The prompt of {image!r} cannot be used"):
        _, text, questions, _ = read_prompt("", prompt)
    with explain_failure(f"The image {image!r} cannot be used"):
        opened = open_image(image)
    answers = judge(opened, [question.text for question in questions])
    sentences = [fold(text[start:end]) for start, end in pairwise([0, *sentence_ends(text), len(text)])]
    return [(sentences[one.sentence - 1], p) for one, p in zip(questions, answers, strict=True)]


def _toy(name: str, limit: int | None) -> list[Prompt]:
    """A question about each object, in the place of the sentence that first mentions it."""
    prompts = []
    for record in read_toy_scenes(name)[0].records[:limit]:
        scene, caption = toy_scene(record.image)
        mentions, of_sentences = caption.first_mentions(), [*Places(caption.text).sentences()]
        stand = [of_sentences[mentions[thing.place]] for thing in scene.things]
        asked = tuple(one._replace(text=object_question(thing)) for one, thing in zip(stand, scene.things, strict=True))
        prompts.append(Prompt(record.image.replace("/", "-"), caption.text, asked, family(record.image)))
    return prompts


# ---- files: their entries, each with its place in words; and what an entry says, the prompt and its questions, of each
# the text, the words that place it, the category, of DPG-Bench number and parents; or None, which asks its sentences.
# Of a scene that is told twice, the same of its short prompt behind them.


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    yield from ((f"line {at}", line) for at, line in enumerate(read_file(path).splitlines(), 1) if line.strip())


def _plain(line: bytes, bad: list[BadRecord]) -> tuple[str, None]:
    return line.decode("utf-8-sig"), None


def _own(line: bytes, bad: list[BadRecord]) -> tuple[str, list | None]:
    entry = parse_object(line)
    if not isinstance(texts := entry.get("questions"), list | None):
        raise ValueError(f"questions must be a list, got {str(texts)[:80]}")
    return entry["prompt"], texts and [(text, text, "") for text in texts]


def _geneval2(line: bytes, bad: list[BadRecord]) -> tuple[str, list]:
    """An answer other than yes becomes part of the question."""
    entry = parse_object(line)
    asked = [
        (text if answer.lower() == "yes" else f'{text} Is the answer "{answer}"?', f"{text} {answer}", skill)
        for (text, answer), skill in zip(entry["vqa_list"], entry["skills"], strict=True)
    ]
    return entry["prompt"], asked


def _longbench(line: bytes, bad: list[BadRecord]) -> tuple[str, None]:
    """The set's labels are graded from 1 to 5, so its sentences are asked."""
    return parse_object(line)["instruction"], None


def _corebench_entries(path: Path) -> Iterator[tuple[str, dict]]:
    for file in sorted(path.glob("*.json")):  # one for each of twelve dimensions
        yield from ((f"{file.name}, {name}", entry) for name, entry in read_json(file).items())


def _corebench(entry: dict, bad: list[BadRecord]) -> tuple[str, list]:
    asked = ((question["question"], entry["Sub Class"]) for question in entry["Checklist"])
    return entry["Prompt"], [(text, text, category) for text, category in asked]


def _dpg_entries(path: Path) -> Iterator[tuple[str, tuple]]:
    """A file for each prompt, with its rows of `dpg_bench.csv`. The published script skips the first row."""
    rows: dict[str, list] = {file.name: [] for file in sorted((path / "prompts").glob("*.txt"))}
    for number, row in enumerate(csv_rows(path / "dpg_bench.csv", _DPG), 1):
        rows.setdefault(f"{row['item_id'].strip()}.txt", []).append((f"row {number}", row))
    yield from ((f"prompts/{name}", (path / "prompts" / Path(name).name, found)) for name, found in rows.items())


def _dpg(entry: tuple, bad: list[BadRecord]) -> tuple[str, list]:
    """Without questions that depend on what is missing, or on each other."""
    file, rows = entry
    numbered: dict[int, tuple] = {}
    for where, row in rows:
        with leave_out(where, bad), explain_failure("unusable row"):
            number = int(row["proposition_id"])
            parents = tuple(int(part) for part in row["dependency"].split(",") if int(part) != 0)
            text, words = row["question_natural_language"].strip(), row["tuple"].partition("(")[2]
            if not text or number in numbered:
                raise ValueError(f"the question is {text!r}, proposition_id {number}, which must be another for each")
            numbered[number] = where, (text, words or text, row["category_broad"].strip(), number, parents)
    grounded: set[int] = set()
    while more := {at for at, (_, asked) in numbered.items() if grounded.issuperset(asked[-1])} - grounded:
        grounded |= more
    for where, asked in (numbered.pop(number) for number in sorted(numbered.keys() - grounded)):
        bad.append(BadRecord(where, "unusable dependency", f"{[*asked[-1]]} is missing or circular"))
    return read_file(file).decode("utf-8", "replace"), [asked for _, asked in numbered.values()]


def _unigenbench_entries(path: Path) -> Iterator[tuple[str, list[dict]]]:
    """The rows of each scene in both files, the long prompt's first."""
    columns, files = ("index", "prompt_en", "sub_dims_en"), ("test_prompts_en_long.csv", "test_prompts_en.csv")
    long, short = ({row["index"]: row for row in csv_rows(path / file, columns)} for file in files)
    yield from ((f"index {index}", [long.get(index, {}), short.get(index, {})]) for index in long | short)


def _unigenbench(entry: list[dict], bad: list[BadRecord]) -> list:
    """Its test points are no questions, so the judge is asked about each as about a sentence."""
    told: list = []
    for row in entry:
        about = parse_object(row["sub_dims_en"])
        points = zip(about["Testpoint Description"], about["Testpoints"], strict=True)
        told += row["prompt_en"], [(statement(point), point, category) for point, category in points]
    return told


def csv_rows(file: Path, columns: Iterable[str]) -> list[dict[str, str]]:
    """The rows of a CSV file. Raises UserError if it is none, or lacks a column."""
    with (
        explain_failure(f"{str(file)!r} is no CSV file in UTF-8", "Download it again."),
        io.TextIOWrapper(open_regular(file), encoding="utf-8-sig", newline="") as lines,
    ):
        reader = csv.DictReader(lines, restval="")
        if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
            raise UserError(f"{str(file)!r} lacks the column {missing[0]}. Its columns must be {', '.join(columns)}.")
        return list(reader)


PUBLISHED: dict[str, tuple[Callable[[Path], Iterable], Callable[[Any, list[BadRecord]], tuple]]] = {
    "dpg": (_dpg_entries, _dpg),  # DPG-Bench (Hu et al. 2024, ELLA): the folder `dpg_bench`
    "corebench": (_corebench_entries, _corebench),  # T2I-CoReBench (Li et al. 2025): the folder `data`
    "geneval2": (_lines, _geneval2),  # GenEval 2 (Kamath et al. 2025): `geneval2_data.jsonl`
    "longbench": (_lines, _longbench),  # LongBench-T2I (Zhou et al. 2025): `instruction.jsonl`
    "unigenbench": (_unigenbench_entries, _unigenbench),  # UniGenBench++ (Wang et al. 2025): the folder `data`
}
