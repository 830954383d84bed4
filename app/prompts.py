"""Files of prompts: one a line, JSON lines, or CSV. Invalid entries are skipped and reported with their lines."""

import csv
import io
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from debias_diffusion.data.bad_records import printable
from debias_diffusion.data.captions import parse_object, text_fault
from debias_diffusion.errors import UserError, explain_failure, quiet_logging, reason
from debias_diffusion.files import read_file, visible_files
from debias_diffusion.pipelines.rendering.prompts import ImagePrompt, ImageTask
from debias_diffusion.text.tokens import clean

MAX_SEED = 2**63 - 1
_TEXTS = ("prompt", "negative_prompt", "prompt_2")
_WILDCARD = re.compile(r"__[\w/*~@-]{1,80}__")
_DYNAMIC = re.compile(rf"\{{[^{{}}]*\||{_WILDCARD.pattern}")
# A LoRA's name may look like a wildcard, but `<lora:__NAME__:1>` and `<lora:{a|b}:1>` are what they look like.
_TAG = re.compile(r"<(?:lora|lyco):(?!__)[^<>{}]*>")
_HIDE = {code: 0xF0000 + code for code in range(128)}  # as characters for private use, which dynamicprompts leaves
_SHOW = {hidden: code for code, hidden in _HIDE.items()}
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
    """Raises UserError for a prompt that is too long or holds what is no character."""
    if fault := text_fault(text):
        raise UserError(f"The {name} {fault}.")


def check_prompt(text: str) -> None:
    """Raises UserError for a prompt that is empty, too long or holds what is no character."""
    check_text("prompt", text)
    if not clean(text):
        raise UserError("The prompt is empty. Say what to draw.")


def sheet_prompts() -> dict[str, str]:
    """The eight prompts of `check` by their names; some are the demo's examples."""
    entries = yaml.safe_load(read_file(SHEET)).items()
    return {name.replace("_", " ").capitalize(): " ".join(entry["sentences"]) for name, entry in entries}


def read_prompts(
    path: str | os.PathLike, seed: int = 0, negative_prompt: str | None = None, images_per_prompt: int = 1
) -> tuple[list[ImageTask], dict[str, str]]:
    """Reads a .txt, .jsonl or .csv of prompts, in UTF-8, as `expand` draws them. Prints which columns are not read.

    Args:
        seed: of the first entry; each has the next one, unless it names one.
        negative_prompt: of entries that name none.
        images_per_prompt: of each entry, with its seed, the next one, and so on.

    Returns:
        the images of each valid entry, named by the entry's index from 0 in five digits (invalid entries count, blank
        lines do not) and placed in words, "line 3"; what is wrong with the others by their place, in file order

    Raises:
        OSError: the file cannot be read.
        UserError: it is of another kind, a CSV is broken or has no prompts, or no entry is valid.
    """
    path = Path(path)
    if path.suffix.lower() not in _READERS:
        raise UserError(f"The file of prompts {str(path)!r} ends in {path.suffix!r}. Give {_SHAPES}.")
    text = read_file(path).decode("utf-8-sig", errors="surrogateescape")  # which `check_text` refuses by entry
    (entries, parse), images, left_out = _READERS[path.suffix.lower()], [], {}
    unread: dict[str, None] = {}
    for number, (line, entry) in enumerate(entries(path, text)):
        try:
            prompt = _prompt(parse(entry), ImagePrompt("", seed + number, negative_prompt), unread)
            parse_seed(prompt.seed + images_per_prompt - 1)  # of the last image
            images += [
                expand(ImageTask(f"{number:05}", replace(prompt, seed=each), f"line {line}"), path.parent / "wildcards")
                for each in range(prompt.seed, prompt.seed + images_per_prompt)
            ]
        except ValueError as error:
            left_out[f"line {line}"] = printable(str(error))
    if not images:
        first = next((f" The first fault: {where}: {why}" for where, why in left_out.items()), "")
        raise UserError(f"The file of prompts {str(path)!r} holds no usable prompt.{first} Give {_SHAPES}.")
    if unread:
        names = printable(", ".join(unread))[:300]
        print(f"Not read of {path}: {names}. Steps, size and the like are options of the command, for all images.")
    return images, left_out


