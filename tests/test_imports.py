"""Imports point one way: from `research` and `app` down to the core, and downwards inside each of these rooms."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from helpers.modules import MODULES, PACKAGE, RESEARCH, ROOMS, ROOT

from debias_diffusion.app.cli import COMMANDS
from debias_diffusion.errors import EXTRAS

# Each layer may import those before it. A name stands for a module, or for a package with all that is in it.
LAYERS = (
    ("errors", "limits", "devices", "machine"),
    ("registry", "method_settings"),
    ("files",),
    ("jobs",),
    ("processes",),
    ("text",),
    ("toyworld",),
    ("clip",),
    ("ablation.suppression", "ablation.heads", "ablation.saved"),
    ("encoders",),
    ("data",),
    ("methods",),
    ("training",),
    ("ablation",),
    tuple(f"pipelines.rendering.{name}" for name in ("options", "loras", "prompts", "checkpoints")),  # for `tokens`
    ("pipelines",),
    ("eval.intervals", "eval.report"),
    ("eval.session", "eval.image_features", "eval.images.rendered"),
    ("eval.options",),
    ("eval.retrieval", "eval.retrieval_examples", "eval.growth", "eval.image_maps", "eval.multimodal", "eval.judge"),
    ("eval.robustness", "eval.attention", "eval.classification", "eval.images"),
    ("eval.registry",),
    ("eval",),
    ("app",),
    ("__main__",),
    ("research",),
)
EVERYTHING = MODULES | RESEARCH


def imports(name: str, path: Path) -> set[str]:
    """Our modules that a module imports, anywhere in it, whether or not only for type checkers, or names for import."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    text, found = path.read_text(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: -node.level + 1 or None] if node.level else []
            source = ".".join([*parts, *filter(None, [node.module])])
            found |= {f"{source}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module, is_reference, _ = node.value.lstrip(".").partition(":")
            if is_reference or "import_module" in text:
                parent = name.partition(".")[0] if is_reference else package
                found |= {module, f"{parent}.{module}"} & EVERYTHING.keys()
    top = {imported.partition(".")[0] for imported in found}
    assert not top & set(ROOMS), f"{name}: name a room {PACKAGE}.{top & set(ROOMS)}"
    ours = {imported for imported in found if imported.partition(".")[0] in (PACKAGE, "research")} - {PACKAGE}
    return {imported if imported in EVERYTHING else imported.rpartition(".")[0] for imported in ours} - {name}


def layer(name: str) -> int | None:
    """The number of a module's layer: the one that names it, or the innermost package around it."""
    inner = name.removeprefix(f"{PACKAGE}.")
    while inner:
        for number, names in enumerate(LAYERS):
            if inner in names:
                return number
        inner = inner.rpartition(".")[0]
    return None


GRAPH = {name: imports(name, path) for name, path in EVERYTHING.items()}


def test_every_module_has_a_layer_and_no_import_points_upward():
    assert len(GRAPH) > 100
    assert [name for name in GRAPH if layer(name) is None] == [PACKAGE]
    edges = [(name, imported) for name in GRAPH.keys() - {PACKAGE} for imported in GRAPH[name]]
    assert [edge for edge in edges if layer(edge[1]) > layer(edge[0])] == []


def test_no_modules_import_each_other_in_a_circle():
    inits = {name for name, path in EVERYTHING.items() if path.name == "__init__.py"}
    graph = {name: names - inits for name, names in GRAPH.items() if name not in inits}
    TopologicalSorter(graph).prepare()


def test_extras_install_what_is_optional_and_commands_name_one():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for library, extra in EXTRAS.items():
        assert any(line.replace("-", "_").startswith(library) for line in extras[extra]), library
    assert {COMMANDS[name].extra for name in ("export", "generate")} == {""}
