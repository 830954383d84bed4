"""Names in the package, and the names of modules and files in the documentation."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from helpers.modules import MODULES, PACKAGE, ROOMS, ROOT

from debias_diffusion.app.cli import COMMANDS, EVALUATIONS

# Pronouns and participles that could name anything.
BANNED = {"its", "found", "told", "own", "what", "others"}
# A folder of commands has these.
REPEATED = {"__init__", "command", "options"}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "examples").glob("*.ipynb"))


def bound_names(tree: ast.AST) -> set[str]:
    """Every name that a module gives to a variable, attribute, argument, import, function or class."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def test_names_name_the_thing():
    bound = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in MODULES.values()
        for name in BANNED & bound_names(ast.parse(path.read_text()))
    }
    assert not bound, "\n".join(sorted(bound))


def test_bound_names_are_seen():
    code = "import a as its\nclass found:\n own: int\n def f(self, what, *told): self.others = what"
    assert bound_names(ast.parse(code)) >= BANNED


@pytest.mark.parametrize("room", (PACKAGE, *ROOMS))
def test_a_name_of_a_module_stands_once_in_its_room(room):
    count = Counter(path.stem for path in MODULES.values() if path.relative_to(ROOT).parts[0] == room)
    assert [name for name, times in count.items() if times > 1 and name not in REPEATED] == []


def missing_paths(text: str, folder: Path) -> set[str]:
    """Paths from the root of the repository, and targets of links from `folder`, that are not there."""
    paths = re.findall(
        rf"(?<![\w/.-])(?:{PACKAGE}|{'|'.join(ROOMS)}|tests|benchmarks|configs|docs|examples)/[\w./-]*\w", text
    )
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    return {path for path in paths if not (ROOT / path).exists()} | {
        link for link in links if not (folder / link).exists()
    }


def missing_names(text: str) -> set[str]:
    """Dotted names in the package that are neither a module nor a name in one."""
    names = re.findall(rf"\b{PACKAGE}(?:\.\w+)+", text)
    for module, imported in re.findall(rf"from ({PACKAGE}[\w.]*) import ([\w, ]+)", text):
        names += [f"{module}.{name.strip()}" for name in imported.split(",")]
    missing = set()
    for name in names:
        module, rest = name, set()
        while module not in MODULES:
            module, _, last = module.rpartition(".")
            rest.add(last)
        tree = ast.parse(MODULES[module].read_text())
        lazy = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}  # as in `__all__`
        if rest - bound_names(tree) - lazy:
            missing.add(name)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_pages_name_what_exists(page):
    text = page.read_text()
    assert not missing_paths(text, page.parent) and not missing_names(text)
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text):
        if "://" not in link:
            target = (page.parent / link).read_text() if link else text
            anchors = {heading(line) for line in re.findall(r"^#+ (.*)", target, re.MULTILINE)}
            anchors |= set(re.findall(r'<a id="([^"]+)">', target))
            assert anchor in anchors, f"{link}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_pages_name_commands_that_exist(page):
    for command, kind in re.findall(r"(?:debias-diffusion|app\.cli) ([a-z]+)(?: ([a-z-]+))?", page.read_text()):
        assert command in COMMANDS
        assert command != "evaluate" or kind in ("", *EVALUATIONS)


def heading(title: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower().strip()).replace(" ", "-")


def test_missing_names_are_seen():
    text = "`eval/nothing.py` [x](y.md) [z](README.md) debias_diffusion.tokens.nothing debias_diffusion.tokens.clean"
    assert missing_paths(text, ROOT) == {"eval/nothing.py", "y.md"}
    assert missing_names(text) == {"debias_diffusion.tokens.nothing"}
