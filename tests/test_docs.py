"""The documentation as a reader uses it: commands parse, options and names exist, blocks can be read, links live.

tests/slow/test_docs_examples.py runs what can be run.
"""

import json
import re
import shlex
from functools import partial
from importlib import import_module
from pkgutil import resolve_name
from unittest.mock import patch

import pytest
import yaml
from helpers.modules import PACKAGE, ROOMS, ROOT
from helpers.pages import BLOCKS, PAGES, shell_commands
from PIL import Image

import debias_diffusion
from debias_diffusion import methods, pipelines
from debias_diffusion.app.cli import COMMANDS, evaluations
from debias_diffusion.app.command_line import parse
from debias_diffusion.app.options import AlignConfig
from debias_diffusion.encoders import spec as encoders
from debias_diffusion.encoders.resolve import Kind, Model, resolve
from debias_diffusion.errors import UserError
from debias_diffusion.eval.story import OWN_CUT, OWN_WHOLE
from debias_diffusion.toyworld.shipped import shipped
from debias_diffusion.training.config import TrainConfig
from research.__main__ import COMMANDS as RESEARCH
from research.evaluations.registry import EVALUATIONS as RESEARCH_EVALUATIONS
from research.options import AblateConfig
from research.reproduce.papers import read_tables
from research.studies.quickstart import NUMBERS, PICTURE

SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
TEXTS = {name: path.read_text() for name, path in PAGES.items()}


# ---- command lines


def check_ours(arguments: list[str], program: str = "debias-diffusion", commands: dict = COMMANDS) -> None:
    """As the command line reads them, up to where the command's work begins; toy models exist."""
    rest = list(arguments)
    command, program = commands[rest[0]], f"{program} {rest.pop(0)}"
    if command is evaluations:
        command, program = evaluations()[rest[0]], f"{program} {rest.pop(0)}"
    words = [word.replace(SDXL, "toy/sdxl") for word in rest]  # checks of some options read the SDXL checkpoint
    with patch.object(encoders, "resolve", find_or_assume):
        values = vars(parse(program, command.options, command.example, words))
    for name in ("base", "encoder", "encoder_2", "model", "encoders"):
        given = values.get(name) or []
        for model in [given] if isinstance(given, str) else given:
            shipped(model.rpartition(":")[2])
    if command is RESEARCH["reproduce"]:
        tables = read_tables(ROOT / values.get("papers", "research/papers"))
        assert set(values["target"]) <= {"all", "claims", *tables}


def find_or_assume(name: str) -> Model:
    """What lies under an encoder's name; runs, folders and files of the examples count as there."""
    try:
        return resolve(name)
    except UserError:
        if ":" in name or name.startswith("toy/"):
            raise
        return Model(Kind.TRANSFORMERS, name)


