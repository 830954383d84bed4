"""`debias-diffusion`: its commands are those of `COMMANDS`.

Each command's options are the fields of one dataclass; its docstring is their help. Values come from YAML
(`--config file.yaml`) and from the command line; the last one given counts.
"""

import argparse
import dataclasses
import errno
import io
import os
import re
import sys
import warnings
from importlib import import_module
from importlib.metadata import version

from debias_diffusion.errors import UserError, near_matches, reason
from debias_diffusion.files import explain_full_disk

# command: (summary, "module:dataclass of options:function"), or (summary, further commands). Modules are named, not
# imported, because an import takes seconds and only one command runs.
EVALUATIONS = {
    "all": ("every evaluation that the options allow, and one page of all", "eval.everything:AllConfig:evaluate_all"),
    "retrieval": (
        "retrieval recall with whole captions",
        "eval.text_image.retrieval:RetrievalConfig:evaluate_retrieval",
    ),
    "robustness": (
        "how shortsighted? Recall when sentences are moved, removed or come late",
        "eval.text_image.robustness:RobustnessConfig:evaluate_robustness",
    ),
    "attention": (
        "how much EOT attends to each position of a text",
        "eval.text_image.attention:AttentionConfig:evaluate_attention",
    ),
    "classification": (
        "zero-shot top-1 on ImageNet, its variants and CIFAR",
        "eval.text_image.classification:ClassificationConfig:evaluate_classification",
    ),
    "cola": (
        "do objects keep their own attributes? Cola's pairs of images, and its classes",
        "eval.text_image.cola:ColaConfig:evaluate_cola",
    ),
    "dpg-bench": (
        "how much of DPG-Bench's dense prompts the generated images show",
        "eval.pictures.dpg_bench:DpgBenchConfig:evaluate_dpg_bench",
    ),
    "generation": (
        "FID, DINO score and others of images generated from captions",
        "eval.pictures.generation:GenerationConfig:evaluate_generation",
    ),
    "drift": (
        "how far hidden states have moved from those that SDXL's UNet was trained on",
        "eval.pictures.drift:DriftConfig:evaluate_drift",
    ),
    "report": ("one page of any number of results", "eval.merged_report:ReportConfig:evaluate_report"),
}
COMMANDS = {
    "quickstart": (
        "train, generate and compare in a toy world: minutes, no downloads",
        "app.quickstart:QuickstartConfig:quickstart",
    ),
    "train": (
        "fine-tune CLIP so that its text encoder reads long captions to the end",
        "training:TrainConfig:train",
    ),
    "align": (
        "fit text encoders to the frozen UNet of an SDXL that reads them",
        "app.align:AlignConfig:align",
    ),
    "ablate": ("find the attention heads of a CLIP that hurt, and quiet them", "app.ablate:AblateConfig:ablate"),
    "export": (
        "write a text encoder, or both towers, for diffusers, ComfyUI, open_clip or transformers",
        "app.export.command:ExportConfig:export",
    ),
    "comfyui": ("write ComfyUI's node for long prompts", "app.comfyui.command:ComfyUIConfig:write_node"),
    "generate": ("generate images from prompts of any length", "app.generate.command:GenerateConfig:generate"),
    "shards": (
        "write pairs as WebDataset shards of small images, which train faster",
        "app.shards:ShardsConfig:write_shards",
    ),
    "synthesize": (
        "write long captions for a folder of images with a multimodal model, and clean them",
        "app.synthesize:SynthesizeConfig:synthesize",
    ),
    "reproduce": (
        "regenerate a table of the papers, or test their claims, with real data or in the toy world",
        "app.reproduce:ReproduceConfig:reproduce",
    ),
    "app": (
        "a page for trying encoders: what each makes of a prompt, and what it reads of it",
        "app.demo.launch:AppConfig:run_app",
    ),
    "evaluate": ("measure what an encoder reads: " + ", ".join(EVALUATIONS), EVALUATIONS),
}

# Options without a default that may be given without a flag, and their help.
POSITIONAL = {
    "prompt": "what to generate, in up to 20,000 characters",
    "folder": "folder with what `evaluate` wrote",
    "target": "table-S4 and the like as --list names them; claims; all; several with commas",
}

# Errors of the path that the user gave, not of the program.
_PATH_ERRORS = {
    getattr(errno, name)
    for name in "EACCES EEXIST EFBIG EIO EISDIR ELOOP ENAMETOOLONG ENOTDIR ENOTEMPTY EPERM EROFS".split()
}


