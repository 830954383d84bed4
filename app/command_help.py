"""The help of a command: the fields of its dataclass of options, explained by its docstring."""

import dataclasses
import shutil
import textwrap
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docstring_parser import parse as parse_docstring

# Options without a default that may be given without a flag, and their help.
POSITIONAL = {
    "prompt": "what to generate, in up to 20,000 characters",
    "folder": "folder with what `evaluate` wrote",
    "target": "table-S4 and the like as --list names them; claims; all; several with commas",
}
# One name for one thing in every command, and other names that are read: of other programs, and of some dataclasses.
NAMES = {
    "batch": ("batch_size",),
    "import": ("import_file",),
    "learning_rate": ("lr",),
    "precision": ("dtype",),
    "steps": ("num_inference_steps",),
}
# By the name of the field, other words for its values.
VALUES = {
    "dtype": {"auto": "null", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"},
    "precision": {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"},
}
_MOST_COLUMNS = 110


def help_page(program: str, summary: str, options: type, example: str) -> str:
    """The help of a command.

    Args:
        program: the words that start it.
        options: its dataclass. Its attribute `GROUPS`, {title: names of fields}, orders the options, if there is one.
        example: arguments to start from.
    """
    columns = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
    fields = {field.name: field for field in dataclasses.fields(options)}
    positional = positional_names(options)
    required = [name for name in fields if is_required(fields[name]) and name not in positional]
    usage = [program, *(f"[{name.upper()}]" for name in positional)]
    usage += [f"{flag(name, options)} {_metavar(name, options)}" for name in required] + ["[options]"]
    lines = [*textwrap.wrap("usage: " + " ".join(usage), columns, subsequent_indent=" " * 7, break_on_hyphens=False)]
    lines += ["", *textwrap.wrap(f"{summary[0].upper()}{summary[1:]}.", columns), *_details(options, columns)]
    texts = _texts(options)
    for title, names in _groups(options, positional).items():
        lines += ["", f"{title}:"]
        for name in names:
            lines += _entry(_heading(name, options), _explained(fields[name], texts.get(name, ""), options), columns)
    for title, more in (options.more_help() if hasattr(options, "more_help") else {}).items():
        lines += ["", f"{title}:"]
        for heading, text in more.items():
            lines += _entry(heading, text, columns)
    lines += ["", "Of every command:"]
    lines += _entry("--config FILE", "YAML file with any of these options; options beside it count more.", columns)
    lines += _entry("--print-config", "Print all options as YAML, and do nothing else.", columns)
    lines += _entry("-h, --help", "Print this.", columns)
    return "\n".join([*lines, "", "Example:", f"  {program} {example}"])


def positional_names(options: type) -> list[str]:
    """The options of a command that may be given without a flag."""
    return [field.name for field in dataclasses.fields(options) if field.name in POSITIONAL and is_required(field)]


def is_required(field: dataclasses.Field) -> bool:
    """Whether an option has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def accepted_names(options: type) -> dict[str, str]:
    """{name that a user may give an option: name of the field}. The name of a field never means another one."""
    return {name: field.name for field in dataclasses.fields(options) for name in _names(field.name, options)}


def flag(name: str, options: type) -> str:
    """A field as its option is typed: --learning-rate."""
    return "--" + _names(name, options)[0].replace("_", "-")


def _names(field: str, options: type) -> list[str]:
    """The names of one option, the one that help shows first."""
    fields = {other.name for other in dataclasses.fields(options)} - {field}
    names = next(([name, *more] for name, more in NAMES.items() if field in (name, *more)), [field])
    return [name for name in names if name not in fields]


def is_flag(hint: Any) -> bool:
    """Whether a field is of two values, true and false."""
    return hint is bool


def is_list(hint: Any) -> bool:
    """Whether a field is a list of names."""
    return get_origin(hint) is list


def _groups(options: type, positional: list[str]) -> dict[str, list[str]]:
    """{title: fields}, where the fields without a group come last."""
    names = [field.name for field in dataclasses.fields(options)]
    groups = {title: list(group) for title, group in getattr(options, "GROUPS", {}).items()}
    grouped = {name for group in groups.values() for name in group}
    rest = [name for name in names if name not in grouped]
    if not groups:
        required = [field.name for field in dataclasses.fields(options) if is_required(field)]
        groups["Required"] = [name for name in rest if name in required and name not in positional]
        rest = [name for name in rest if name not in groups["Required"]]
    groups["Options"] = rest
    return {title: group for title, group in groups.items() if group}


def _heading(name: str, options: type) -> str:
    hint, option = get_type_hints(options)[name], flag(name, options)
    if name in positional_names(options):
        return name.upper()
    if is_flag(hint):
        return f"{option}, --no-{option[2:]}"
    if hint == dict[str, Any] | None:
        return f"{option}.NAME VALUE"
    more = [f"--{other.replace('_', '-')}" for other in _names(name, options)[1:]]
    return ", ".join([f"{option} {_metavar(name, options)}", *more])


def _metavar(name: str, options: type) -> str:
    """The values of an option, in a word: N, {eot,average}, N|auto."""
    hint = get_type_hints(options)[name]
    is_union = get_origin(hint) in (Union, UnionType)
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if is_union else [hint]
    words = [_word(kind, name, options) for kind in kinds]
    return "|".join(words).replace("{auto}", "auto")


def _word(kind: Any, name: str, options: type) -> str:
    if get_origin(kind) is Literal:
        short = {value: word for word, value in VALUES["dtype"].items()} if name == "dtype" else {}
        return "{" + ",".join(short.get(value, str(value)) for value in get_args(kind)) + "}"
    if is_list(kind):
        return "NAME [NAME ...]"
    if get_origin(kind) is tuple:
        return "[" + ",".join("X" * len(get_args(kind))) + "]"
    return {int: "N", float: "X"}.get(kind) or flag(name, options)[2:].replace("-", "_").upper()


def _texts(options: type) -> dict[str, str]:
    """The help of each field, from the docstrings of the dataclass and its bases."""
    texts = {}
    for cls in reversed(options.__mro__[:-1]):
        parsed = parse_docstring(cls.__doc__ or "")
        texts |= {param.arg_name: " ".join((param.description or "").split()) for param in parsed.params}
    return texts


def _explained(field: dataclasses.Field, text: str, options: type) -> str:
    """A field's help, and its default."""
    if field.name in positional_names(options):
        return POSITIONAL[field.name]
    if is_required(field):
        return f"{text} (required)"
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if default is None:
        return f"{text} (default: null)" if "null" in text else text
    return f"{text} (default: {_written(default)})"


def _written(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return f"[{','.join(map(_written, default))}]"
    if isinstance(default, list):
        return ",".join(map(_written, default)) or "none"
    return repr(default) if default == "" else f"{default:g}" if isinstance(default, float) else str(default)


def _details(options: type, columns: int) -> list[str]:
    """What the docstrings of the dataclass and its bases say after their first line, before the fields."""
    texts = [parse_docstring(cls.__doc__ or "").long_description or "" for cls in reversed(options.__mro__[:-1])]
    paragraphs = [" ".join(part.split()) for text in texts for part in text.split("\n\n") if part]
    return [line for paragraph in paragraphs for line in ("", *textwrap.wrap(paragraph, columns))]


def _entry(heading: str, text: str, columns: int) -> list[str]:
    indent = " " * 26
    lines = textwrap.wrap(
        text, columns, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    if len(heading) + 4 <= len(indent) and lines:
        return [f"  {heading}".ljust(len(indent)) + lines[0].lstrip(), *lines[1:]]
    return [f"  {heading}", *lines]