def check_make(words: list[str]) -> None:
    targets = {word for word in words if "=" not in word}
    assert targets <= set(re.findall(r"^([\w./-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


PROGRAMS = {
    ("debias-diffusion",): check_ours,
    ("accelerate", "launch"): lambda words: check_ours(words[words.index("-m") + 2 :]),
    ("torchrun",): lambda words: check_ours(words[words.index("-m") + 2 :]),
    ("python", "-m", "research"): partial(check_ours, program="python -m research", commands=RESEARCH),
    ("make",): check_make,
}
SHELL = set("export for done wait . srun python pip hf .ci/run git cd vllm llama-server".split())


def check_command(words: list[str]) -> None:
    for start, check in PROGRAMS.items():
        if tuple(words[: len(start)]) == start:
            return check(words[len(start) :])
    assert words[0] in SHELL or re.match(r"[A-Z_]+=", words[0]), f"nothing here knows {words[0]!r}"


@pytest.mark.parametrize("page", [name for name in PAGES if "bash" in {block.language for block in BLOCKS[name]}])
def test_command_lines_are_understood(page, extended, with_research, monkeypatch):
    monkeypatch.chdir(ROOT)
    if page == "extending.md":
        monkeypatch.chdir(extended)
    for block in BLOCKS[page]:
        for words in shell_commands(block.code) if block.language == "bash" else []:
            try:
                check_command(words)
            except (UserError, AssertionError, KeyError, SystemExit, OSError) as error:
                if "The SDXL checkpoint" in str(error) or "prompts.txt" in str(error):  # the reader has these
                    continue
                pytest.fail(f"{page}, line {block.line}: {shlex.join(words)}: {error}")


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_is_one_of_a_command_and_named(config):
    options = {"aat": AblateConfig, "align": AlignConfig}.get(config.stem.partition("-")[0], TrainConfig)
    values = vars(parse("", options, "", [f"--config={config}"]))
    assert values.keys() >= yaml.safe_load(config.read_text()).keys()
    assert any(config.name in text for text in TEXTS.values())


# ---- names and links


def anchors(page: str) -> set[str]:
    """Those that GitHub makes of headings, and those that stand in the text."""
    titles = re.findall(r"^#+ (.*)", page, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", title.lower().strip()).replace(" ", "-") for title in titles}
    return made | set(re.findall(r'<a id="([^"]+)">', page))


def missing(text: str, folder) -> set[str]:
    """Paths, targets of links from `folder`, and dotted names in the package that are not there."""
    places = rf"(?<![\w/.-])(?:{PACKAGE}|{'|'.join(ROOMS)}|research|tests|benchmarks|configs|docs|examples)/[\w./-]*\w"
    absent = {path for path in re.findall(places, text) if not (ROOT / path).exists()}
    for link, anchor in re.findall(r"\]\((?!\w+://)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        if not (folder / link).exists():
            absent.add(link)
        elif anchor and anchor not in anchors((folder / link).read_text() if link else text):
            absent.add(f"{link}#{anchor}")
    names = re.findall(rf"\b{PACKAGE}(?:\.\w+)+", text)
    for module, imported in re.findall(rf"from ({PACKAGE}[\w.]*) import ([\w, ]+)", text):
        names += [f"{module}.{name.strip()}" for name in imported.split(",")]
    for name in names:
        try:
            resolve_name(name)
        except (ImportError, AttributeError):
            absent.add(name)
    return absent


@pytest.mark.parametrize(
    "page", [*PAGES.values(), *sorted((ROOT / "examples").glob("*.ipynb"))], ids=lambda path: path.stem
)
def test_pages_name_what_exists(page):
    assert missing(page.read_text(), page.parent) == set()


@pytest.mark.parametrize(
    ("page", "package"),
    [("api", debias_diffusion), ("api-pipelines", pipelines), ("api-methods", methods), ("api-encoders", None)],
)
def test_the_reference_has_every_public_name(page, package):
    names = re.findall(r"^::: (debias_diffusion[\w.]*)\.(\w+)$", TEXTS[f"{page}.md"], re.MULTILINE)
    # None: its names are imported from their modules
    assert names and (package is None or {name for _, name in names} == set(package.__all__))
    for module, name in names:
        value = getattr(import_module(module), name)
        assert package is None or getattr(package, name) is value


def test_every_evaluation_has_its_row():
    rows = re.findall(r"^\| `([a-z-]+)[ `]", TEXTS["evaluation.md"] + TEXTS["research/evaluations.md"], re.MULTILINE)
    assert {*evaluations(), *RESEARCH_EVALUATIONS} <= set(rows)


def test_the_readme_has_the_numbers_of_the_quickstarts_picture():
    with Image.open(PICTURE) as image:
        right = json.loads(image.text[NUMBERS])
    [shown] = re.findall(r"!\[([^]]*)\]\(docs/quickstart.png\)", TEXTS["README.md"])
    assert re.findall(r"\d+%", shown) == [f"{right[label]:.0f}%" for label in (OWN_WHOLE, OWN_CUT)]
