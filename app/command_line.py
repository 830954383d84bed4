"""A command's parser, made from its dataclass of options: fields are options, docstrings are their help.

Options are written with dashes (`--batch-size 4`), lists with blanks (`--encoders a b`), flags as `--x` and `--no-x`.
YAML files have the names of the fields. Of several values of an option the last one given counts.
"""

import dataclasses
import inspect
import json
import re
from argparse import SUPPRESS
from typing import Any, get_args, get_origin, get_type_hints

from docstring_parser import parse as parse_docstring
from jsonargparse import ActionConfigFile, ActionYesNo, ArgumentError, ArgumentParser, DefaultHelpFormatter

from debias_diffusion.errors import UserError, near_matches, reason
from debias_diffusion.limits import refusal
from debias_diffusion.pipelines.rendering.options import Sampling
from debias_diffusion.text.options import LongPromptOptions

_POSITIONAL = ("prompt", "folder", "target")  # given without a flag
_FLAGS = {"import_file": "--import"}  # `import` can be no field
_BROKEN = (OSError, ValueError, OverflowError, RecursionError)  # from files and numbers that break the parsers


class _HelpFormatter(DefaultHelpFormatter):
    """Shows an option's default and not its Python type, which its values in the heading and its text say."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=26)

    def _get_help_string(self, action) -> str:
        default = action.default if isinstance(action.default, str) else json.dumps(action.default)
        return action.help if default in ("null", SUPPRESS, "") else f"{action.help} (default: {default})"


def make_parser(program: str, options: type, example: str) -> ArgumentParser:
    """A parser whose options are the fields of a dataclass; `make_options` checks that the required ones are given.

    Args:
        program: the words that start the command.
        options: the dataclass, whose docstring says what the command does. Its attribute `GROUPS`, {title: names of
            fields}, groups the options, if there is one; names of no field do not count. Options of
            `LongPromptOptions` and `Sampling` need no text of their own.
        example: arguments to start from.
    """
    explained = (LongPromptOptions, Sampling, *filter(dataclasses.is_dataclass, reversed(options.__mro__)))
    docs = [parse_docstring(cls.__doc__ or "") for cls in explained]
    texts = {param.arg_name: " ".join((param.description or "").split()) for doc in docs for param in doc.params}
    details = [docs[-1].short_description, *(doc.long_description or "" for doc in docs)]
    fields, hints = {field.name: field for field in dataclasses.fields(options)}, get_type_hints(options)
    own_first = dict.fromkeys(name for cls in options.__mro__ for name in inspect.get_annotations(cls))
    names = [name for name in own_first if name in fields]
    required = [name for name in names if _is_required(fields[name])]
    required.sort(key=lambda name: name not in _POSITIONAL)
    words = [f"[{name.upper()}]" if name in _POSITIONAL else f"{flag(name)} {name.upper()}" for name in required]
    parser = ArgumentParser(
        prog=program,
        usage=" ".join([program, *words, "[options]"]),
        description=" ".join(" ".join(details).split()),
        epilog=f"Example: {program} {example}",
        formatter_class=_HelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
        print_config="--print-config",
    )
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of these options.")
    groups = {
        name: title for title, names in getattr(options, "GROUPS", {}).items() for name in names if name in fields
    }
    targets = {title: parser.add_argument_group(title) for title in dict.fromkeys(groups.values())}
    for name in dict.fromkeys([*groups, *required, *names]):
        field, hint = fields[name], hints[name]
        target, is_list = targets.get(groups.get(name), parser), get_origin(hint) is list
        kind = get_args(hint)[0] if is_list else hint
        help_text = texts.get(name, "").replace("%", "%%")
        if name in required and name in _POSITIONAL:  # a default would replace the value of a file
            target.add_argument(name, nargs="*" if is_list else "?", default=SUPPRESS, help=help_text, type=kind)
            continue
        settings = {"help": help_text, "dest": name}
        if name in required:
            settings |= {"help": f"{help_text} (required)", "default": SUPPRESS}
        else:
            settings["default"] = field.default_factory() if field.default is dataclasses.MISSING else field.default
        if hint in (bool, bool | None):
            settings["action"] = ActionYesNo(no_prefix="no-")
        else:
            settings |= {"type": kind, **({"nargs": "+"} if is_list else {})}
        target.add_argument(flag(name), **settings)
    return parser


def parse(program: str, options: type, example: str, arguments: list[str]) -> Any:
    """An instance of the dataclass, from a command line and the files that it names; see `make_parser`."""
    try:
        values = make_parser(program, options, example).parse_args(arguments)
    except ArgumentError as error:
        raise UserError(_explain(str(error), program, options, example)) from error
    except _BROKEN as error:
        raise UserError(f"The options cannot be read: {reason(error)}. `{program} --help` lists them.") from error
    return make_options(options, values.as_dict(), f" For example: {program} {example}")


def make_options(options: type, values: dict[str, Any], advice: str = "") -> Any:
    """An instance of the dataclass from what a parser has read. Raises UserError for required options without value."""
    del values["config"]
    hints, missing = get_type_hints(options), []
    for field in filter(_is_required, dataclasses.fields(options)):
        if field.name not in values and field.name in _POSITIONAL and hints[field.name] is not str:
            values[field.name] = [] if get_origin(hints[field.name]) is list else None
        elif field.name not in values:
            missing.append(field.name.upper() if field.name in _POSITIONAL else flag(field.name))
    if missing:
        raise UserError(f"Missing: {', '.join(missing)}.{advice}")
    return options(**values)


def flag(name: str) -> str:
    """A field as its option is typed: --learning-rate."""
    return _FLAGS.get(name) or f"--{name.replace('_', '-')}"


def _explain(message: str, program: str, options: type, example: str) -> str:
    """A parser's message in one line that names the nearest option, or what is allowed."""
    message = " ".join(message.split())
    hints = get_type_hints(options, include_extras=True)
    if unknown := re.search(r"unrecognized arguments: --([\w-]+)|Option '([\w.-]+)' is not", message):
        names = [name if unknown[2] else name.replace("_", "-") for name in hints]
        name = unknown[1] or unknown[2]
        return f"Unknown option {name!r}.{near_matches(name, names, most=2)} `{program} --help` lists all."
    if words := re.search(r"unrecognized arguments: (.*)", message):
        words = f"{words[1][:80]!r} belongs to no option. Put text of several words in quotation marks."
        return f"{words} For example: {program} {example}"
    if wrong := re.search(r'Parser key "(\w+)".*(?:Given|Got) value: (.*)', message):
        return f"{refusal(wrong[1], wrong[2], hints[wrong[1]])} `{program} --help` says more."
    if "does not support item assignment" in message:  # jsonargparse, of text in place of a list
        return "A file gives a single value for a list: write the values of a list in brackets: [a, b]."
    return f"{message} (`{program} --help` lists the options)"


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
