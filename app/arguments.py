"""Reads a command line, and the YAML files that it names, into the fields of a dataclass."""

import argparse
import dataclasses
import re
from typing import Any, get_type_hints

from debias_diffusion.errors import UserError, near_matches, reason

from .command_help import POSITIONAL, VALUES, accepted_names, flag, is_flag, is_list, positional_names


def asks_for_help(arguments: list[str]) -> bool:
    """Whether -h or --help is among the arguments."""
    return bool({"-h", "--help"} & set(arguments))


def parse(program: str, options: type, arguments: list[str], example: str) -> dict[str, Any]:
    """The values of the dataclass's fields.

    Options may be written with - or _, as flags (`--low-memory`, `--no-low-memory`), and by their aliases.

    Args:
        program: the words that start the command, for messages.
        options: the dataclass.
        example: arguments to name where something is missing.

    Raises:
        UserError: an argument cannot be read, is unknown or is missing.
        SystemExit: the options were asked for, and are printed.
    """
    from jsonargparse import ActionConfigFile, ArgumentParser

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None):
            raise UserError(_explain(str(message), program, options, example))

    fields = {field.name: field for field in dataclasses.fields(options)}
    parser = Parser(prog=program)
    parser.add_argument("--config", action=ActionConfigFile)
    positional = positional_names(options)
    for name in positional:
        # A default would replace the value from YAML.
        parser.add_argument(name, type=str, nargs="?", default=argparse.SUPPRESS)
    parser.add_class_arguments(options, as_group=False, skip=set(positional))
    try:
        values = parser.parse_args(_normalise(arguments, options)).as_dict()
    except UserError:
        raise
    except (ValueError, OverflowError, RecursionError) as error:  # from files and numbers that break the parsers
        raise UserError(f"The options cannot be read: {reason(error)}. `{program} --help` lists them.") from error
    hints = get_type_hints(options)
    for name in positional:
        if values.get(name) is None and hints[name] is str:
            raise UserError(
                f"{name} is missing: give `{program} {name.upper()}`, the {POSITIONAL[name]}. For example: "
                f"{program} {example}"
            )
    return {name: values.get(name) for name in fields}


def _explain(message: str, program: str, options: type, example: str) -> str:
    """Rewrites a parser's message as one line that names the nearest option, or the expected type."""
    message = re.sub(r"\s+", " ", message).strip()
    patterns = (
        r"[Uu]nrecognized arguments: --([\w-]+)",
        r"[Kk]ey ['\"]([\w.-]+)['\"] is not",
        r"Option '([\w.-]+)' is not",
    )
    unknown = next((match for pattern in patterns if (match := re.search(pattern, message))), None)
    if unknown:
        name, names = unknown[1].replace("-", "_"), accepted_names(options)
        hint = f" In a file it is {names[name]}." if name in names else near_matches(name, names, most=2)
        return f"Unknown option {unknown[1]!r}.{hint} `{program} --help` lists all."
    if missing := re.search(r"required: (.*)", message):
        return _missing(re.findall(r"\w+", missing[1]), program, options, example)
    literals = re.search(r"typing\.Literal\[(.*?)\]", message)
    types = re.findall(r"Expected an? <class '(\w+)'>", message)
    types += literals[1].replace("'", "").split(", ") if literals else []
    wrong = re.search(r'Parser key "(\w+)".*(?:Given|Got) value: (.*)', message)
    if wrong and "list" in types:
        return (
            f"{wrong[1]} must be names with commas between them, got {wrong[2]!r}. Quote a name that contains a comma "
            f"or bracket: --{wrong[1]} '[\"a,b\"]'."
        )
    if wrong and types:
        expected = " or ".join("null" if name == "NoneType" else name for name in types)
        return f"{wrong[1]} must be {expected}, got {wrong[2]!r}. `{program} --help` says more."
    return f"{message} (`{program} --help` lists the options)"


def _missing(names: list[str], program: str, options: type, example: str) -> str:
    flags = [flag(name, options) for name in names]
    listed = " and ".join([", ".join(flags[:-1]), flags[-1]] if len(flags) > 1 else flags)
    return f"{listed} {'are' if len(flags) > 1 else 'is'} missing. For example: {program} {example}"


def _normalise(arguments: list[str], options: type) -> list[str]:
    """The arguments with one way to write each: `--check-data` becomes `--check_data=true`, `--encoders a b` (or
    `a,b`) becomes `--encoders=[a,b]`, an alias the field's name."""
    hints, names = get_type_hints(options), accepted_names(options)
    normalised, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*normalised, argument, *rest]
        if not argument.startswith("--"):
            normalised.append(argument)
            continue
        written, equals, value = argument[2:].partition("=")
        written = written.replace("-", "_")
        name = names.get(written, written)
        switched_off = names.get(written.removeprefix("no_")) if written.startswith("no_") else None
        if name not in hints and is_flag(hints.get(switched_off)) and not equals:
            name, value = switched_off, "false"
        elif is_flag(hints.get(name)) and not equals:
            value = rest.pop(0) if rest and rest[0].lower() in ("true", "false") else "true"
        elif is_list(hints.get(name)):
            value = _joined(value if equals else None, rest)
        elif not equals and name in hints and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        elif not equals:
            normalised.append(f"--{name}")
            continue
        normalised.append(f"--{name}={VALUES.get(name, {}).get(value, value)}")
    return normalised


def _joined(value: str | None, rest: list[str]) -> str:
    """The value of a list option, in brackets; without =, all arguments up to the next option are its values."""
    values = [] if value is None else [value]
    while value is None and rest and not rest[0].startswith("--"):
        values.append(rest.pop(0))
    return values[0] if values[:1] and values[0].startswith("[") else f"[{','.join(values)}]"
