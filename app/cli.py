"""`debias-diffusion`: quickstart, train, export, generate, shards, evaluate, app.

Each command's options are the fields of one dataclass, whose docstring is their help. Values come from YAML
(`--config file.yaml`) and from the command line, the later the stronger.
"""

import argparse
import dataclasses
import errno
import io
import os
import re
import sys
import warnings
from importlib.metadata import version

from debias_diffusion.errors import UserError, near_matches, reason
from debias_diffusion.files import explain_full_disk

# command -> (summary, the function that gives (dataclass of options, what runs them)), or further commands. Functions,
# because importing what a command needs takes seconds, and only one command runs.


def _quickstart():
    from .quickstart import QuickstartConfig, quickstart

    return QuickstartConfig, quickstart


def _train():
    from debias_diffusion.training import TrainConfig, train

    return TrainConfig, train


def _export():
    from .export.command import ExportConfig, export

    return ExportConfig, export


def _generate():
    from .generate.command import GenerateConfig, generate

    return GenerateConfig, lambda config: print(f"Wrote {generate(config)}")


def _shards():
    from .shards import ShardsConfig, write_shards

    return ShardsConfig, write_shards


def _app():
    from .demo.launch import AppConfig, run_app

    return AppConfig, run_app


def _retrieval():
    from debias_diffusion.eval.text_image.retrieval import RetrievalConfig, evaluate_retrieval

    return RetrievalConfig, evaluate_retrieval


def _robustness():
    from debias_diffusion.eval.text_image.robustness import RobustnessConfig, evaluate_robustness

    return RobustnessConfig, evaluate_robustness


def _generation():
    from debias_diffusion.eval.pictures.generation import GenerationConfig, evaluate_generation

    return GenerationConfig, evaluate_generation


def _attention():
    from debias_diffusion.eval.text_image.attention import AttentionConfig, evaluate_attention

    return AttentionConfig, evaluate_attention


def _classification():
    from debias_diffusion.eval.text_image.classification import ClassificationConfig, evaluate_classification

    return ClassificationConfig, evaluate_classification


def _dpg_bench():
    from debias_diffusion.eval.pictures.dpg_bench import DpgBenchConfig, evaluate_dpg_bench

    return DpgBenchConfig, evaluate_dpg_bench


def _all():
    from debias_diffusion.eval.everything import AllConfig, evaluate_all

    return AllConfig, evaluate_all


def _report():
    from debias_diffusion.eval.merged_report import ReportConfig, evaluate_report

    return ReportConfig, evaluate_report


EVALUATIONS = {
    "all": ("all of these that the given things allow, and one page of them", _all),
    "retrieval": ("recall of retrieval with whole captions", _retrieval),
    "robustness": ("how shortsighted? Recall when sentences are moved, removed or come late", _robustness),
    "attention": ("how much the end of a text attends to each of its positions", _attention),
    "classification": ("zero-shot top-1 on ImageNet, its variants and CIFAR", _classification),
    "dpg-bench": ("what pictures of DPG-Bench's dense prompts show of what was asked", _dpg_bench),
    "generation": ("FID, DINO score and others of pictures drawn from captions", _generation),
    "report": ("one page of any number of results", _report),
}
COMMANDS = {
    "quickstart": ("train, draw and compare in a small world, in minutes and without downloads", _quickstart),
    "train": ("fine-tune a CLIP model on long captions, so that its text encoder reads all of them", _train),
    "export": ("write a text encoder, or both towers, for diffusers, ComfyUI, open_clip or transformers", _export),
    "generate": ("draw pictures from prompts of any length", _generate),
    "shards": ("write pairs as WebDataset shards of small images, which are trained on faster", _shards),
    "app": ("a page to try encoders on: what each makes of a prompt, and what it reads of it", _app),
    "evaluate": ("measure what an encoder reads: " + ", ".join(EVALUATIONS), EVALUATIONS),
}

# What needs no flag, where a command has it without a default.
POSITIONAL = {"prompt": "what to draw, in up to 20,000 characters", "folder": "folder with what `evaluate` wrote"}


# What the path that was given is to blame for, and no fault of the program's.
_PATHS_FAULT = {
    errno.EACCES,
    errno.EEXIST,
    errno.EFBIG,
    errno.EIO,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
    errno.EPERM,
    errno.EROFS,
}


