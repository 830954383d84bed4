"""Files of prompts: one a line, JSON lines, or CSV. Invalid entries are skipped and reported with their lines."""

import csv
import io
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from debias_diffusion.data.bad_records import printable
from debias_diffusion.data.captions import parse_object
from debias_diffusion.errors import UserError, explain_failure, quiet_logging, reason
from debias_diffusion.files import read_file
from debias_diffusion.pipelines.rendering.prompts import ImagePrompt, ImageTask
from debias_diffusion.text.tokens import clean

MAX_CHARACTERS = 20_000  # some 4,500 tokens, far more than one image can show
MAX_SEED = 2**63 - 1
_TEXTS = ("prompt", "negative_prompt", "prompt_2")
WILDCARD = r"__[\w/*~@-]{1,80}__"
_DYNAMIC = re.compile(rf"\{{[^{{}}]*\|[^{{}}]*\}}|{WILDCARD}")
SHEET = Path(__file__).with_name("sheet.yaml")
_COLUMNS = (*_TEXTS, "seed")
# By a name in lower case, without blanks, underscores and dashes.
_SPELLINGS = {name.replace("_", ""): name for name in _COLUMNS} | {
    "positive": "prompt",
    "positiveprompt": "prompt",
    "negative": "negative_prompt",
}
_SHAPES = (
    'a .txt of one prompt a line, a .jsonl of lines like {"prompt": "a cat", "negative_prompt": "grey", "seed": 7}, or '
    "a .csv with such columns"
)


def check_text(name: str, text: str) -> None:
    """Raises UserError for a prompt that is too long or cannot be encoded as UTF-8."""
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"The {name} has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read. Shorten it.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"The {name} holds {text[error.start]!r}, which is no character. Write it as UTF-8.") from error


def check_prompt(text: str) -> None:
    """Raises UserError for a prompt that is empty, too long, or cannot be encoded as UTF-8."""
    check_text("prompt", text)
    if not clean(text):
        raise UserError("The prompt is empty. Say what to draw.")


def sheet_prompts() -> dict[str, str]:
    """The eight prompts of `check` by their names; some are the demo's examples."""
    entries = yaml.safe_load(read_file(SHEET)).items()
    return {name.replace("_", " ").capitalize(): " ".join(entry["sentences"]) for name, entry in entries}


def read_prompts(
    path: str | os.PathLike, seed: int = 0, negative_prompt: str | None = None
) -> tuple[list[ImageTask], dict[str, str]]:
    """Reads a .txt, .jsonl or .csv of prompts, in UTF-8.

    Args:
        seed: of the first entry; each has the next one, unless it names one.
        negative_prompt: of entries that name none.

    Returns:
        the first image of each valid entry, named by the entry's index from 0 in five digits (invalid entries count,
        blank lines do not) and placed in words, "line 3"; what is wrong with the others by their place, in file order

    Raises:
        OSError: the file cannot be read.
        UserError: it is of another kind, a CSV is broken or has other columns, or no entry is valid.
    """
    path = Path(path)
    if path.suffix.lower() not in _READERS:
        raise UserError(f"The file of prompts {str(path)!r} ends in {path.suffix!r}. Give {_SHAPES}.")
    text = read_file(path).decode("utf-8-sig", errors="surrogateescape")  # which `check_text` refuses by entry
    (entries, parse), prompts, left_out = _READERS[path.suffix.lower()], [], {}
    for number, (line, entry) in enumerate(entries(path, text)):
        try:
            prompt = _prompt(parse(entry), ImagePrompt("", seed + number, negative_prompt))
            prompts.append(ImageTask(f"{number:05}", prompt, f"line {line}"))
        except ValueError as error:
            left_out[f"line {line}"] = printable(str(error))
    if not prompts:
        first = next((f" The first fault: {where}: {why}" for where, why in left_out.items()), "")
        raise UserError(f"The file of prompts {str(path)!r} holds no usable prompt.{first} Give {_SHAPES}.")
    return prompts, left_out


