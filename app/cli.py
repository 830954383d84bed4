"""The command line, `debias-diffusion`: its commands are those of `COMMANDS`."""

import os
import platform
import sys
import warnings
from importlib.metadata import distributions, version

from debias_diffusion.errors import EXTRAS, UserError, missing_library, reason
from debias_diffusion.eval.all_options import AllConfig, ReportConfig
from debias_diffusion.eval.registry import EVALUATIONS, TOY
from debias_diffusion.files import explain_full_disk
from debias_diffusion.registry import Command, Registry
from debias_diffusion.training.config import TrainConfig

from . import options, prompt_options


def evaluations() -> Registry[Command]:
    """The commands of `evaluate`: all evaluations in one, each by itself, and the page of results that are there."""
    every = Command(AllConfig, "eval.page:evaluate_all", TOY, "eval")
    report = Command(ReportConfig, "eval.page:evaluate_report", "scores", "eval")
    return Registry("evaluation", {"all": every, **EVALUATIONS, "report": report})


COMMANDS = Registry(
    "command",
    {
        "quickstart": Command(
            options.QuickstartConfig, "app.quickstart:quickstart", "--output runs/quickstart", "eval"
        ),
        "train": Command(
            TrainConfig,
            "training.two_tower:train",
            "--config configs/debias-clip-vit-b16.yaml --data captions.json --images images --output runs/a",
            "train",
        ),
        "align": Command(
            options.AlignConfig,
            "app.align.command:align",
            "--base sdxl --encoder runs/a --data captions.json --images images --output runs/b",
            "train",
        ),
        "export": Command(options.ExportConfig, "app.export:export", "--model runs/a --output my-encoder"),
        "comfyui": Command(
            options.ComfyUIConfig, "app.comfyui.write:write_node", "--output ComfyUI/custom_nodes/long_prompt"
        ),
        "generate": Command(
            prompt_options.GenerateConfig,
            "app.generate:generate",
            "'A red star above a blue ring.' --base toy/sdxl --output star.png",
        ),
        "check": Command(prompt_options.CheckConfig, "app.check:check", "--base toy/sdxl", "eval"),
        "tokens": Command(
            prompt_options.TokensConfig, "app.tokens:show_tokens", "'A red star above a blue ring.' --base toy/sdxl"
        ),
        "encode": Command(
            prompt_options.EncodeConfig,
            "app.encode:encode_captions",
            "--captions photos --base toy/sdxl --to diffusers --output runs/embeddings",
        ),
        "shards": Command(
            options.ShardsConfig,
            "app.shards:write_shards",
            "--data captions.json --images images --output shards",
            "train",
        ),
        "app": Command(
            prompt_options.AppConfig,
            "app.demo.launch:run_app",
            "--base toy/sdxl --encoders toy/clip toy/debias-clip",
            "app",
        ),
        "evaluate": evaluations,
    },
)


def main(arguments: list[str] | None = None, program: str = "debias-diffusion", commands: Registry = COMMANDS) -> None:
    """Runs one of the commands.

    Exits with 2 and one message on stderr if the user made a mistake, with 1 if the work failed, with 130 on Ctrl-C.
    """
    try:
        with explain_full_disk():
            _run(program, commands, sys.argv[1:] if arguments is None else arguments)
            print(end="", flush=True)  # so that a closed pipe is seen here, not when the interpreter ends
    except UserError as error:
        _fail(str(error), error.exit_code)
    except MemoryError as error:
        _fail(f"Out of memory ({reason(error)}).", exit_code=1)
    except BrokenPipeError:  # `| head` reads no more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave(1)
    except OSError as error:
        if error.errno is None:  # of a library, not of the system
            raise
        place = f": {str(error.filename)!r}" if error.filename else ""
        _fail(f"The system refuses it ({error.strerror}{place}). Fix it, or give another path.")
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        _leave(130)
    except Exception as error:
        from debias_diffusion.devices import is_lost_connection

        if not is_lost_connection(error):
            raise
        print("error: Another process of this run has failed; its own message says why.", file=sys.stderr)
        _leave(1)


def _run(program: str, commands: Registry, arguments: list[str]) -> None:
    """Runs the command named by the first argument, or lists the commands."""
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help"):
        group = f"Measure what an encoder reads: {', '.join(evaluations())}."
        print(f"usage: {program} COMMAND [options]\n")
        for name, command in commands.items():
            print(f"  {name:<{max(map(len, commands)) + 2}}{group if command is evaluations else command.summary}")
        print(f"\n`{program} COMMAND --help` lists a command's options.")
    elif first == "--version":
        print(_versions())
    elif (command := commands.find(first)) is evaluations:
        _run(f"{program} {first}", evaluations(), arguments[1:])
    else:
        _run_command(f"{program} {first}", command, arguments[1:])


def _versions() -> str:
    """What a bug report needs: versions of the package, of Python and of libraries that are installed, and devices."""
    import torch

    libraries = ("torch", "diffusers", "transformers", "accelerate", "open_clip_torch", "gradio")
    installed = {distribution.name: distribution.version for distribution in distributions()}
    named = ", ".join(f"{name} {installed[name]}" for name in libraries if name in installed)
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    devices += ["mps"] * torch.backends.mps.is_available() + [f"cpu ({os.cpu_count()} cores)"]
    system = f"Python {platform.python_version()}, {platform.platform()}"
    return "\n".join([f"debias-diffusion {version('debias-diffusion')}", system, named, ", ".join(devices)])


def _run_command(program: str, command: Command, arguments: list[str]) -> None:
    from .command_line import parse  # takes a tenth of a second, which a mistyped command need not wait for

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when a check of options, or the command, imports it
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        settings = parse(program, command.options, command.example, arguments)
        function = command.load()
        import transformers

        transformers.utils.logging.disable_progress_bar()  # ours stay
        function(settings)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        raise UserError(f"{missing_library(error, command.extra)}.") from error


def _fail(message: str, exit_code: int = 2):
    print(f"error: {message}", file=sys.stderr)
    _leave(exit_code)


def _leave(code: int):
    if "torch" in sys.modules:  # without it there are no other processes, and importing it takes seconds
        from debias_diffusion.devices import leave

        leave(code)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