def main(arguments: list[str] | None = None) -> None:
    """Runs one command.

    Exits with 2 and one message on stderr if the user made a mistake, with 1 if the work failed, with 130 on Ctrl-C. If
    nobody reads the output any more (`| head`), the command still finishes its work and exits with the work's code.
    """
    _survive_closed_pipes()
    try:
        with explain_full_disk():
            _run("debias-diffusion", COMMANDS, sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        _fail(str(error), error.exit_code)
    except MemoryError as error:
        _fail(f"Out of memory ({reason(error)}).", exit_code=1)
    except OSError as error:
        if error.errno not in _PATH_ERRORS:
            raise
        place = f": {str(error.filename)!r}" if error.filename else ""
        _fail(f"A file or folder cannot be used ({error.strerror}{place}). Fix it, or give another path.")
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        _leave(130)
    except Exception as error:
        from debias_diffusion.process_group import is_lost_connection

        if not is_lost_connection(error):
            raise
        print("error: Another process of this run has failed; its own message says why.", file=sys.stderr)
        _leave(1)


def _run(program: str, commands: dict, arguments: list[str]) -> None:
    """Runs the command named by the first argument, or lists the commands."""
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
        summary, (module, options, function) = commands[first][0], commands[first][1].split(":")
        module = import_module(f"debias_diffusion.{module}")
        _quiet_libraries()
        getattr(module, function)(_parse(f"{program} {first}", summary, getattr(module, options), arguments[1:]))


def _parse(program: str, summary: str, options: type, arguments: list[str]):
    """Reads the command line into the dataclass `options`."""
    from jsonargparse import ActionConfigFile, ArgumentParser

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None):
            _fail(_explain(str(message), program, [option[2:] for a in self._actions for option in a.option_strings]))

    fields = {field.name: field for field in dataclasses.fields(options)}
    parser = Parser(prog=program, description=summary[0].upper() + summary[1:] + ".")
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of the options below")
    positional = {name for name in POSITIONAL if name in fields and fields[name].default is dataclasses.MISSING}
    for name in positional:
        # A default would replace the value from YAML.
        parser.add_argument(name, type=str, nargs="?", default=argparse.SUPPRESS, help=POSITIONAL[name])
    parser.add_class_arguments(options, as_group=False, skip=positional)
    flags = [name for name, field in fields.items() if field.type in (bool, "bool")]
    lists = [name for name, field in fields.items() if field.type in (list[str], "list[str]")]
    try:
        values = parser.parse_args(_normalise(arguments, flags, lists)).as_dict()
    except (ValueError, OverflowError, RecursionError) as error:  # from files and numbers that break the parsers
        _fail(f"The options cannot be read: {reason(error)}. `{program} --help` lists them.")
    for name in positional:
        if values.get(name) is None and fields[name].type in (str, "str"):
            _fail(f"{name} is missing: give `{program} {name.upper()}`, the {POSITIONAL[name]}.")
    return options(**{name: values.get(name) for name in fields})


def _explain(message: str, program: str, known: list[str]) -> str:
    """Rewrites a parser's message as one line that names the nearest option, or the expected type."""
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
            f"{wrong[1]} must be names with commas between them, got {wrong[2]!r}. Quote a name that contains a comma "
            f"or bracket: --{wrong[1]} '[\"a,b\"]'."
        )
    if wrong and types:
        expected = " or ".join("null" if name == "NoneType" else name for name in types)
        return f"{wrong[1]} must be {expected}, got {wrong[2]!r}. `{program} --help` says more."
    return f"{message} (`{program} --help` lists the options)"


def _normalise(arguments: list[str], flags: list[str], lists: list[str]) -> list[str]:
    """Turns `--check-data` into `--check_data=true`, and the list `--encoders a,b` into `--encoders=[a,b]`."""
    normalised, is_list = [], False  # is_list: this argument is the value of a list option
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
    """Exits with one message and no traceback."""
    print(f"error: {message}", file=sys.stderr)
    _leave(exit_code)


def _leave(code: int):
    if "torch" in sys.modules:  # without it there are no other processes, and importing it takes seconds
        from debias_diffusion.process_group import leave

        leave(code)
    raise SystemExit(code)


class _Console(io.FileIO):
    """Standard output or error that drops what is written once nobody reads it any more."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return len(data)


def _survive_closed_pipes() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed before the program began
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - stays open
        elif stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = io.BufferedWriter(_Console(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, None, stream.line_buffering))


def _quiet_libraries() -> None:
    """Hides the libraries' warnings and progress bars; our messages and progress bars stay."""
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


if __name__ == "__main__":
    main()