def _lines(path: Path, text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if line.strip():
            yield number, line.strip()


def _csv_entries(path: Path, text: str) -> Iterator[tuple[int, dict]]:
    """A broken row ends the file: where the next one begins is a guess, and skipping it could drop many prompts."""
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        names = next(rows, [])
        while names and not names[-1].strip():  # rows may end with commas
            names.pop()
        header = _columns(names)
        if "prompt" not in header:
            raise UserError("There is no column 'prompt'.")
        line = rows.line_num + 1
        for row in rows:
            if "".join(row[len(header) :]).strip():
                raise csv.Error(f"it has {len(row)} cells, and the first line names {len(header)} columns")
            entry = {name: cell for name, cell in zip(header, row, strict=False) if cell.strip()}
            if entry:
                yield line, entry
            line = rows.line_num + 1
    except (csv.Error, UserError) as error:
        raise UserError(
            f"The file of prompts {str(path)!r} is no CSV at line {rows.line_num}: {reason(error)}. Name columns in "
            "the first line, with commas between them; write a quotation mark within a cell twice."
        ) from error


def _columns(names: Iterable[str]) -> list[str]:
    """The columns that names mean, as other programs spell them. Raises UserError for any that is not read."""
    columns: list[str] = []
    for name in names:
        column = _SPELLINGS.get(re.sub(r"[\s_-]", "", name).lower())
        if column is None:
            raise UserError(
                f"{name[:80]!r} is not read, only {', '.join(_COLUMNS)}. Leave it out; steps, size and the like are "
                "options of the command, for all images."
            )
        if column in columns:
            raise UserError(f"The {column} is given twice, the second time as {name[:80]!r}. Leave one out.")
        columns.append(column)
    return columns


# What finds the entries of a file with their lines, and what makes values by column of one.
_READERS: dict[str, tuple[Callable[[Path, str], Iterator[tuple[int, Any]]], Callable[[Any], dict]]] = {
    ".txt": (_lines, lambda line: {"prompt": line}),
    ".jsonl": (_lines, parse_object),
    ".csv": (_csv_entries, dict),
}


def _prompt(entry: dict, default: ImagePrompt) -> ImagePrompt:
    """An entry, with the default of what it does not say. Raises UserError."""
    entry = {name: value for name, value in entry.items() if value is not None}
    entry = dict(zip(_columns(entry), entry.values(), strict=True))
    if "prompt" not in entry:
        raise UserError(f"It has no prompt, only: {', '.join(entry) or 'nothing'}"[:200] + ".")
    for name in _TEXTS:
        if not isinstance(entry.get(name, ""), str):
            raise UserError(f"The {name} must be text, got {str(entry[name])[:80]!r}.")
        check_text(name, entry.get(name, ""))
        if "\0" in entry.get(name, ""):  # as text in UTF-16 does that is read as UTF-8
            raise UserError(f"The {name} holds the character '\\x00'. Write it as UTF-8.")
    texts = {name: entry[name].strip() for name in _TEXTS if name in entry}
    check_prompt(texts["prompt"])  # stripped: cleaning makes a text of some characters that are spaces
    texts["prompt_2"] = texts.get("prompt_2") or None
    return replace(default, **texts, seed=parse_seed(entry.get("seed", default.seed)))


def parse_seed(value) -> int:
    """A seed from a setting, JSON or a cell; whole numbers may end in ".0", as tables saved from pandas have them."""
    digits = str(value).strip().removesuffix(".0")
    if isinstance(value, bool) or not re.fullmatch("[0-9]{1,19}", digits) or int(digits) > MAX_SEED:
        raise UserError(f"The seed must be a whole number from 0 to 2^63 - 1, got {str(value)[:80]!r}.")
    return int(digits)


def expand(image: ImageTask, wildcards: Path) -> ImageTask:
    """Draws, by the image's seed, one of `{a|b}` in its texts, and for `__NAME__` a line of NAME.txt in a folder.

    Without dynamicprompts, which does it, a warning names that, and the texts stay as they are.
    """
    texts = {name: text for name in _TEXTS if _DYNAMIC.search(text := getattr(image.prompt, name) or "")}
    if not texts:
        return image
    try:
        from dynamicprompts import generators
        from dynamicprompts import wildcards as folders
    except ModuleNotFoundError as error:
        warnings.warn(f"{{a|b}} and __NAME__ are read as text: {reason(error)}.", stacklevel=2)
        return image
    with quiet_logging(), explain_failure(f"{{a|b}} or __NAME__ in {image.where} cannot be read"):
        manager, seed = folders.WildcardManager(wildcards), image.prompt.seed
        drawn = {
            name: generators.RandomPromptGenerator(manager, seed=seed).generate(text)[0] for name, text in texts.items()
        }
    for name, text in drawn.items():
        check_text(name, text)
    prompt = replace(image.prompt, **drawn)
    check_prompt(prompt.prompt)
    return replace(image, prompt=prompt)