def main(arguments: list[str] | None = None) -> None:
    """Runs one command. Exits with one message on stderr and 2 for whatever the user got wrong, 1 for what failed.

    When nobody reads its output any more (`| head`), a command does its work to the end, and its exit code is that of
    the work: what is written to files is not lost with what is printed.
    """
    _survive_closed_pipes()
    try:
        with explain_full_disk():
            _run("debias-diffusion", COMMANDS, sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        _fail(str(error), error.exit_code)
    except MemoryError as error:
        _fail(f"The machine's memory does not suffice ({reason(error)}).", exit_code=1)
    except OSError as error:
        if error.errno not in _PATHS_FAULT:
            raise
        place = f": {str(error.filename)!r}" if error.filename else ""
        _fail(f"A file or folder cannot be used ({error.strerror}{place}). Give another path, or mend this one.")
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        _leave(130)
    except Exception as error:
        from debias_diffusion.process_group import is_lost_connection

        if not is_lost_connection(error):
            raise
        print("error: Another process of this run has failed; it says why.", file=sys.stderr)
        _leave(1)


def _run(program: str, commands: dict, arguments: list[str]) -> None:
    """Finds the command in the first argument, or prints what there is to choose from."""
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help"):
        print(f"usage: {program} COMMAND [options]\n")
        width = max(map(len, commands)) + 2
        print("\n".join(f"  {name:<{width}}{summary}" for name, (summary, _) in commands.items()))
        print(f"\n`{program} COMMAND --help` lists a command's options.")
    elif first == "--version":
        print(f"debias-diffusion {version('debias-diffusion')}")
    elif first not in commands:
        raise UserError(
            f"Unknown command {first!r}.{near_matches(first, commands)} Choose one of: {', '.join(commands)}."
        )
    elif isinstance(commands[first][1], dict):
        _run(f"{program} {first}", commands[first][1], arguments[1:])
    else:
        options, command = commands[first][1]()
        _quiet_libraries()
        command(_parse(f"{program} {first}", commands[first][0], options, arguments[1:]))


def _parse(program: str, summary: str, options: type, arguments: list[str]):
    """The command line as an instance of the dataclass `options`."""
    from jsonargparse import ActionConfigFile, ArgumentParser

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None):
            _fail(_explain(str(message), program, [option[2:] for a in self._actions for option in a.option_strings]))

    fields = {field.name: field for field in dataclasses.fields(options)}
    parser = Parser(prog=program, description=summary[0].upper() + summary[1:] + ".")
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of the options below")
    positional = {name for name in POSITIONAL if name in fields and fields[name].default is dataclasses.MISSING}
    for name in positional:
        # Without a default, which would take the place of one from YAML.
        parser.add_argument(name, type=str, nargs="?", default=argparse.SUPPRESS, help=POSITIONAL[name])
    parser.add_class_arguments(options, as_group=False, skip=positional)
    flags = [name for name, field in fields.items() if field.type in (bool, "bool")]
    lists = [name for name, field in fields.items() if field.type in (list[str], "list[str]")]
    try:
        values = parser.parse_args(_normalise(arguments, flags, lists)).as_dict()
    except (ValueError, OverflowError, RecursionError) as error:  # of files and numbers that no parser takes
        _fail(f"The options cannot be read: {reason(error)}. `{program} --help` lists them.")
    missing = next(
        (name for name in positional if values.get(name) is None and fields[name].type in (str, "str")), None
    )
    if missing:
        _fail(f"{missing} is missing: give `{program} {missing.upper()}`, the {POSITIONAL[missing]}.")
    return options(**{name: values.get(name) for name in fields})


def _explain(message: str, program: str, known: list[str]) -> str:
    """A parser's message in one line: the nearest option where one is unknown, the type where a value does not fit."""
    message = re.sub(r"\s+", " ", message).strip()
    patterns = (
        r"[Uu]nrecognized arguments: --([\w-]+)",
        r"[Kk]ey ['\"]([\w.-]+)['\"] is not",
        r"Option '([\w.-]+)' is not",
    )
    unknown = next((match for pattern in patterns if (match := re.search(pattern, message))), None)
    if unknown:
        hint = near_matches(unknown[1].replace("-", "_"), known, most=2)
        return f"Unknown option {unknown[1]!r}.{hint} `{program} --help` lists all."
    literals = re.search(r"typing\.Literal\[(.*?)\]", message)
    types = re.findall(r"Expected an? <class '(\w+)'>", message)
    types += literals[1].replace("'", "").split(", ") if literals else []
    wrong = re.search(r'Parser key "(\w+)".*(?:Given|Got) value: (.*)', message)
    if wrong and "list" in types:
        return (
            f"{wrong[1]} must be names with commas between them, got {wrong[2]!r}. One with a comma or bracket is "
            f"given in quotes: --{wrong[1]} '[\"a,b\"]'."
        )
    if wrong and types:
        expected = " or ".join("null" if name == "NoneType" else name for name in types)
        return f"{wrong[1]} must be {expected}, got {wrong[2]!r}. `{program} --help` says more."
    return f"{message} (`{program} --help` lists the options)"


def _normalise(arguments: list[str], flags: list[str], lists: list[str]) -> list[str]:
    """`--check-data` as `--check_data=true`: dashes and underscores both work, and a flag needs no value.

    What is a list is given with commas: `--encoders a,b` as `--encoders=[a,b]`.
    """
    normalised, is_list = [], False  # whether this argument is the value of a list
    for position, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            following = arguments[position + 1] if position + 1 < len(arguments) else ""
            if name in flags and not equals and following.lower() not in ("true", "false"):
                equals, value = "=", "true"
            is_list = name in lists
            argument = f"--{name}{equals}{_bracketed(value) if is_list and equals else value}"
        elif is_list:
            argument, is_list = _bracketed(argument), False
        normalised.append(argument)
    return normalised


def _bracketed(value: str) -> str:
    return value if value.startswith("[") else f"[{value}]"


def _fail(message: str, exit_code: int = 2):
    """One message, no traceback."""
    print(f"error: {message}", file=sys.stderr)
    _leave(exit_code)


def _leave(code: int):
    if "torch" in sys.modules:  # else there are no other processes either, and its import would take seconds
        from debias_diffusion.process_group import leave

        leave(code)
    raise SystemExit(code)


class _Console(io.FileIO):
    """Standard output, or errors. Once nobody reads it any more, what is written to it is dropped."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def _survive_closed_pipes() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before the program began
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open to the end
        elif stream is getattr(sys, f"__{name}__"):
            stream.flush()
            setattr(
                sys,
                name,
                io.TextIOWrapper(
                    io.BufferedWriter(_Console(stream.fileno(), "w", closefd=False)),
                    encoding=stream.encoding,
                    errors=stream.errors,
                    line_buffering=stream.line_buffering,
                ),
            )


def _quiet_libraries() -> None:
    """Keeps libraries' remarks to developers off a user's screen; our own messages and progress bars stay."""
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


if __name__ == "__main__":
    main()
