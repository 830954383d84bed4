"""Every command line of README.md, CONTRIBUTING.md and docs/, read by its own parser, and every other block.

tests/slow/test_docs_examples.py runs what can be run.
"""

import ast
import json
import re
import shlex
from functools import cache
from importlib import import_module
from unittest.mock import patch

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from helpers.modules import ROOT
from helpers.pages import BLOCKS, PAGES, shell_commands
from torch.distributed.run import get_args_parser

from debias_diffusion import encoders
from debias_diffusion.app.cli import COMMANDS, EVALUATIONS
from debias_diffusion.app.command_line import flag, parse
from debias_diffusion.app.reproduce.papers import PaperTable, read_tables, read_yaml
from debias_diffusion.data import retrieval_layouts
from debias_diffusion.data.toy_scenes import is_toy_scenes, read_toy_scenes
from debias_diffusion.errors import UserError, near_matches
from debias_diffusion.eval import classification
from debias_diffusion.models.shipped import shipped

LANGUAGES = {"": "a drawing", "text": "not to be run", "mermaid": "a drawing", "bibtex": "tests/test_citation.py"}
SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
# ---- command lines


def command_of(arguments: list[str]):
    """(the words that start a command of ours, its entry, its arguments)"""
    program, commands, rest = "debias-diffusion", COMMANDS, list(arguments)
    while isinstance(commands, dict):
        name = rest.pop(0)
        if name not in commands:
            raise UserError(f"{program} has no command {name!r}.{near_matches(name, commands)}")
        program, commands = f"{program} {name}", commands[name]
    return program, commands, rest


def options_of(place: str) -> type:
    module, _, name = place.partition(":")
    return getattr(import_module(f"debias_diffusion.{module}"), name)


def check_ours(arguments: list[str]) -> None:
    """As the command line reads them, up to where the command's work begins; toy names and benchmarks exist."""
    program, command, rest = command_of(arguments)
    options = options_of(command.options)
    # Checks of some options read the SDXL checkpoint.
    values = parse(
        program, command.summary, options, command.example, [word.replace(SDXL, "toy/sdxl") for word in rest]
    )
    with patch.object(encoders, "_find", find_or_assume):
        options(**values)
    for name in ("base", "encoder", "encoder_2", "model", "encoders"):
        given = values.get(name) or []
        for model in [given] if isinstance(given, str) else given:
            shipped(model.rpartition(":")[2])
    check_toy_scenes(values.get("data") or "")
    if values.get("dataset"):
        known = classification.BENCHMARKS if command is EVALUATIONS["classification"] else retrieval_layouts.BENCHMARKS
        assert set([values["dataset"]] if isinstance(values["dataset"], str) else values["dataset"]) <= known.keys()
    if command is COMMANDS["reproduce"]:
        assert set(values["target"]) <= {"all", "claims", *tables(values.get("papers", "configs/papers"))}


def find_or_assume(name: str, find=encoders._find):
    """What lies under an encoder's name; runs, folders and files of the examples count as there."""
    try:
        return find(name)
    except UserError:
        if ":" in name or name.startswith("toy/"):
            raise
        return encoders.Kind.TRANSFORMERS, name, None


@cache
def check_toy_scenes(data: str) -> None:
    if is_toy_scenes(data):
        read_toy_scenes(data)


@cache
def tables(papers: str = "configs/papers") -> dict[str, PaperTable]:
    return read_tables(ROOT / papers)


def check_launched(parser, words: list[str]) -> None:
    """A launcher of several processes, by its own parser."""
    parsed = parser.parse_args(words)
    assert parsed.module and parsed.training_script in ("debias_diffusion", "debias_diffusion.app.cli")
    check_ours(parsed.training_script_args)


def check_script(words: list[str]) -> None:
    """A program of the repository: its options are those that its source names."""
    if words[0] == "-m":
        words = [word for word in words[2:] if word.endswith(".py")]
    source = (ROOT / words[0]).read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    adding = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    known = {argument.value for call in adding for argument in call.args if isinstance(argument, ast.Constant)}
    options = (call.keywords for call in calls if getattr(call.func, "id", "") == "read_options")
    known |= {f"--{option.arg.replace('_', '-')}" for keywords in options for option in keywords}
    assert not {word for word in words if word.startswith("--")} - known


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w./-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(words) <= targets


def check_pip(words: list[str]) -> None:
    settings = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2]
    extras = re.findall(r"^(\w+) = \[", settings.partition("\n[project.")[0], re.MULTILINE)
    # Editable: a Python started in the checkout would take its folder for the installed package, without pipelines.
    assert words[:2] == ["install", "-e"] and words[2] in (".", *(f".[{extra}]" for extra in extras))


PROGRAMS = {
    ("debias-diffusion",): check_ours,
    ("accelerate", "launch"): lambda words: check_launched(launch_command_parser(), words),
    ("torchrun",): lambda words: check_launched(get_args_parser(), words),
    ("python",): check_script,
    ("make",): check_make,
    ("pip",): check_pip,
}
SHELL = {"export", "for", "done", "wait", ".", "srun", "hf", ".ci/run"}


def check_command(words: list[str]) -> None:
    for start, check in PROGRAMS.items():
        if tuple(words[: len(start)]) == start:
            return check(words[len(start) :])
    assert words[0] in SHELL or re.match(r"[A-Z_]+=", words[0]), f"nothing here knows {words[0]!r}"


