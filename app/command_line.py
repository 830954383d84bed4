"""A command's parser, made from its dataclass of options: fields are options, docstrings are their help.

Options are written with dashes (`--batch-size 4`), lists with blanks (`--encoders a b`), flags as `--x` and `--no-x`.
YAML files have the names of the fields.
"""

import dataclasses
import re
from argparse import SUPPRESS
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docstring_parser import Docstring
from docstring_parser import parse as parse_docstring
from jsonargparse import ActionConfigFile, ActionYesNo, ArgumentError, ArgumentParser, DefaultHelpFormatter

from debias_diffusion.errors import UserError, near_matches, reason
from debias_diffusion.limits import refusal

_POSITIONAL = ("prompt", "folder", "target")  # options without a default that are given without a flag
_FLAGS = {"import_file": "--import"}  # `import` can be no field
_BROKEN = (ValueError, OverflowError, RecursionError)  # from files and numbers that break the parsers


class _HelpFormatter(DefaultHelpFormatter):
    """Shows an option's default and not its Python type, which its values in the heading and its text say."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=26)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(super(_HelpFormatter, self)._fill_text(line, width, indent) for line in text.splitlines())

    def _get_help_string(self, action) -> str:
        if action.required:
            return f"{action.help} (required)"
        if action.default in (None, SUPPRESS):
            return action.help
        return f"{action.help} (default: {_written(action.default)})"


def make_parser(program: str, summary: str, options: type, example: str) -> ArgumentParser:
    """A parser whose options are the fields of a dataclass.

    Args:
        program: the words that start the command.
        summary: what it does.
        options: the dataclass. Its attribute `GROUPS`, {title: names of fields}, groups the options, if there is one.
        example: arguments to start from.
    """
    fields = {field.name: field for field in dataclasses.fields(options)}
    hints, texts = get_type_hints(options), _texts(options)
    groups = {name: title for title, names in getattr(options, "GROUPS", {}).items() for name in names}
    positional = [name for name in fields if _is_positional(fields[name])]
    required = [name for name in fields if _has_no_default(fields[name]) and name not in positional]
    usage = [f"[{name.upper()}]" for name in positional] + [f"{flag(name)} {name.upper()}" for name in required]
    parser = ArgumentParser(
        prog=program,
        usage=" ".join([program, *usage, "[options]"]),
        description=f"{summary[0].upper()}{summary[1:]}. {_details(options)}",
        epilog=f"Example: {program} {example}",
        formatter_class=_HelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
        print_config="--print-config",
    )
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of these options.")
    targets = {title: parser.add_argument_group(title) for title in dict.fromkeys(groups.values())}
    for name in (*groups, *(name for name in fields if name not in groups)):
        field, hint = fields[name], hints[name]
        target = targets.get(groups.get(name), parser)
        kind = get_args(hint)[0] if _is_list(hint) else hint
        settings = {"help": texts.get(name, "").replace("%", "%%"), "type": kind}
        if name in positional:  # a default would replace the value of a file
            target.add_argument(name, nargs="*" if _is_list(hint) else "?", default=SUPPRESS, **settings)
            continue
        if name in required:
            settings["required"] = True
        else:
            settings["default"] = field.default_factory() if field.default is dataclasses.MISSING else field.default
        if hint is bool:
            settings["action"] = ActionYesNo(no_prefix="no-")
            del settings["type"]
        else:
            settings |= {"metavar": _values(kind, name.upper())} | ({"nargs": "+"} if _is_list(hint) else {})
        target.add_argument(flag(name), dest=name, **settings)
    for title, texts in (options.more_help() if hasattr(options, "more_help") else {}).items():
        lines = (f"{heading}: {' '.join(text.split())}" for heading, text in texts.items())
        parser.add_argument_group(title, "\n".join(lines))
    return parser


def parse(program: str, summary: str, options: type, example: str, arguments: list[str]) -> dict[str, Any]:
    """The values of the dataclass's fields, from a command line and the files that it names.

    Raises:
        UserError: an argument cannot be read, is unknown or is missing.
        SystemExit: help or the options were asked for, and are printed.
    """
    parser = make_parser(program, summary, options, example)
    try:
        values = parser.parse_args(arguments).as_dict()
    except ArgumentError as error:
        raise UserError(_explain(str(error), program, options, example)) from error
    except _BROKEN as error:
        raise UserError(f"The options cannot be read: {reason(error)}. `{program} --help` lists them.") from error
    del values["config"]
    hints = get_type_hints(options)
    for field in dataclasses.fields(options):
        if _is_positional(field) and field.name not in values:
            if hints[field.name] is str:
                raise UserError(f"{field.name.upper()} is missing. For example: {program} {example}")
            values[field.name] = [] if _is_list(hints[field.name]) else None
    return values


def checked(options: type, values: dict[str, Any]) -> Any:
    """An instance of a dataclass of options, its values checked as those of a command line and a file are.

    Raises:
        UserError: a value cannot be used, is unknown or is missing.
    """
    try:
        values = make_parser("", "settings", options, "").parse_object(values).as_dict()
    except ArgumentError as error:
        raise UserError(f"Settings of {options.__name__} cannot be used: {reason(error)}") from error
    del values["config"]
    return options(**values)


def flag(name: str) -> str:
    """A field as its option is typed: --learning-rate."""
    return _FLAGS.get(name) or f"--{name.replace('_', '-')}"


def _explain(message: str, program: str, options: type, example: str) -> str:
    """A parser's message in one line that names the nearest option, the missing ones, or what is allowed."""
    message = " ".join(message.split())
    hints = get_type_hints(options, include_extras=True)
    if unknown := re.search(r"unrecognized arguments: --([\w-]+)|Option '([\w.-]+)' is not", message):
        names = [name if unknown[2] else name.replace("_", "-") for name in hints]
        name = unknown[1] or unknown[2]
        return f"Unknown option {name!r}.{near_matches(name, names, most=2)} `{program} --help` lists all."
    if missing := re.search(r"required: (.*)", message):
        flags = [flag(name) for name in missing[1].split(", ")]
        listed = " and ".join([", ".join(flags[:-1]), flags[-1]] if len(flags) > 1 else flags)
        return f"{listed} {'are' if len(flags) > 1 else 'is'} missing. For example: {program} {example}"
    if wrong := re.search(r'Parser key "(\w+)".*(?:Given|Got) value: (.*)', message):
        return f"{refusal(wrong[1], wrong[2], hints[wrong[1]])} `{program} --help` says more."
    if "does not support item assignment" in message:  # jsonargparse, of text in place of a list
        return "A file gives a single value for a list: write the values of a list in brackets: [a, b]."
    return f"{message} (`{program} --help` lists the options)"