def _lines(path: Path, text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if line.strip():
            yield number, line.strip()


def _csv_entries(path: Path, text: str) -> Iterator[tuple[int, dict]]:
    """A broken row ends the file: where the next one begins is a guess, and skipping it could drop many prompts."""
    separator = max(",;\t", key=io.StringIO(text, newline=None).readline().count)  # Excel's may be a semicolon
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        names = next(rows, [])
        while names and not names[-1].strip():  # rows may end with commas
            names.pop()
        if "prompt" not in _columns(names):
            raise UserError("There is no column 'prompt'.")
        line = rows.line_num + 1
        for row in rows:
            if "".join(row[len(names) :]).strip():
                raise csv.Error(f"it has {len(row)} cells, and the first line names {len(names)} columns")
            if entry := {name: cell for name, cell in zip(names, row, strict=False) if cell.strip()}:
                yield line, entry
            line = rows.line_num + 1
    except (csv.Error, UserError) as error:
        raise UserError(
            f"The file of prompts {str(path)!r} is no CSV at line {rows.line_num}: {reason(error)}. Name columns in "
            "the first line, with commas or semicolons between them; write a quotation mark within a cell twice."
        ) from error


def _columns(names: Iterable[str]) -> list[str | None]:
    """The columns that names mean, as other programs spell them. Raises UserError for one that is given twice."""
    columns = [_SPELLINGS.get(re.sub(r"[\s_-]", "", name).lower()) for name in names]
    if twice := [column for column in _COLUMNS if columns.count(column) > 1]:
        raise UserError(f"The {twice[0]} is given twice. Leave one out.")
    return columns


# What finds the entries of a file with their lines, and what makes values by column of one.
_READERS: dict[str, tuple[Callable[[Path, str], Iterator[tuple[int, Any]]], Callable[[Any], dict]]] = {
    ".txt": (_lines, lambda line: {"prompt": line}),
    ".jsonl": (_lines, parse_object),
    ".csv": (_csv_entries, dict),
}


def _prompt(entry: dict, default: ImagePrompt, unread: dict[str, None]) -> ImagePrompt:
    """An entry, with the default of what it does not say. Adds what is not read to `unread`. Raises UserError."""
    entry = {name: value for name, value in entry.items() if value is not None}
    columns = dict(zip(entry, _columns(entry), strict=True))
    unread |= dict.fromkeys(name for name, column in columns.items() if column is None)
    entry = {column: entry[name] for name, column in columns.items() if column}
    if "prompt" not in entry:
        raise UserError(f"It has no prompt, only: {', '.join(columns) or 'nothing'}"[:200] + ".")
    for name in _TEXTS:
        if not isinstance(entry.get(name, ""), str):
            raise UserError(f"The {name} must be text, got {str(entry[name])[:80]!r}.")
        check_text(name, entry.get(name, ""))
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


class _WildcardFile(NamedTuple):
    """A collection of wildcards, read when a prompt needs it. dynamicprompts' own drops bytes that are not UTF-8."""

    path: Path

    def get_values(self) -> list[str]:
        with explain_failure(f"The wildcards {str(self.path)!r} cannot be read", "Write them as UTF-8."):
            lines = _lines(self.path, read_file(self.path).decode("utf-8-sig"))
            return [_hide_tags(line) for _, line in lines if line[0] != "#"]


def _wildcards(folder: Path) -> dict[str, Any]:
    """The collections of a folder's files by name, as dynamicprompts finds them, without FIFOs, for which it waits."""
    from dynamicprompts.wildcards.collection.structured import parse_structured_file

    collections: dict[str, Any] = {}
    for file in map(PurePosixPath, visible_files(folder, follow_links=True)):
        if file.suffix == ".txt":
            collections[str(file.with_suffix(""))] = _WildcardFile(folder / file)
        elif file.suffix in (".json", ".yaml"):
            with explain_failure(f"The wildcards {str(folder / file)!r} cannot be read"):
                collections |= {str(file.parent / name): texts for name, texts in parse_structured_file(folder / file)}
    return collections


def expand(image: ImageTask, wildcards: Path) -> ImageTask:
    """Draws, by the image's seed, one of `{a|b}` in its texts, and for `__NAME__` a line of NAME.txt in a folder.

    Without dynamicprompts, which does it, a warning names that, and the texts stay as they are. Raises UserError for
    alternatives and files that cannot be read, and for a wildcard without texts, if there is such a folder.
    """
    texts = {name: text for name in _TEXTS if _DYNAMIC.search(text := _hide_tags(getattr(image.prompt, name) or ""))}
    if not texts:
        return image
    try:
        from dynamicprompts.generators import RandomPromptGenerator
        from dynamicprompts.wildcards import WildcardManager
    except ModuleNotFoundError as error:
        warnings.warn(f"{{a|b}} and __NAME__ are read as text: {reason(error)}.", stacklevel=2)
        return image
    with quiet_logging(), explain_failure(f"{{a|b}} or __NAME__ in {image.where} cannot be read"):
        has_wildcards = wildcards.is_dir() and any(map(_WILDCARD.search, texts.values()))
        manager = WildcardManager(root_map={"": [_wildcards(wildcards)]} if has_wildcards else None)
        seed = image.prompt.seed
        drawn = {name: RandomPromptGenerator(manager, seed).generate(text)[0] for name, text in texts.items()}
    for name, text in drawn.items():
        if has_wildcards and (left := _WILDCARD.search(text)):
            raise UserError(f"{left[0]!r} is in no regular file of {str(wildcards)!r}, or in an empty one.")
        drawn[name] = text.translate(_SHOW)
        check_text(name, drawn[name])
    prompt = replace(image.prompt, **drawn)
    check_prompt(prompt.prompt)
    return replace(image, prompt=prompt)


def _hide_tags(text: str) -> str:
    """Texts whose LoRA tags dynamicprompts takes for plain text."""
    return _TAG.sub(lambda tag: tag[0].translate(_HIDE), text)
