"""The published files of DPG-Bench: prompts and propositions, and where in its prompt a proposition is mentioned."""

import csv
import io
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from debias_diffusion.data.bad_records import BadRecord
from debias_diffusion.errors import UserError, reason
from debias_diffusion.files import bytes_digest, open_regular, sha256
from debias_diffusion.tokens import clean

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
# Where the bands of positions start. SOT is at 0; 20 is the first position that stretching moves; with a context length
# of 77 EOT is at 76, so text from there on is cut.
BANDS = (1, 20, 40, 60, 76, 112)
UNPLACED = "not in the prompt"
BAND_NAMES = (*(f"{start}-{end - 1}" for start, end in pairwise(BANDS)), f"{BANDS[-1]} and on", UNPLACED)
MOST_CHARACTERS = 20_000  # of a prompt, as in `generate`


@dataclass(frozen=True)
class Proposition:
    """One statement of a prompt.

    Attributes:
        item: the prompt's id, the name of its file.
        number: unique within the prompt.
        parents: the numbers of the propositions it depends on.
        category, detail: as published, such as attribute and color.
        question: for the VQA model.
        words: that name it; see `proposition_words`.
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
        propositions: by the prompt's id.
        bad: the bad rows and prompts.
        digest: of all files.
    """

    prompts: dict[str, str]
    propositions: dict[str, list[Proposition]]
    bad: list[BadRecord]
    digest: str


def read_dpg_bench(data: str) -> DpgBench:
    """Reads `prompts/*.txt` and every row of `dpg_bench.csv`.

    Bad rows, and rows that depend on them, are skipped and reported in `bad`.

    Raises:
        UserError: a file is missing or has other columns, or no row can be used.
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
        raise UserError(f"{str(file)!r} has no usable row. The first: {bad[0] if bad else 'it has no rows'}.")
    lines = [sha256(file), *(f"{item}\0{sha256(path)}\n" for item, path in texts.items())]
    return DpgBench(prompts, propositions, bad, bytes_digest(line.encode() for line in lines))


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
    """The propositions of each prompt, in the order of the rows, and the bad rows. Row 1 follows the header.

    A dependency of 0 is none.
    """
    keywords: dict[str, list[str]] = {}
    for row in rows:
        keywords.setdefault(row["item_id"].strip(), []).append(row["keywords"])
    items: dict[str, dict[int, tuple[int, Proposition]]] = {}
    bad = []
    for place, row in enumerate(rows, 1):
        item = row["item_id"].strip()
        of_row = len(set(keywords[item])) > 1 or len(keywords[item]) == 1  # not the whole prompt's
        try:
            proposition = _parse(row, item, row["keywords"] if of_row else "")
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
    """Removes the propositions whose dependencies are missing or circular."""
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
    detail = "dependency {} is missing or circular"
    return [
        BadRecord(f"row {place}", "unusable dependency", detail.format(list(proposition.parents)))
        for place, proposition in dropped
    ]


def proposition_words(keywords: str, published_tuple: str) -> tuple[str, ...]:
    """The words that name a proposition, in lower case: its keywords, or those in the brackets of its tuple.

    >>> proposition_words("", "attribute - color (truck, Red)")
    ('truck', 'red')
    """
    inside = re.search(r"\((.*)\)", published_tuple, re.DOTALL)
    return _words(keywords) or _words(inside[1] if inside else "")


def _words(text: str) -> tuple[str, ...]:
    # The s of a lion's mane is no word.
    return tuple(word for word in re.findall(r"\w+", clean(text)) if word != "s")


def token_position(words: Iterable[str], prompt: str, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The earliest position in the encoded prompt at which a proposition is complete: SOT is 0, the first word 1.

    Each word counts where it is first mentioned, as a whole word, in either case, with or without a plural's s or es;
    the position is that of the last of them, because a red truck needs both words. Words that are not in the prompt,
    which is cleaned here like captions, are ignored; None if none is.
    """
    prompt = clean(prompt)
    matches = [re.search(rf"(?<!\w){re.escape(word.lower())}(?:s|es)?(?!\w)", prompt) for word in words]
    starts = [match.start() for match in matches if match]
    return 1 + len(tokenizer.tokenize(prompt[: max(starts)], verbose=False)) if starts else None


def band(position: int | None) -> str:
    """The name of a position's band."""
    if position is None:
        return UNPLACED
    return BAND_NAMES[bisect_right(BANDS, position) - 1]