def sentences(page: str) -> str:
    """A page without its blocks."""
    return re.sub(r"^```.*?^```$", "", PAGES[page].read_text(), flags=re.MULTILINE | re.DOTALL)


def inline_commands(start: str) -> list[list[str]]:
    """The words of the commands in the sentences of all pages that begin with `start`."""
    spans = re.findall(rf"`({start} [^`]+)`", "".join(map(sentences, PAGES)))
    return [shlex.split(span.partition(" | ")[0]) for span in spans]


@pytest.fixture
def in_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("page", [name for name in PAGES if "bash" in {block.language for block in BLOCKS[name]}])
def test_command_lines_are_understood(page, in_repository, extended, monkeypatch):
    if page == "extending.md":
        monkeypatch.chdir(extended)
    for block in BLOCKS[page]:
        for words in shell_commands(block.code) if block.language == "bash" else []:
            try:
                check_command(words)
            except (UserError, AssertionError, SystemExit, OSError) as error:
                pytest.fail(f"{page}, line {block.line}: {shlex.join(words)}: {error}")


def test_commands_in_sentences_have_options_that_exist(in_repository):
    """They may leave out what a command requires, and its command: "COMMAND"."""
    given = [words for words in inline_commands("debias-diffusion") if words[1] != "COMMAND" and len(words) > 3]
    assert len(given) > 2
    for words in given:
        program, command, rest = command_of(words[1:])
        flags = {word[2:].partition("=")[0] for word in rest if word.startswith("--")}
        assert flags <= spellings(options_of(command.options)), program
    scripts = inline_commands("python")
    assert len(scripts) > 4
    for words in scripts:
        if words[1] != "-m":
            check_script(words[1:])


def spellings(options: type) -> set[str]:
    """Names of options as a command takes them."""
    names = {flag(name).removeprefix("--") for name in options.__dataclass_fields__} | {
        "help",
        "config",
        "print-config",
    }
    return names | {f"no-{name}" for name in names}


FOREIGN = {"mixed_precision", "main_process_port", "dependency", "logdir"}  # accelerate's, SLURM's, TensorBoard's
FOREIGN |= {"student_context_length", "extended_context_length"}  # of TULIP


def test_options_in_sentences_exist():
    entries = [entry for entry in (*COMMANDS.values(), *EVALUATIONS.values()) if not isinstance(entry, dict)]
    known = FOREIGN.union(*(spellings(options_of(entry.options)) for entry in entries))
    for page in PAGES:
        spans = re.findall(r"`((?!python |make )[^`]*)`", sentences(page))
        flags = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", " ".join(spans)))
        assert flags <= known, page


@pytest.mark.parametrize(
    "line",
    [
        "debias-diffusion train --config configs/debias-clip-vit-b16.yaml --epocs 3",
        "debias-diffusion train --config configs/debias-clip-vit-c16.yaml",
        "debias-diffusion train --config configs/debias-clip-vit-b16.yaml --recipe debias",
        "debias-diffusion generate 'a star' --base toy/sdxll",
        "debias-diffusion generate 'a star' --base toy/sdxl --steps many",
        "debias-diffusion reproduce table-S44 --plan",
        "debias-diffusion evaluate robust --encoders toy/clip",
        "debias-diffusion evaluate robustness --encoders toy/clap --data toy/test --output scores",
        "debias-diffusion evaluate robustness --encoders toy/clip --data toy/tests --output scores",
        "debias-diffusion evaluate retrieval --encoders toy/clip --dataset coco,docki --root data --output scores",
        "accelerate launch --multi_gpus -m debias_diffusion train --config configs/debias-clip-vit-b16.yaml",
        "accelerate launch -m debias_diffusion train --config configs/debias-clip-vit-b16.yaml --epocs 3",
        "srun bash -c 'X=1 torchrun --nnodes 2 \\\n -m debias_diffusion train --config configs/none.yaml'",
        "for i in $(seq $((2 * 3))); do nice -n 9 debias-diffusion app --prot 1 & done; wait  # it's ours",
        "python benchmarks/studies/reading.py --promts 3",
        "python benchmarks/none.py",
        "make tests",
        'pip install -e ".[trains]"',
        'pip install ".[train]"',
        "frobnicate --all",
    ],
)
def test_a_wrong_command_line_is_seen(line, in_repository, capsys):
    with pytest.raises((UserError, AssertionError, SystemExit, OSError)):
        for words in shell_commands(line):
            check_command(words)


# ---- blocks of other languages


def test_every_block_names_its_language_and_data_can_be_read(tmp_path):
    for page, blocks in BLOCKS.items():
        assert PAGES[page].read_text().count("```") == 2 * len(blocks), page
    for block in (block for blocks in BLOCKS.values() for block in blocks):
        if block.language == "json":
            json.loads(block.code)
        elif block.language == "yaml":
            assert yaml.safe_load(block.code)
            (file := tmp_path / "table-X.yaml").write_text(block.code)
            assert read_yaml(file, PaperTable).rows  # the one kind of YAML that the pages show
        else:
            assert block.language in {"python", "bash", *LANGUAGES}, f"{block.page}, line {block.line}"
