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

from debias_diffusion.data.bad_records import BadRecord, leave_out
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.files import bytes_digest, open_regular, read_file, sha256
from debias_diffusion.text.tokens import clean, clip_tokenizer

COLUMNS = (
    *("item_id", "text", "keywords", "proposition_id", "dependency"),
    *("category_broad", "category_detailed", "tuple", "question_natural_language"),
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
        number: unique within its prompt.
        parents: the numbers of the propositions it depends on.
        category, detail: as published, such as attribute and color.
        question: for the VQA model.
        position: the name of the band of its position in the prompt.
    """

    number: int
    parents: tuple[int, ...]
    category: str
    detail: str
    question: str
    position: str


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
        UserError: the CSV has other columns, or no row can be used.
        OSError: a file cannot be read.
    """
    file, folder = Path(data, "dpg_bench.csv"), Path(data, "prompts")
    prompts, bad, digests = {}, [], [sha256(file)]
    for path in sorted(folder.glob("*.txt")):
        with leave_out(f"prompts/{path.name}", bad):
            content = read_file(path)
            digests.append(f"{path.stem}\0{bytes_digest([content])}\n")
            text = content.decode("utf-8", "replace").strip()
            if not 0 < len(text) <= MOST_CHARACTERS:
                kind = "too long prompt" if text else "empty prompt"
                raise ValueError(f"{kind}: it has {len(text):,} characters, and 1 to {MOST_CHARACTERS:,} are read")
            prompts[path.stem] = text
    propositions, bad_rows = parse_rows(_read_rows(file), prompts)
    bad += bad_rows
    for item in [item for item in prompts if item not in propositions]:
        bad.append(BadRecord(f"prompts/{item}.txt", "prompt without propositions", "no usable row names it"))
        del prompts[item]
    if not propositions:
        raise UserError(f"{str(file)!r} has no usable row. The first: {bad[0] if bad else 'it has no rows'}.")
    return DpgBench(prompts, propositions, bad, bytes_digest(digest.encode() for digest in digests))


def _read_rows(file: Path) -> list[dict[str, str]]:
    failure = f"{str(file)!r} is no CSV file in UTF-8"
    with (
        explain_failure(failure, "Download it again."),
        io.TextIOWrapper(open_regular(file), encoding="utf-8-sig", newline="") as lines,
    ):
        reader = csv.DictReader(lines, restval="")
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise UserError(f"{str(file)!r} lacks the column {missing[0]}. Its columns must be {', '.join(COLUMNS)}.")
        return list(reader)


def parse_rows(
    rows: Sequence[Mapping[str, str]], prompts: Mapping[str, str]
) -> tuple[dict[str, list[Proposition]], list[BadRecord]]:
    """The propositions of each prompt, in the order of the rows, and the bad rows. Row 1 follows the header.

    A dependency of 0 is none.
    """
    keywords: dict[str, list[str]] = {}
    for row in rows:
        keywords.setdefault(row["item_id"].strip(), []).append(row["keywords"])
    by_item: dict[str, dict[int, tuple[int, Proposition]]] = {}
    bad, tokenizer = [], clip_tokenizer(77)
    for place, row in enumerate(rows, 1):
        item = row["item_id"].strip()
        of_row = len(set(keywords[item])) > 1 or len(keywords[item]) == 1  # not the whole prompt's
        with leave_out(f"row {place}", bad), explain_failure("unusable row"):
            if item not in prompts:
                raise ValueError(f"there is no prompts/{item}.txt")
            proposition = _parse(row, row["keywords"] if of_row else "", prompts[item], tokenizer)
            if proposition.number in by_item.get(item, ()):
                raise ValueError(f"prompt {item} has a proposition {proposition.number} already")
            by_item.setdefault(item, {})[proposition.number] = (place, proposition)
    for numbered in by_item.values():
        bad += _drop_ungrounded(numbered)
    return {item: [proposition for _, proposition in rows.values()] for item, rows in by_item.items() if rows}, bad


def _parse(row: Mapping[str, str], keywords: str, prompt: str, tokenizer: PreTrainedTokenizerBase) -> Proposition:
    try:
        number = int(row["proposition_id"])
        parents = tuple(int(part) for part in row["dependency"].split(",") if int(part) != 0)
    except ValueError:
        given = f"proposition_id {row['proposition_id']!r}, dependency {row['dependency']!r}"
        raise ValueError(f"{given}: whole numbers are needed, in the dependency with commas between them") from None
    question = row["question_natural_language"].strip()
    if not question or number < 1:
        raise ValueError("there is no question" if number >= 1 else f"proposition_id {number} is below 1")
    position = token_position(proposition_words(keywords, row["tuple"]), prompt, tokenizer)
    category, detail = row["category_broad"].strip(), row["category_detailed"].strip()
    return Proposition(number, parents, category, detail, question, band(position))


def _drop_ungrounded(numbered: dict[int, tuple[int, Proposition]]) -> list[BadRecord]:
    """Removes the propositions whose dependencies are missing or circular."""
    grounded: set[int] = set()
    while more := {
        number
        for number, (_, proposition) in numbered.items()
        if number not in grounded and grounded.issuperset(proposition.parents)
    }:
        grounded |= more
    dropped = [numbered.pop(number) for number in numbered.keys() - grounded]
    return [
        BadRecord(f"row {place}", "unusable dependency", f"{list(proposition.parents)} is missing or circular")
        for place, proposition in sorted(dropped, key=lambda row: row[0])
    ]


def proposition_words(keywords: str, published_tuple: str) -> tuple[str, ...]:
    """The words that name a proposition, in lower case: its keywords, or those in the brackets of its tuple.

    >>> proposition_words("", "attribute - color (truck, Red)")
    ('truck', 'red')
    """
    inside = re.search(r"\((.*)\)", published_tuple, re.DOTALL)
    for text in (keywords, inside[1] if inside else ""):
        # The s of a lion's mane is no word.
        if words := tuple(word for word in re.findall(r"\w+", clean(text)) if word != "s"):
            return words
    return ()


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
    return UNPLACED if position is None else BAND_NAMES[bisect_right(BANDS, position) - 1]