def _is_positional(field: dataclasses.Field) -> bool:
    return field.name in _POSITIONAL and _has_no_default(field)


def _has_no_default(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _is_list(hint: Any) -> bool:
    return get_origin(hint) is list


def _values(hint: Any, text: str) -> str:
    """The values of an option in a word: N, {eot,average}, N|auto; `text` for any text."""
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, parts)) + "}"
    if get_origin(hint) is tuple:
        return "[" + ",".join(_values(part, text) for part in parts) + "]"
    if get_origin(hint) in (Union, UnionType):
        return "|".join(_values(part, text) for part in parts if part is not NoneType).replace("{auto}", "auto")
    return {int: "N", float: "X"}.get(hint, text)


def _texts(options: type) -> dict[str, str]:
    """The help of each field, from the docstrings of the dataclass and its bases."""
    params = [param for doc in _docstrings(options) for param in doc.params]
    return {param.arg_name: " ".join((param.description or "").split()) for param in params}


def _details(options: type) -> str:
    """What the docstrings of the dataclass and its bases say after their first line, before the fields."""
    return " ".join(" ".join(doc.long_description or "" for doc in _docstrings(options)).split())


def _docstrings(options: type) -> list[Docstring]:
    return [parse_docstring(cls.__doc__ or "") for cls in reversed(options.__mro__) if dataclasses.is_dataclass(cls)]


def _written(default: Any) -> str:
    if isinstance(default, list | tuple):
        return " ".join(map(_written, default)) or "none"
    if isinstance(default, bool):
        return str(default).lower()
    return repr(default) if default == "" else f"{default:g}" if isinstance(default, float) else str(default)
