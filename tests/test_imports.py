import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Each room may import itself and those after it.
ROOMS = {"app": "app", "eval": "eval", "pipelines": "pipelines", "debias_diffusion": ""}


def imported_rooms(path: Path, room: str) -> set[str]:
    """The rooms that a module imports from."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            depth = len(path.relative_to(ROOT / room).parts)
            assert node.level <= depth, f"{path} reaches out of its folder with a relative import"
    rooms = set()
    for name in names:
        parts = name.split(".")
        if parts[0] == "debias_diffusion":
            rooms.add(parts[1] if len(parts) > 1 and parts[1] in ROOMS else "debias_diffusion")
        assert parts[0] not in ("app", "eval", "pipelines"), f"{path} imports {name}: name it debias_diffusion.{name}"
    return rooms


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room):
    order = list(ROOMS)
    modules = list((ROOT / room).rglob("*.py"))
    assert modules
    for path in modules:
        backwards = imported_rooms(path, room) & set(order[: order.index(room)])
        assert not backwards, f"{path.relative_to(ROOT)} imports from {backwards}"


def test_the_rule_sees_what_it_forbids(tmp_path):
    module = tmp_path / "x.py"
    module.write_text("from debias_diffusion.app import cli\nimport debias_diffusion.eval.common.report\n")
    assert imported_rooms(module, "pipelines") == {"app", "eval"}


def test_one_name_is_installed_and_the_package_lists_every_folder():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert all(name.split(".")[0] == "debias_diffusion" for name in setuptools["packages"])
    folders = {
        ".".join(["debias_diffusion", *path.parent.relative_to(ROOT).parts]).replace(
            "debias_diffusion.debias_diffusion", "debias_diffusion"
        )
        for room in ROOMS
        for path in (ROOT / room).rglob("__init__.py")
    }
    assert folders == set(setuptools["packages"])
